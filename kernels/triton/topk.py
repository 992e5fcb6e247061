# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The best entries of each row: `kernels.reference.indexer.select_top`, exactly.

A row is cut into tiles that one program holds in registers. A program finds its tile's threshold
bit by bit, by counting, and writes the positions that pass in their order. Where a row has several
tiles, the winners of all tiles are cut into tiles again: what wins in the row wins in its tile.
Everything is integer work, so no order of execution shows in the result.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.triton.configs import Config, config

COUNT_MAX: Final = 2048  # a tile must be a few times larger, or its winners would not get fewer
# `registers` limits those of a thread, so that more programs fit; 0 leaves it to the compiler.
CANDIDATES: Final[list[Config]] = [
    {"tile": tile, "num_warps": warps, "registers": registers}
    for tile, warps, registers in (
        (8192, 16, 64),
        (8192, 16, 0),
        (8192, 8, 96),
        (8192, 32, 32),
        (4096, 8, 64),
    )
]
_DEFAULT: Final[Config] = {"tile": 8192, "num_warps": 16, "registers": 64}

_INTERPRETED: Final = tl.constexpr(bool(triton.knobs.runtime.interpret))
_HIDDEN: Final = tl.constexpr(-0x7F80)  # the ordered key of -inf


@triton.jit
def ordered_key(bits):
    """int32 bits of a bf16 value (sign-extended) -> int32 that sorts by value; both zeros are 0.

    The magnitude with its sign: bits are sign and magnitude, integers two's complement.
    """
    sign = bits >> 31
    return (bits ^ (sign & 0x7FFF)) - sign


@triton.jit
def load_bits(pointers, mask):
    """bf16 values, stored as bf16 or float32 -> int32 bits, sign-extended; -inf where masked."""
    value = tl.load(pointers, mask=mask, other=float("-inf"))
    if value.dtype == tl.float32:
        return value.to(tl.int32, bitcast=True) >> 16
    else:
        return value.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _settled(key):
    """The same keys, computed once: the compiler would derive each comparison from the scores anew."""
    if _INTERPRETED:
        return key
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [key], tl.int32, True, 1)


@triton.jit
def _reaching(key, threshold):
    """How many keys are at least the threshold: the signs of differences, two instructions a key."""
    missing = (threshold - 1 - key).to(tl.uint32, bitcast=True)
    return tl.sum((missing >> 31).to(tl.int32))


@triton.jit
def _threshold(key, count):
    """The largest threshold that `count` keys reach, where so many are not hidden."""
    # Mostly within two binades of the best. It lies in threshold .. threshold + span - 1.
    span = 256
    threshold = tl.max(key) - (span - 1)
    while _reaching(key, threshold) < count:
        span *= 2
        threshold -= span
    while span > 1:
        span = span // 2
        threshold = tl.where(_reaching(key, threshold + span) >= count, threshold + span, threshold)
    return threshold


@triton.jit(do_not_specialize=["width", "score_stride", "chosen_stride"])
def _select_kernel(
    scores,
    positions,
    blocks,
    chosen,
    width,
    count,
    score_stride,
    block_stride,
    chosen_stride,
    TILE: tl.constexpr,
    FILL: tl.constexpr,
    LISTED: tl.constexpr,
    SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The winners of one tile of one row; sizes are multiples of VECTOR.

    The tile is of the row itself, or (LISTED) of its list of positions, [R, width] with -1 for none.
    Winners are written as positions, or (SIZE) as entries of the row's blocks of SIZE.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    score_stride = score_stride // VECTOR * VECTOR
    if not LISTED:
        width = width // VECTOR * VECTOR
    slot = tile * TILE + tl.arange(0, TILE)
    inside = slot < width
    position = slot
    if LISTED:
        position = tl.load(positions + row * width + slot, mask=inside, other=-1)
        inside = position >= 0
    key = ordered_key(load_bits(scores + row * score_stride + position, inside))
    key = _settled(key)

    threshold = tl.full((), _HIDDEN, tl.int32)
    spare = 0
    seen = _reaching(key, threshold + 1)
    if seen > count:
        threshold = _threshold(key, count)
        spare = count - _reaching(key, threshold + 1)

    target = chosen + row * chosen_stride + tile * count
    if seen > 0:
        # Both running counts in one scan: keys above the threshold, and keys at it from bit 16 on.
        above, at = key > threshold, (key == threshold) & (spare > 0)
        running = tl.cumsum(above.to(tl.int32) + (at.to(tl.int32) << 16), 0)
        above_so_far, at_so_far = running & 0xFFFF, running >> 16
        take = above | (at & (at_so_far <= spare))
        place = above_so_far + tl.minimum(at_so_far, spare) - 1
        if SIZE > 0:
            block = tl.load(blocks + row * block_stride + position // SIZE, mask=take, other=0)
            entry = block * SIZE + position % SIZE
        else:
            entry = position
        tl.store(target + place, entry.to(chosen.dtype.element_ty), mask=take)
    fill = tl.arange(0, FILL)
    tl.store(
        target + fill,
        tl.full((FILL,), -1, chosen.dtype.element_ty),
        mask=(fill >= tl.minimum(seen, count)) & (fill < count),
    )


def vector(scores: Tensor) -> int:
    """How many scores a load may take at a time."""
    return 8 if (scores.shape[1] | scores.stride(0)) % 8 == 0 else 1


def _warps(num_warps: int, tile: int, wide: int) -> int:
    """Of a program: as many for an entry as where the tile is `wide`, and one for 128 at most."""
    return max(1, min(num_warps * max(1, tile // wide), tile // 128, 32))


def select_top(
    scores: Tensor,
    count: int,
    blocks: Tensor | None = None,
    *,
    settings: Config | None = None,
) -> Tensor:
    """The best `count` entries of each row that are not -inf, in position order.

    Equal (`==`) to `reference.select_top`: ties go to the lower position. A NaN without a sign
    counts as more than +inf, as in the reference; a NaN with the sign bit set counts as -inf.

    Args:
        scores: bf16, or float32 that holds bf16 values, [R, E]; the last dimension contiguous.
        count: at most COUNT_MAX.
        blocks: int64 [R, B], as from `candidate_blocks`, if the scores are those of these blocks'
            entries side by side, E / B each; None: if they are those of entries 0, 1, ...
        settings: `tile` (a power of two), `num_warps`, `registers`; they change no result.

    Returns:
        int64 [R, count], filled up with -1 at the end.

    Raises:
        ValueError: `count` is more than COUNT_MAX.
    """
    if not 0 <= count <= COUNT_MAX:
        raise ValueError(f"count is {count}; it must be in 0..{COUNT_MAX}")
    num_rows, width = scores.shape
    chosen = torch.empty((num_rows, count), dtype=torch.int64, device=scores.device)
    if width == 0 or chosen.numel() == 0:
        return chosen.fill_(-1)
    size = 0 if blocks is None else width // blocks.shape[1]
    use = settings or config("select_top", f"{count}", _DEFAULT)
    # Tiles of three sizes at all widths, so that few variants are compiled: for narrow rows, for rows
    # that just fit a program, for wider ones and lists of winners.
    wide = max(use["tile"], 4 * triton.next_power_of_2(count))
    listed: Tensor | None = None
    while True:
        tile = wide
        if listed is None and width <= 2 * wide:
            tile = wide // 8 if width <= wide // 8 else 2 * wide
        num_tiles = triton.cdiv(width, tile)
        target = chosen
        if num_tiles > 1:
            target = chosen.new_empty((num_rows, num_tiles * count), dtype=torch.int32)
        _select_kernel[(num_rows, num_tiles)](
            scores,
            target if listed is None else listed,
            target if blocks is None else blocks,
            target,
            width,
            count,
            scores.stride(0),
            0 if blocks is None else blocks.stride(0),
            target.stride(0),
            TILE=tile,
            FILL=triton.next_power_of_2(count),
            LISTED=listed is not None,
            SIZE=size if num_tiles == 1 else 0,
            VECTOR=vector(scores),
            num_warps=_warps(use["num_warps"], tile, wide),
            maxnreg=use["registers"] or None,
        )
        if num_tiles == 1:
            return chosen
        listed, width = target, num_tiles * count
