"""What a sublayer reads, in one launch."""

from torch import Tensor

from phalanx.kernels.triton import hyper


def collapse_norm(h: Tensor, weights: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See `reference.hyper.collapse_norm`; bound as for `rows.rms_norm`."""
    x, _ = hyper.collapse_norm(h, weights, norm_weight, eps)
    return x
