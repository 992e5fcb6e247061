"""What a sublayer reads, in one launch."""

from torch import Tensor

from phalanx.kernels.reference.hyper import Mix
from phalanx.kernels.triton import hyper


def collapse_norm(h: Tensor, weights: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See `reference.hyper.collapse_norm`; bound as for `rows.rms_norm`."""
    x, _ = hyper.collapse_norm(h, weights, norm_weight, eps)
    return x


def expand_collapse_norm(
    y: Tensor, h: Tensor, mixed: Mix, pre: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `reference.hyper.expand_collapse_norm`; the stream is equal, the bound as for `rows.rms_norm`."""
    h, x, _ = hyper.expand_collapse_norm(y, h, mixed, pre, norm_weight, eps)
    return h, x
