"""Values that formats may get wrong."""

import torch
from torch import Tensor


def patterns(device: torch.device, width: int) -> Tensor:
    """Finite bf16 values, in order and shuffled: all of them on a GPU, a sample in the interpreter."""
    x = torch.arange(0, 1 << 16, 1 if device.type == "cuda" else 61, dtype=torch.int32)
    x = x.to(torch.uint16).view(torch.bfloat16).float()
    x = x[x.isfinite()]
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    x = torch.cat((x.sort().values, shuffled))
    return x[: len(x) // width * width].view(-1, width)


def hard_rows(width: int) -> Tensor:
    """Zeros of both signs, ties of every scale, denormals, huge values, float32 beyond bf16."""
    g = torch.Generator().manual_seed(2)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(width // 8)
    e4m3_ties = (torch.arange(width) % 16 + 16.5) * 16
    return torch.stack(
        [
            torch.zeros(width),
            -torch.zeros(width),
            ties,
            -ties * 3 * 2.0**-9,
            ties * 2.0**-60,
            e4m3_ties,
            -e4m3_ties * 2.0**-30,
            torch.full((width,), 1e-45),
            torch.full((width,), 3e38),
            torch.full((width,), 448.0 * (1 + 2.0**-23)),
            torch.randn(width, generator=g) * 1e-4,
            torch.randn(width, generator=g) * 1e30,
            torch.randn(width, generator=g) * torch.logspace(-20, 10, width),
            torch.full((width,), float("inf")),
        ]
    )
