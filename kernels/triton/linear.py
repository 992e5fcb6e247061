"""Every dense matrix product of the model (model.md C.0), one for few rows and one for many.

With few rows a product takes as long as its weights take to read, so they are read as they are
stored, one byte a weight where they are FP8. With many rows it takes as long as its arithmetic.

Bound: every product of two values is exact (8 x 8 bits of mantissa, 8 x 24 for float32 weights) and
the sums are float32, one rounding or cut for every 16 columns. On drawn values a result differs from
the exact one by less than 4e-6 of the sum of its products' magnitudes, for K up to 20480 (tests);
`kernels.reference` adds in another order, within the same bound.

Batch invariance: a row's bits depend on the row, the weight and `num_splits(N, K)`, on nothing else.
"""

from typing import Final

import torch
import triton
from torch import Tensor

from phalanx.kernels.matrix import Fp8Matrix, Matrix
from phalanx.kernels.reference.quant import GROUP
from phalanx.kernels.triton import linear_kernels
from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.quant import q8_roundtrip, q8_shuffled

_TILE: Final = 64  # weights of the smallest tile
# What fills an H200's 132 multiprocessors: programs that dequantize wait less for memory than for
# each other's arithmetic, so that two a multiprocessor hide more.
_PROGRAMS: Final = 128
_FP8_PROGRAMS: Final = 240
_MIN_DEPTH: Final = 256  # columns that are worth a split of their own
_MIN_FLOAT_DEPTH: Final = 512
_MIN_SIZE: Final = 1 << 17  # a smaller weight is read sooner than a second kernel starts
_FLOAT_ROWS: Final = 16  # float32 rows up to which no kernel of its own makes them bf16
_FEW: Final = 512  # rows up to which weights are not dequantized ahead


def matmul_rows(
    x: Tensor,
    weight: Matrix,
    *,
    rounded: bool = False,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> Tensor:
    """x @ weight.T, each row alone.

    Args:
        x: bf16 values, as bf16 or float32 [R, K]; K a multiple of 32; the last dimension contiguous.
        weight: [N, K], contiguous: FP8, bf16 or float32.
        rounded: round the result to bf16 values.
        out_dtype: float32, or bf16 (which rounds).
        settings: overrides of the tile settings (`few_settings`, `many_settings`).

    Returns:
        [R, N]. An FP8 code of NaN counts as 480, an infinite or NaN activation spoils its row only.
    """
    return _product(x.unsqueeze(1), weight, rounded, out_dtype, settings).squeeze(1)


def linear(
    x: Tensor,
    weight: Fp8Matrix,
    *,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> Tensor:
    """A quantized linear: Q8 of the input, bf16 values as result (model.md C.0).

    Args: x bf16 or float32 [R, K], weight [N, K]. Returns [R, N].
    """
    shuffled = not _is_many(x.shape[0], settings)
    quantized = q8_shuffled(x) if shuffled else q8_roundtrip(x, out_dtype=torch.bfloat16)
    product = _product(quantized.unsqueeze(1), weight, True, out_dtype, settings, shuffled)
    return product.squeeze(1)


def grouped_linear(
    x: Tensor,
    weights: Matrix,
    *,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> Tensor:
    """Each group's own linear, without Q8 of the input: bf16 values as result.

    Args:
        x: bf16 values [R, G, K], the last two dimensions contiguous.
        weights: FP8 [G * N, K], N a multiple of 32, or bf16 [G, N, K].

    Returns:
        [R, G * N].
    """
    return _product(x, weights, True, out_dtype, settings).flatten(1)


def num_splits(rows: int, depth: int, groups: int = 1, *, fp8: bool = True) -> int:
    """Parts of K that are summed apart and then added in order. A property of the weight's shape."""
    default = 1
    if groups * rows * depth >= _MIN_SIZE:
        programs = _FP8_PROGRAMS if fp8 else _PROGRAMS
        default = _splits(-(-rows // _TILE) * groups, depth, _MIN_DEPTH, programs)
    return config("splits", f"{groups}x{rows}x{depth}", {"splits": default})["splits"]


def few_settings(num_rows: int, *, fp8: bool = True) -> Config:
    """Tiles for a product bound by its weights: BLOCK_R rows, BLOCK_N weights, BLOCK_K columns."""
    height = _height(num_rows)
    if not fp8:
        tiles = {"BLOCK_R": height, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
        if height == 128:
            return tiles | {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
        return tiles | {"BLOCK_K": 64, "num_stages": 5} if height == 64 else tiles
    if height == 16:  # many small programs hide each other's waiting
        return {"BLOCK_R": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    tiles = {"BLOCK_R": height, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3}
    return tiles | {"BLOCK_K": 64, "num_stages": 4} if height == 128 else tiles


def many_settings() -> Config:
    """Tiles for a product bound by its arithmetic; BAND as in `linear_kernels.many_rows`."""
    tiles = {"BLOCK_R": 128, "BLOCK_N": 128, "BLOCK_K": 64, "BAND": 8}
    return tiles | {"num_warps": 8, "num_stages": 3}


def float_settings(num_rows: int) -> Config:
    """Tiles for float32 weights: bound by the bytes of the rows when there are many."""
    tiles = {"BLOCK_N": 32, "BLOCK_K": 64, "num_stages": 3}
    few = num_rows <= 1024
    return tiles | ({"BLOCK_R": 64, "num_warps": 4} if few else {"BLOCK_R": 128, "num_warps": 8})


def possible_splits(depth: int) -> list[int]:
    """Into how many parts K may be cut."""
    units = depth // _unit(depth)
    return [parts for parts in range(1, units + 1) if units % parts == 0]


def settings_key(num_rows: int, shape: tuple[int, ...]) -> str:
    """The name in the table of tiles for a weight [G, N, K] and so many rows.

    Rows make few classes, so that no kernel is left to compile once a rank serves.
    """
    name = "x".join(map(str, shape))
    return name if num_rows > _FEW else f"{name} r{_height(num_rows)}"


def _height(num_rows: int) -> int:
    """BLOCK_R: 16, 32, 64 or 128."""
    return min(max(16, 1 << (num_rows - 1).bit_length()), 128)


def _splits(tiles: int, depth: int, smallest: int, programs: int) -> int:
    """The fewest parts of at least `smallest` columns that make so many programs of `tiles`."""
    splits = 1
    for parts in possible_splits(depth):
        if tiles * splits >= programs or depth // parts < smallest:
            break
        splits = parts
    return splits


def _unit(depth: int) -> int:
    """The largest BLOCK_K that divides K: 128, 64 or 32."""
    if depth % 32:
        raise ValueError(f"K is {depth}; it must be a multiple of 32")
    return min(128, depth & -depth)


def _settings(
    operation: str, num_rows: int, shape: tuple[int, ...], default: Config, override: Config | None
) -> Config:
    """What the table says of a weight's shape at about so many rows, else the default."""
    chosen = config(operation, settings_key(num_rows, shape), default) | (override or {})
    return chosen


def _product(
    x: Tensor,
    weight: Matrix,
    rounded: bool,
    out_dtype: torch.dtype,
    settings: Config | None,
    shuffled: bool = False,
) -> Tensor:
    """x [R, G, K] and weights [G, N, K] or [G * N, K] -> [R, G, N].

    `shuffled` says that the columns of x are in the order of `formats.shuffled`.
    """
    num_rows, groups, depth = x.shape
    columns = weight.shape[-1]
    rows = weight.shape[:-1].numel() // groups
    if columns != depth or (isinstance(weight, Fp8Matrix) and groups > 1 and rows % GROUP):
        raise ValueError(f"{list(x.shape)} activations with weights {list(weight.shape)}")
    if not (weight.codes if isinstance(weight, Fp8Matrix) else weight).is_contiguous():
        raise ValueError("the weights are not contiguous")
    if x.stride(2) != 1 or (groups > 1 and x.stride(1) != depth):
        x = x.contiguous()
    out = torch.empty((num_rows, groups, rows), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    rounded = rounded or out_dtype == torch.bfloat16
    if isinstance(weight, Tensor) and weight.dtype == torch.float32:
        assert groups == 1
        _float(x, weight, out, rounded, settings)
    elif _is_many(num_rows, settings):
        _many(x, weight, out, rounded, settings)
    else:
        _few(x, weight, out, rounded, settings, shuffled)
    return out


def _is_many(num_rows: int, settings: Config | None) -> bool:
    return bool((settings or {}).get("many", num_rows > _FEW))


def _few(
    x: Tensor,
    weight: Matrix,
    out: Tensor,
    rounded: bool,
    settings: Config | None,
    shuffled: bool,
) -> None:
    num_rows, groups, rows = out.shape
    depth = x.shape[2]
    fp8 = isinstance(weight, Fp8Matrix)
    default = few_settings(num_rows, fp8=fp8)
    tiles = _settings("few_rows", num_rows, (groups, rows, depth), default, settings)
    splits = (settings or {}).get("splits", num_splits(rows, depth, groups, fp8=fp8))
    launch = _tiles(tiles, depth // splits, "BLOCK_R", "BLOCK_N")
    words = fp8 and launch["BLOCK_K"] in (64, 128) and depth % 128 == 0
    if isinstance(weight, Fp8Matrix):
        codes = weight.codes.view(torch.int32)
        scales = weight.scales.view(torch.int32) if words else weight.scales
    else:
        codes = scales = weight
    if num_rows > _FLOAT_ROWS and x.dtype == torch.float32:
        # Every tile of weights would round them again, and bring them into another order.
        x, shuffled = (_shuffled(x), True) if fp8 else (x.to(torch.bfloat16), False)
    parts = _parts(splits, out)
    grid = (
        triton.cdiv(rows, tiles["BLOCK_N"]),
        triton.cdiv(num_rows, tiles["BLOCK_R"]),
        groups * splits,
    )
    linear_kernels.few_rows[grid](
        x,
        codes,
        scales,
        parts,
        num_rows,
        rows,
        depth,
        depth // splits,
        x.stride(0),
        GROUPS=groups,
        SPLITS=splits,
        ROUND=int(rounded and splits == 1),
        GROUPED=groups > 1,
        FP8=fp8,
        WORDS=words,
        SHUFFLED=shuffled,
        **launch,
    )
    _sum(parts, out, rounded)


def _many(x: Tensor, weight: Matrix, out: Tensor, rounded: bool, settings: Config | None) -> None:
    num_rows, groups, rows = out.shape
    depth = x.shape[2]
    tiles = _settings("many_rows", num_rows, (groups, rows, depth), many_settings(), settings)
    fp8 = isinstance(weight, Fp8Matrix)
    splits = (settings or {}).get("splits", num_splits(rows, depth, groups, fp8=fp8))
    x = x.to(torch.bfloat16)
    grid = (triton.cdiv(num_rows, tiles["BLOCK_R"]) * triton.cdiv(rows, tiles["BLOCK_N"]), groups)
    linear_kernels.many_rows[grid](
        x,
        dequantize(weight) if isinstance(weight, Fp8Matrix) else weight,
        out,
        num_rows,
        rows,
        depth,
        depth // splits,
        x.stride(0),
        GROUPS=groups,
        ROUND=int(rounded),
        WHOLE=splits == 1,
        **_tiles(tiles, depth // splits, "BLOCK_R", "BLOCK_N", "BAND"),
    )


def _float(x: Tensor, weight: Tensor, out: Tensor, rounded: bool, settings: Config | None) -> None:
    num_rows, _, rows = out.shape
    depth = x.shape[2]
    tiles = _settings("float_rows", num_rows, (rows, depth), float_settings(num_rows), settings)
    splits = _splits(triton.cdiv(rows, 32), depth, _MIN_FLOAT_DEPTH, _PROGRAMS)
    target = _parts(splits, out)
    grid = (triton.cdiv(num_rows, tiles["BLOCK_R"]), triton.cdiv(rows, tiles["BLOCK_N"]), splits)
    linear_kernels.float_rows[grid](
        x,
        weight,
        target,
        num_rows,
        rows,
        depth,
        x.stride(0),
        SPLITS=splits,
        ROUND=int(rounded and splits == 1),
        **_tiles(tiles, depth // splits, "BLOCK_R", "BLOCK_N"),
    )
    _sum(target, out, rounded)


def _shuffled(x: Tensor) -> Tensor:
    """As bf16, contiguous, with the columns in the order of `formats.shuffled`."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    num_groups, block = x.numel() // 32, 32
    grid = (triton.cdiv(num_groups, block),)
    linear_kernels.shuffle[grid](x, out, num_groups, BLOCK=block, num_warps=4)
    return out


def dequantize(weight: Fp8Matrix) -> Tensor:
    """bf16 [N, K]: equal to the reference's float32 wherever that is no subnormal of bf16."""
    rows, depth = weight.shape
    out = torch.empty((rows, depth), dtype=torch.bfloat16, device=weight.device)
    width = _unit(depth)
    linear_kernels.dequantize[(depth // width, triton.cdiv(rows, GROUP))](
        weight.codes.view(torch.int32),
        weight.scales,
        out.view(torch.int32),
        rows,
        depth,
        BLOCK_K=width,
        num_warps=4,
    )
    return out


def _parts(splits: int, out: Tensor) -> Tensor:
    """Where the splits go: the result itself if there is one alone."""
    if splits == 1:
        return out
    return torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)


def _sum(parts: Tensor, out: Tensor, rounded: bool) -> None:
    if parts is not out:
        block = 512
        linear_kernels.sum_splits[(triton.cdiv(out.numel(), block),)](
            parts,
            out,
            out.numel(),
            SPLITS=parts.shape[0],
            ROUND=rounded,
            BLOCK=block,
            num_warps=4,
        )


def _tiles(settings: Config, depth: int, *names: str) -> Config:
    """The settings that a kernel takes for splits of `depth` columns, with those of the launch."""
    taken = {name: settings[name] for name in (*names, "BLOCK_K", "num_warps", "num_stages")}
    return taken | {"BLOCK_K": min(taken["BLOCK_K"], depth & -depth)}
