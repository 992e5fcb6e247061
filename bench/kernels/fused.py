"""Element-wise and row-wise kernels of the forward pass, at the full model's shapes, against bytes.

Streams are carried as bf16. Short kernels run over several sets of inputs in one graph, behind an
emptied L2, and the time is divided by their number.
"""

import time
from collections.abc import Callable, Iterator
from math import prod
from statistics import median
from typing import Final

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from phalanx.bench.kernels.harness import Ceilings, Figure, moves, rotating, time_us
from phalanx.kernels.reference import compressor as compressor_reference
from phalanx.kernels.reference import engram as engram_reference
from phalanx.kernels.reference import hyper as hyper_reference
from phalanx.kernels.reference import quant as quant_reference
from phalanx.kernels.reference import rope as rope_reference
from phalanx.kernels.reference import rows as rows_reference
from phalanx.kernels.reference import swiglu as swiglu_reference
from phalanx.kernels.reference.hyper import Mix, MixWeights
from phalanx.kernels.reference.rope import RopeTable
from phalanx.kernels.triton import compressor, engram, hyper, quant, router, rows, stores
from phalanx.kernels.triton.configs import Config

D: Final = 5120
EPS: Final = 1e-20
PCIE_BYTES_PER_S: Final = 55e9  # measured with copies from a registered mapping
TORCH: Final = "torch reference"
ROWS: Final = (1, 64, 4096)

Run = Callable[[], object]
Make = Callable[[], Run]
Goals = tuple[float | None, float | None]  # share of the limit, or microseconds


def figures(limits: Ceilings) -> list[Figure]:
    """All rows of this family."""
    return [*_stream(limits), *_rows(limits), *_stores(limits), *_router(limits), *_engram(limits)]


def _timed(make: Make, sets: int = 1) -> float:
    return time_us(rotating([make() for _ in range(sets)])) / sets


def _figure(
    limits: Ceilings,
    op: str,
    shape: str,
    num_bytes: float,
    make: Make,
    other: Make | None = None,
    *,
    goals: Goals,
    alternative: str = TORCH,
) -> Figure:
    sets = 8 if num_bytes < 8 << 20 else 1
    return Figure(
        kernel=op,
        shape=shape,
        us=_timed(make, sets),
        limit=limits.limit(num_bytes),
        goal=goals[0],
        goal_us=goals[1],
        alternative=None if other is None else alternative,
        alternative_us=None if other is None else _timed(other, sets),
    )


def _bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _f32(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda")


def _goals(num_rows: int, share: float, us: float) -> Goals:
    """A share of the bandwidth where there is enough to move, else a time."""
    return (share, None) if num_rows >= 1024 else (None, us)


# --- The stream ------------------------------------------------------------------------------------


def _weights() -> MixWeights:
    return MixWeights(_f32(24, 4 * D) * 0.01, _f32(24), _f32(24))


def _mix(h: Tensor, weights: MixWeights, settings: Config | None = None) -> Mix:
    return hyper.mix(h, weights, iters=20, hc_eps=1e-6, eps=EPS, settings=settings)


def _torch_mix(h: Tensor, weights: MixWeights) -> Tensor:
    """The reference's arithmetic; its own Sinkhorn loop runs in numpy."""
    z = h.flatten(1).float()
    m = z @ weights.fn.t() * (z.square().mean(dim=1, keepdim=True) + EPS).rsqrt()
    m = m * weights.scale + weights.base
    m[:, :8].sigmoid_()
    c = torch.softmax(m[:, 8:].view(-1, 4, 4), dim=2) + 1e-6
    c = c / (c.sum(dim=1, keepdim=True) + 1e-6)
    for _ in range(19):
        c = c / (c.sum(dim=2, keepdim=True) + 1e-6)
        c = c / (c.sum(dim=1, keepdim=True) + 1e-6)
    return c


def _random_mix(num_rows: int) -> Mix:
    return Mix(_f32(num_rows, 4), _f32(num_rows, 4), _f32(num_rows, 4, 4))


def _stream(limits: Ceilings) -> Iterator[Figure]:
    norm = _f32(D)
    for r in ROWS:
        row = 2 * D * r  # bytes of one copy of all rows

        def mix(r: int = r) -> Run:
            h, weights = _bf16(r, 4, D), _weights()
            return lambda: _mix(h, weights)

        def torch_mix(r: int = r) -> Run:
            h, weights = _bf16(r, 4, D), _weights()
            return lambda: _torch_mix(h, weights)

        yield _figure(
            limits,
            "mix",
            f"{r} x 4 x {D}",
            4 * row + 24 * 4 * D * 4,
            mix,
            torch_mix,
            goals=_goals(r, 0.6, 6.0),
        )

        def norms(r: int = r) -> Run:
            h, pre = _bf16(r, 4, D), _f32(r, 4)
            return lambda: hyper.collapse_norm(h, pre, norm, EPS, out_dtype=torch.bfloat16)

        def torch_norms(r: int = r) -> Run:
            h, pre = _bf16(r, 4, D), _f32(r, 4)
            return lambda: rows_reference.rms_norm(
                hyper_reference.collapse(h.float(), pre), norm, EPS
            )

        yield _figure(
            limits,
            "collapse_norm",
            f"{r} x 4 x {D}",
            5 * row,
            norms,
            torch_norms,
            goals=_goals(r, 0.8, 4.0),
        )

        def expand(r: int = r) -> Run:
            h, y, mixed = _bf16(r, 4, D), _bf16(r, D), _random_mix(r)
            return lambda: hyper.expand(y, h, mixed)

        def torch_expand(r: int = r) -> Run:
            h, y, mixed = _bf16(r, 4, D), _bf16(r, D), _random_mix(r)
            return lambda: hyper_reference.expand(y.float(), h.float(), mixed)

        yield _figure(
            limits,
            "expand",
            f"{r} x 4 x {D}",
            9 * row,
            expand,
            torch_expand,
            goals=_goals(r, 0.8, 3.0),
        )

        def fused(r: int = r) -> Run:
            h, y, mixed = _bf16(r, 4, D), _bf16(r, D), _random_mix(r)
            return lambda: hyper.expand_collapse_norm(
                y, h, mixed, mixed.pre, norm, EPS, q8=True, out_dtype=torch.bfloat16
            )

        def apart(r: int = r) -> Run:
            h, y, mixed = _bf16(r, 4, D), _bf16(r, D), _random_mix(r)

            def run() -> None:
                stream = hyper.expand(y, h, mixed)
                hyper.collapse_norm(stream, mixed.pre, norm, EPS, q8=True, out_dtype=torch.bfloat16)

            return run

        yield _figure(
            limits,
            "expand_collapse_norm, q8",
            f"{r} x 4 x {D}",
            11 * row,
            fused,
            apart,
            alternative="expand, then collapse_norm",
            goals=_goals(r, 0.75, 5.0),
        )


# --- Rows ------------------------------------------------------------------------------------------


def _rows(limits: Ceilings) -> Iterator[Figure]:
    bf16 = torch.bfloat16
    for r in ROWS:

        def q8(r: int = r) -> Run:
            x = _bf16(r, D)
            return lambda: quant.q8_roundtrip(x, out_dtype=bf16)

        def torch_q8(r: int = r) -> Run:
            x = _bf16(r, D)
            return lambda: quant_reference.q8_roundtrip(x)

        yield _figure(
            limits, "q8_roundtrip", f"{r} x {D}", 4 * r * D, q8, torch_q8, goals=_goals(r, 0.8, 2.0)
        )

    def latent() -> Run:
        both, norm = _bf16(4096, 1792), _f32(1280)
        return lambda: rows.rms_norm_q8(both[:, :1280], norm, EPS, out_dtype=bf16)

    def torch_latent() -> Run:
        both, norm = _bf16(4096, 1792), _f32(1280)
        return lambda: quant_reference.q8_roundtrip(
            rows_reference.rms_norm(both[:, :1280].float(), norm, EPS)
        )

    yield _figure(
        limits,
        "rms_norm_q8",
        "4096 x 1280",
        4 * 4096 * 1280,
        latent,
        torch_latent,
        goals=(0.7, None),
    )

    def activation() -> Run:
        gate, up = _bf16(6 * 4096, 2 * 2304).chunk(2, dim=1)
        weights = _f32(6 * 4096)
        return lambda: rows.swiglu_q8(gate, up, 10.0, weights, out_dtype=bf16)

    def torch_activation() -> Run:
        gate, up = _bf16(6 * 4096, 2 * 2304).chunk(2, dim=1)
        weights = _f32(6 * 4096)
        return lambda: quant_reference.q8_roundtrip(
            swiglu_reference.swiglu(gate.float(), up.float(), 10.0, weights)
        )

    yield _figure(
        limits,
        "swiglu_q8",
        f"{6 * 4096} x 2304",
        6 * 6 * 4096 * 2304,
        activation,
        torch_activation,
        goals=(0.8, None),
    )

    def index_queries() -> Run:
        x = _bf16(4096, 32, 128)
        return lambda: quant.qf4_idx_roundtrip(x, out_dtype=bf16)

    def torch_index_queries() -> Run:
        x = _bf16(4096, 32, 128)
        return lambda: quant_reference.qf4_idx_roundtrip(x)

    yield _figure(
        limits,
        "qf4_idx_roundtrip",
        "4096 x 32 x 128",
        4 * 4096 * 4096,
        index_queries,
        torch_index_queries,
        goals=(0.8, None),
    )

    def picks() -> Run:
        shared, routed = _bf16(4096, D), _bf16(4096, 6, D)
        return lambda: rows.add_picks(shared, routed, out_dtype=bf16)

    def torch_picks() -> Run:
        shared, routed = _bf16(4096, D).float(), _bf16(4096, 6, D)

        def run() -> None:
            for pick in range(6):
                shared.add_(routed[:, pick].float())

        return run

    yield _figure(
        limits,
        "add_picks",
        f"4096 x 6 x {D}",
        8 * 2 * 4096 * D,
        picks,
        torch_picks,
        goals=(0.8, None),
    )
    for r in (64, 4096):

        def turn(r: int = r) -> Run:
            q, table = _bf16(r, 64, 512), RopeTable(_f32(r, 64), _f32(r, 64))
            return lambda: rows.rotate(q, table)

        def torch_turn(r: int = r) -> Run:
            q, table = _bf16(r, 64, 512).float(), RopeTable(_f32(r, 64), _f32(r, 64))
            return lambda: rope_reference.rotate(q, table)

        yield _figure(
            limits,
            "rotate",
            f"{r} x 64 x 64 of 512",
            r * (64 * 64 * 2 * 2 + 64 * 4 * 2),
            turn,
            torch_turn,
            goals=_goals(r, 0.6, 3.0),
        )


# --- Cache records ---------------------------------------------------------------------------------


def _stores(limits: Ceilings) -> Iterator[Figure]:
    table = RopeTable(_f32(4096, 64), _f32(4096, 64))
    blocks = torch.arange(4096, device="cuda") // 64
    offsets = torch.arange(4096, device="cuda") % 64
    memory = torch.zeros((64, 114_048), dtype=torch.uint8, device="cuda")
    entries = memory[:, : 64 * 288].view(64, 64, 288)
    keys = memory[:, 64 * 288 : 64 * (288 + 68)].view(64, 64, 68)
    norm = _f32(512)
    for r in (64, 4096):
        part = RopeTable(table.cos[:r], table.sin[:r])

        def window(r: int = r, part: RopeTable = part) -> Run:
            both = _bf16(r, 1792)
            return lambda: stores.window_records(both[:, 1280:], norm, EPS, part)

        def torch_window(r: int = r, part: RopeTable = part) -> Run:
            both = _bf16(r, 1792)
            return lambda: quant_reference.encode_window(
                rope_reference.rotate(
                    rows_reference.rms_norm(both[:, 1280:].float(), norm, EPS), part
                )
            )

        yield _figure(
            limits,
            "window_records",
            f"{r} x 512",
            r * (1024 + 528 + 512),
            window,
            torch_window,
            goals=_goals(r, 0.5, 3.0),
        )

        def projection(r: int = r, part: RopeTable = part) -> Run:
            both, q_norm = _bf16(r, 1792), _f32(1280)
            return lambda: stores.latent_and_window(
                both, q_norm, norm, EPS, part, out_dtype=torch.bfloat16
            )

        yield _figure(
            limits,
            "latent_and_window",
            f"{r} x (1280 + 512)",
            r * (2 * 1792 + 2 * 1280 + 528 + 512),
            projection,
            goals=_goals(r, 0.5, 3.0),
        )

        def compressed(r: int = r, part: RopeTable = part) -> Run:
            x = _bf16(r, 512)
            return lambda: stores.store_compressed(
                x, norm, EPS, part, blocks[:r], offsets[:r], entries, out_dtype=torch.bfloat16
            )

        def torch_compressed(r: int = r, part: RopeTable = part) -> Run:
            x = _bf16(r, 512)

            def run() -> None:
                y = rope_reference.rotate(rows_reference.rms_norm(x.float(), norm, EPS), part)
                entries[blocks[:r], offsets[:r]] = quant_reference.encode_compressed(y)

            return run

        yield _figure(
            limits,
            "store_compressed",
            f"{r} x 512",
            r * (1024 + 1024 + 288 + 512 + 16),
            compressed,
            torch_compressed,
            goals=_goals(r, 0.5, 3.0),
        )

        def index_keys(r: int = r, part: RopeTable = part) -> Run:
            x = _bf16(r, 128)
            return lambda: stores.store_index_keys(
                x, norm[:128], EPS, part, blocks[:r], offsets[:r], keys
            )

        yield _figure(
            limits,
            "store_index_keys",
            f"{r} x 128",
            r * (256 + 68 + 512 + 16),
            index_keys,
            goals=_goals(r, 0.3, 3.0),
        )

    def pairs() -> Run:
        both = torch.randn(2048, 2, 2, 512, device="cuda")
        return lambda: compressor.pool_pairs(both[:, :, 0], both[:, :, 1], out_dtype=torch.bfloat16)

    def torch_pairs() -> Run:
        both = torch.randn(2048, 2, 2, 512, device="cuda")
        return lambda: compressor_reference.pool_pairs(both[:, :, 0], both[:, :, 1])

    yield _figure(
        limits,
        "pool_pairs",
        "2048 x 2 x 512",
        2048 * 512 * 18,
        pairs,
        torch_pairs,
        goals=(0.6, None),
    )


# --- Router ----------------------------------------------------------------------------------------


def _torch_route(logits: Tensor, bias: Tensor) -> Tensor:
    scores = torch.nn.functional.softplus(logits).sqrt()
    order = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :6]
    picked = scores.gather(1, order)
    return picked / (picked.sum(dim=1, keepdim=True) + EPS) * 1.5


def _router(limits: Ceilings) -> Iterator[Figure]:
    bias = _f32(384)
    for r in ROWS:

        def route(r: int = r) -> Run:
            logits = torch.randn(r, 384, device="cuda")
            return lambda: router.route(logits, bias, num_topk=6, scaling=1.5)

        def torch_route(r: int = r) -> Run:
            logits = torch.randn(r, 384, device="cuda")
            return lambda: _torch_route(logits, bias)

        yield _figure(
            limits, "route", f"{r} x 384", r * (384 * 4 + 72), route, torch_route, goals=(None, 4.0)
        )


# --- Engram ----------------------------------------------------------------------------------------


def _host_us(run: Run) -> float:
    """Median time of work that the host takes part in."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return median(times[1:])


def _engram(limits: Ceilings) -> Iterator[Figure]:
    num_table_rows = 1 << 20
    codes = torch.randint(0, 120, (num_table_rows, 256), dtype=torch.uint8).pin_memory()
    scales = torch.randint(110, 130, (num_table_rows, 8), dtype=torch.uint8).pin_memory()
    for r in (64, 4096):
        ids = torch.randint(0, num_table_rows, (r, 24))
        there = ids.cuda()
        out = torch.empty((r, 24, 256), dtype=torch.bfloat16, device="cuda")
        num_bytes = prod(ids.shape) * (256 + 8)
        yield Figure(
            kernel="engram gather from host memory",
            shape=f"{r} x 24 x 256",
            us=time_us(lambda there=there: engram.gather(codes, scales, there)),  # type: ignore[misc]
            limit=moves(num_bytes, PCIE_BYTES_PER_S),
            goal=0.5,
            alternative="host gather, one copy",
            alternative_us=_host_us(
                lambda ids=ids, out=out: engram.gather_on_host(codes, scales, ids, out)  # type: ignore[misc]
            ),
        )
    weight, r = _f32(4, D), 4096

    def gate() -> Run:
        h, kv = _bf16(r, 4, D), _bf16(r, 5, D)
        return lambda: engram.gate_add_value(h, kv[:, :-1], kv[:, -1], weight, EPS)

    def torch_gate() -> Run:
        h, kv = _bf16(r, 4, D).float(), _bf16(r, 5, D).float()

        def run() -> Tensor:
            gates = engram_reference.gate(h, kv[:, :-1], weight, EPS)
            return engram_reference.add_value(h, gates, kv[:, -1])

        return run

    yield _figure(
        limits,
        "engram gate_add_value",
        f"{r} x 4 x {D}",
        13 * 2 * D * r,
        gate,
        torch_gate,
        goals=(0.7, None),
    )


# --- Settings --------------------------------------------------------------------------------------


def _settings(**choices: tuple[int, ...]) -> list[Config]:
    found: list[Config] = [{}]
    for name, values in choices.items():
        found = [one | {name: value} for one in found for value in values]
    return found


def tune(limits: Ceilings) -> dict[str, dict[str, Config]]:
    """Settings with the smallest product of the times for one row and for 4096.

    What sums a row (`collapse_norm`) has one setting for all row counts; the rest could differ, but
    gains nothing by it.
    """
    del limits
    norm, weights = _f32(D), _weights()
    few, many = ((_bf16(r, 4, D), _bf16(r, D), _random_mix(r)) for r in (1, 4096))
    gate, up = _bf16(6 * 4096, 2 * 2304).chunk(2, dim=1)

    def best(options: list[Config], run: Callable[[Config, Tensor, Tensor, Mix], object]) -> Config:
        def cost(settings: Config) -> float:
            try:
                return prod(
                    time_us(lambda one=one: run(settings, *one))  # type: ignore[misc]
                    for one in (few, many)
                )
            except OutOfResources:
                return float("inf")

        return min(options, key=cost)

    streams = _settings(BLOCK=(512, 1024, 2048), num_warps=(4, 8))
    groups = _settings(BLOCK=(32, 64, 128), num_warps=(4, 8))
    return {
        "mix": {
            str(4 * D): best(
                _settings(ROWS=(64, 128), num_warps=(4, 8), num_stages=(2, 3, 4)),
                lambda s, h, y, m: _mix(h, weights, s),
            )
        },
        "collapse_norm": {
            str(D): best(
                _settings(BLOCK=(512, 1024, 2048), num_warps=(4, 8), num_stages=(3, 4)),
                lambda s, h, y, m: hyper.expand_collapse_norm(
                    y, h, m, m.pre, norm, EPS, q8=True, out_dtype=torch.bfloat16, settings=s
                ),
            )
        },
        "stream": {str(D): best(streams, lambda s, h, y, m: hyper.expand(y, h, m, settings=s))},
        "q8_roundtrip": {
            str(D): best(
                groups,
                lambda s, h, y, m: quant.q8_roundtrip(y, out_dtype=torch.bfloat16, settings=s),
            )
        },
        "swiglu": {
            "2304": best(
                groups,
                lambda s, h, y, m: rows.swiglu_q8(
                    gate, up, 10.0, out_dtype=torch.bfloat16, settings=s
                ),
            )
        },
    }
