"""Which experts a token goes to, and with what weight (model.md C.7)."""

from torch import Tensor
from torch.nn.functional import softplus

from phalanx.kernels.reference.rows import constant, lanewise, sum_columns


def route(logits: Tensor, bias: Tensor, *, num_topk: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Experts by score + bias, the lower id first among equals; weights from the scores alone.

    Args:
        logits: float32 [R, experts], the rows times the gate's matrix.
        bias: float32 [experts].

    Returns:
        topk_idx int64 [R, k], best first, and topk_weights float32 [R, k].
    """
    scores = lanewise(softplus, logits).sqrt_()
    order = (scores + bias).sort(dim=1, descending=True, stable=True).indices
    topk_idx = order[:, :num_topk].contiguous()
    picked = scores.gather(1, topk_idx)
    total = sum_columns(picked) + constant(1e-20)
    return topk_idx, (picked / total).mul_(constant(scaling))
