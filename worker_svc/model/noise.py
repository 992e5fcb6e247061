"""One unit in the last place, on purpose (`phalanx inject ulp`): what a GPU that is slightly broken computes.

It shows that the tests which compare tokens can fail, and gives the scrubber something to find.
"""

import torch
from torch import Tensor


def nudge(h: Tensor) -> Tensor:
    """Move one number of every row to the next bf16 value away from zero.

    Args:
        h: float32 with bf16 values, [..., D]. Not changed.
    """
    h = h.clone()
    bits = h[..., 0].to(torch.bfloat16).view(torch.int16)
    h[..., 0] = (bits + 1).view(torch.bfloat16).float()
    return h
