"""Checks on the machine at hand that a row's numbers do not depend on the rows beside it.

What `kernels.reference.rows` relies on is a property of the libraries and the processor, so it is
measured, in a few milliseconds, before a worker serves its first token.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from phalanx.kernels import ops
from phalanx.kernels.matrix import Fp8Matrix
from phalanx.kernels.reference.attention import sink_attention
from phalanx.kernels.reference.hyper import Mix, MixWeights, sinkhorn
from phalanx.kernels.reference.quant import quant_fp8_block
from phalanx.kernels.reference.rows import lanewise, matmul_rows
from phalanx.worker_svc.model.caches import CPU

_ROWS = 21  # two full tiles and a part of one
_SUBSETS = ((0,), (20, 3), (7, 8, 9, 10, 11), (16, 2, 5, 0, 19, 12, 9, 4), tuple(range(20, 3, -1)))

RowOperation = Callable[[Tensor], Tensor]  # float32 [R, ...] -> [R, ...]


class InvarianceError(RuntimeError):
    """This machine's libraries do not compute rows alike in every batch."""


def check_invariance(device: torch.device = CPU) -> None:
    """Raises InvarianceError naming the first operation that fails on the device."""
    generator = torch.Generator().manual_seed(1)
    operations = _operations if device.type == "cpu" else _gpu_operations
    for name, operation, shape in operations(generator, device):
        x = torch.randn((_ROWS, *shape), generator=generator).to(device)
        check_operation(name, operation, x)


def check_operation(name: str, operation: RowOperation, x: Tensor) -> None:
    """Compare a batch of rows with other batches of the same rows; x has more than 20 rows."""
    whole = operation(x)
    for subset in _SUBSETS:
        rows = list(subset)
        if not torch.equal(operation(x[rows]), whole[rows]):
            raise InvarianceError(
                f"{name}: {len(rows)} rows alone give other bits than the same rows in a batch of "
                f"{len(x)} on {x.device}. This processor or this torch ({torch.__version__}, "
                f"{torch.get_num_threads()} threads) cannot serve exactly: use "
                f"another torch version"
            )


def _operations(
    generator: torch.Generator, device: torch.device
) -> Iterator[tuple[str, RowOperation, tuple[int, ...]]]:
    """Name, operation, and shape of a row."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    for depth, width in ((64, 256), (128, 24), (128, 1), (512, 96), (1280, 512)):
        weight = random(width, depth)
        yield f"matmul {depth}x{width}", partial(matmul_rows, weight=weight), (depth,)
    for function in (torch.exp, torch.sigmoid, *_ACTIVATIONS):
        yield function.__name__, partial(lanewise, function), (10,)
    yield "rms_norm", partial(ops.rms_norm, weight=random(96), eps=1e-20), (96,)
    yield "sinkhorn", partial(sinkhorn, copies=4, iters=20, eps=1e-6), (16,)
    yield "stream mixing", _mix_streams, (4, 96)
    for heads, dim, slots in ((4, 64, 24), (8, 64, 136)):
        name = f"attention {heads}x{dim} over {slots}"
        yield name, partial(_attend, sink=random(heads)), (heads + slots, dim)


def _gpu_operations(
    generator: torch.Generator, device: torch.device
) -> Iterator[tuple[str, RowOperation, tuple[int, ...]]]:
    """What a GPU runs in place of the references: those that add up along a row."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    for depth, width in ((128, 256), (512, 96), (1280, 512)):
        weight = random(width, depth)
        packed = Fp8Matrix(*(part.to(device) for part in quant_fp8_block(weight.cpu())))
        yield (
            f"matmul {depth}x{width}",
            partial(ops.matmul_rows, weight=weight.bfloat16()),
            (depth,),
        )
        yield f"FP8 linear {depth}x{width}", partial(ops.linear, weight=packed), (depth,)
    yield "rms_norm", partial(ops.rms_norm, weight=random(96), eps=1e-20), (96,)
    weights = MixWeights(random(24, 4 * 96), random(24), random(24))
    yield "mHC mix", partial(_mix_weights, weights=weights), (4, 96)
    yield "stream mixing", _mix_streams, (4, 96)


def _mix_weights(x: Tensor, weights: MixWeights) -> Tensor:
    mixed = ops.mix(x.bfloat16().float(), weights, iters=20, hc_eps=1e-6, eps=1e-20)
    return torch.cat((mixed.pre, mixed.post, mixed.comb.flatten(1)), dim=1)


_ACTIVATIONS = (torch.nn.functional.softplus, torch.nn.functional.silu)


def _mix_streams(x: Tensor) -> Tensor:
    weights = x[:, :, 0].contiguous()
    mixed = Mix(weights, weights, x[:, :, :4].contiguous())
    return ops.expand(ops.collapse(x, weights), x, mixed)


def _attend(x: Tensor, sink: Tensor) -> Tensor:
    """Queries are the first rows of x, one a sink, vectors the rest; every third is hidden."""
    queries, vectors = x[:, : len(sink)], x[:, len(sink) :]
    hidden = (torch.arange(vectors.shape[1], device=x.device) % 3 == 2).expand(x.shape[0], -1)
    half = vectors.shape[1] // 2
    parts = [(vectors[:, :half], hidden[:, :half]), (vectors[:, half:], hidden[:, half:])]
    return sink_attention(queries.contiguous(), parts, sink, x.shape[-1] ** -0.5)
