# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Hyper-connections as kernels: what bounds them is how often the stream [R, copies, D] is read.

`mix` reads it once. The projection is a product of bf16 values with float32 weights: each weight is
taken apart into three bf16 values that add up to it exactly, so that the tensor cores multiply
without error and add in float32. Depth is cut into parts of a fixed length; each part's sums start
at zero and are added up in order, by whatever number of programs. Squares, exact in float32, are
added element by element and then by a written-out tree. So neither the tile's height nor the
number of rows changes a bit of a row.

`collapse`, `expand` and `mean_copies` round every product as the reference does and are equal to it.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.reference.hyper import Mix, MixWeights
from phalanx.kernels.triton import formats
from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.rows import NO_FMA

COPIES: Final = 4
MIXES: Final = (2 + COPIES) * COPIES  # columns of the projection; the 25th column holds the squares
_WIDTH: Final = 32  # columns of a partial sum
_DEPTH: Final = 128  # depth of one product: part of the order of summation
_PART: Final = 5  # products of a part: part of the order of summation
_MIX: Final[Config] = {"ROWS": 64, "num_warps": 8, "num_stages": 3}
_FEW_ROWS: Final = 512  # up to here a finishing program has one row, for the shortest time
_STREAM: Final[Config] = {"BLOCK": 1024, "num_warps": 4, "num_stages": 3}


# --- mix -------------------------------------------------------------------------------------------


@triton.jit
def _sum_tree(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of rows, float32 [ROWS, WIDTH] -> [ROWS, 1]: neighbours first, whatever the layout."""
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, (ROWS, WIDTH >> (level + 1), 2)))
        x = left + right
    return x


@triton.jit(do_not_specialize=["num_rows"])
def _mix_parts_kernel(
    h_ptr,
    fn_ptr,
    parts_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    MIXES: tl.constexpr,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    column = tl.arange(0, 32)
    depth = tl.arange(0, DEPTH)
    start = part * PART * DEPTH
    h_at = h_ptr + row.to(tl.int64)[:, None] * WIDTH + (start + depth)[None, :]
    fn_at = fn_ptr + column[None, :] * WIDTH + (start + depth)[:, None]
    total = tl.zeros((ROWS, 32), tl.float32)
    squares = tl.zeros((ROWS, DEPTH), tl.float32)
    for step in range(PART):
        inside = start + step * DEPTH + depth < WIDTH
        h = tl.load(h_at, mask=(row < num_rows)[:, None] & inside[None, :], other=0.0)
        fn = tl.load(fn_at, mask=(column < MIXES)[None, :] & inside[:, None], other=0.0)
        h = h.to(tl.bfloat16)
        high = fn.to(tl.bfloat16)
        rest = fn - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = formats.dot_bf16(h, low, tl.zeros((ROWS, 32), tl.float32))
        product = formats.dot_bf16(h, middle, product)
        product = formats.dot_bf16(h, high, product)
        total += product
        wide = h.to(tl.float32)
        squares += wide * wide
        h_at += DEPTH
        fn_at += DEPTH
    square = _sum_tree(squares, ROWS, DEPTH, LEVELS)
    total = tl.where(column[None, :] == MIXES, square, total)
    out_at = (part * num_rows + row).to(tl.int64)[:, None] * 32 + column[None, :]
    tl.store(parts_ptr + out_at, total, mask=(row < num_rows)[:, None])


@triton.jit
def _pick(x, column, index: tl.constexpr):
    """One column of x [ROWS, 32], to the bit."""
    return tl.sum(tl.where(column[None, :] == index, x, 0.0), axis=1)


@triton.jit
def _pick4(x, column, first: tl.constexpr):
    return (
        _pick(x, column, first),
        _pick(x, column, first + 1),
        _pick(x, column, first + 2),
        _pick(x, column, first + 3),
    )


@triton.jit
def _softmax4(a, b, c, d, eps):
    m = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - m), tl.exp(b - m), tl.exp(c - m), tl.exp(d - m)
    inverse = tl.math.div_rn(1.0, a + b + c + d)
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@triton.jit
def _normal4(a, b, c, d, eps):
    """Four numbers that belong together, divided by (their sum + eps); the reciprocal to 2 ulp, since
    these form the longest chain of the whole mix, and the next pass corrects the last."""
    inverse = 1.0 / (a + b + c + d + eps)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _store4(ptr, a, b, c, d, mask):
    tl.store(ptr, a, mask=mask)
    tl.store(ptr + 1, b, mask=mask)
    tl.store(ptr + 2, c, mask=mask)
    tl.store(ptr + 3, d, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _mix_finish_kernel(
    parts_ptr,
    scale_ptr,
    base_ptr,
    pre_ptr,
    post_ptr,
    comb_ptr,
    num_rows,
    iters,
    hc_eps,
    eps,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 32)
    mask = (row < num_rows)[:, None]
    at = row.to(tl.int64)[:, None] * 32 + column[None, :]
    total = tl.zeros((ROWS, 32), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * num_rows * 32 + at, mask=mask, other=0.0)
    mean = tl.math.div_rn(_pick(total, column, 24), WIDTH * 1.0)
    norm = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
    known = column < 24
    scale = tl.load(scale_ptr + column, mask=known, other=0.0)
    base = tl.load(base_ptr + column, mask=known, other=0.0)
    m = total * norm[:, None] * scale[None, :] + base[None, :]
    gate = 1.0 / (1.0 + tl.exp(-m))
    head = row.to(tl.int64)[:, None] * 4 + column[None, :]
    tl.store(pre_ptr + head, gate + hc_eps, mask=mask & (column < 4)[None, :])
    is_post = (column >= 4) & (column < 8)
    tl.store(post_ptr + head - 4, gate * 2.0, mask=mask & is_post[None, :])
    a0, a1, a2, a3 = _pick4(m, column, 8)
    b0, b1, b2, b3 = _pick4(m, column, 12)
    c0, c1, c2, c3 = _pick4(m, column, 16)
    d0, d1, d2, d3 = _pick4(m, column, 20)
    a0, a1, a2, a3 = _softmax4(a0, a1, a2, a3, hc_eps)
    b0, b1, b2, b3 = _softmax4(b0, b1, b2, b3, hc_eps)
    c0, c1, c2, c3 = _softmax4(c0, c1, c2, c3, hc_eps)
    d0, d1, d2, d3 = _softmax4(d0, d1, d2, d3, hc_eps)
    for i in range(iters):
        if i > 0:
            a0, a1, a2, a3 = _normal4(a0, a1, a2, a3, hc_eps)
            b0, b1, b2, b3 = _normal4(b0, b1, b2, b3, hc_eps)
            c0, c1, c2, c3 = _normal4(c0, c1, c2, c3, hc_eps)
            d0, d1, d2, d3 = _normal4(d0, d1, d2, d3, hc_eps)
        a0, b0, c0, d0 = _normal4(a0, b0, c0, d0, hc_eps)
        a1, b1, c1, d1 = _normal4(a1, b1, c1, d1, hc_eps)
        a2, b2, c2, d2 = _normal4(a2, b2, c2, d2, hc_eps)
        a3, b3, c3, d3 = _normal4(a3, b3, c3, d3, hc_eps)
    out, inside = comb_ptr + row.to(tl.int64) * 16, row < num_rows
    _store4(out, a0, a1, a2, a3, inside)
    _store4(out + 4, b0, b1, b2, b3, inside)
    _store4(out + 8, c0, c1, c2, c3, inside)
    _store4(out + 12, d0, d1, d2, d3, inside)


def mix(
    h: Tensor,
    weights: MixWeights,
    *,
    iters: int,
    hc_eps: float,
    eps: float,
    settings: Config | None = None,
) -> Mix:
    """Weights of one sublayer from the stream, in two launches that read h and `fn` once.

    Args:
        h: bf16 values (bf16 or float32), contiguous [R, 4, D].
        weights: float32 on h's device, contiguous.

    Returns:
        float32. Against exact arithmetic: the logits are within 2^-18 of (sum |z * fn|) times the
        norm and scale, like those of any float32 product of this depth; from equal logits, gates
        differ by at most 2^-20 and the matrix's elements by 2^-18. Each row's bits depend on that
        row alone (see the module).

    Nothing here is read before the sublayer's end (`expand`) or the next one's start: it may run
    beside the sublayer.
    """
    num_rows, copies, dim = h.shape
    width = copies * dim
    assert copies == COPIES and weights.fn.shape == (MIXES, width) and h.is_contiguous()
    assert weights.fn.is_contiguous() and weights.fn.dtype == torch.float32
    pre, post, comb = (
        torch.empty((num_rows, *shape), dtype=torch.float32, device=h.device)
        for shape in ((copies,), (copies,), (copies, copies))
    )
    if num_rows == 0:
        return Mix(pre, post, comb)
    chosen = settings or config("mix", str(width), _MIX)
    num_parts = triton.cdiv(width, _PART * _DEPTH)
    parts = torch.empty((num_parts, num_rows, _WIDTH), dtype=torch.float32, device=h.device)
    _mix_parts_kernel[(triton.cdiv(num_rows, chosen["ROWS"]), num_parts)](
        h,
        weights.fn,
        parts,
        num_rows,
        WIDTH=width,
        MIXES=MIXES,
        DEPTH=_DEPTH,
        PART=_PART,
        LEVELS=_DEPTH.bit_length() - 1,
        **chosen,
    )
    rows = 1 if num_rows <= _FEW_ROWS else 4  # its sums run element by element
    _mix_finish_kernel[(triton.cdiv(num_rows, rows),)](
        parts,
        weights.scale,
        weights.base,
        pre,
        post,
        comb,
        num_rows,
        iters,
        hc_eps,
        eps,
        WIDTH=width,
        PARTS=num_parts,
        ROWS=rows,
        num_warps=1,
        **NO_FMA,
    )
    return Mix(pre, post, comb)


# --- The stream ------------------------------------------------------------------------------------


@triton.jit
def _sum_copies(h0, h1, h2, h3, w0, w1, w2, w3):
    """Weighted sum, from the first copy to the last, each product rounded."""
    return w0 * h0 + w1 * h1 + w2 * h2 + w3 * h3


@triton.jit
def _load_copies(h_ptr, column, mask, DIM: tl.constexpr):
    h0 = tl.load(h_ptr + column, mask=mask, other=0.0).to(tl.float32)
    h1 = tl.load(h_ptr + DIM + column, mask=mask, other=0.0).to(tl.float32)
    h2 = tl.load(h_ptr + 2 * DIM + column, mask=mask, other=0.0).to(tl.float32)
    h3 = tl.load(h_ptr + 3 * DIM + column, mask=mask, other=0.0).to(tl.float32)
    return h0, h1, h2, h3


@triton.jit
def _load4(ptr, STRIDE: tl.constexpr):
    return (
        tl.load(ptr),
        tl.load(ptr + STRIDE),
        tl.load(ptr + 2 * STRIDE),
        tl.load(ptr + 3 * STRIDE),
    )


@triton.jit
def _written_copy(h0, h1, h2, h3, y, post, w0, w1, w2, w3):
    """One copy after the sublayer, rounded."""
    return formats.round_bf16(post * y + _sum_copies(h0, h1, h2, h3, w0, w1, w2, w3))


@triton.jit
def _collapse_kernel(
    h_ptr, weights_ptr, out_ptr, DIM: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < DIM
    h0, h1, h2, h3 = _load_copies(h_ptr + row * 4 * DIM, column, mask, DIM)
    if MEAN:
        x = (h0 + h1 + h2 + h3) * 0.25
    else:
        w0, w1, w2, w3 = _load4(weights_ptr + row * 4, 1)
        x = _sum_copies(h0, h1, h2, h3, w0, w1, w2, w3)
    tl.store(out_ptr + row * DIM + column, formats.round_bf16(x), mask=mask)


@triton.jit
def _expand_kernel(
    y_ptr, h_ptr, post_ptr, comb_ptr, out_ptr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < DIM
    h0, h1, h2, h3 = _load_copies(h_ptr + row * 4 * DIM, column, mask, DIM)
    y = tl.load(y_ptr + row * DIM + column, mask=mask, other=0.0).to(tl.float32)
    p0, p1, p2, p3 = _load4(post_ptr + row * 4, 1)
    comb_ptr += row * 16
    a0, a1, a2, a3 = _load4(comb_ptr, 4)
    b0, b1, b2, b3 = _load4(comb_ptr + 1, 4)
    c0, c1, c2, c3 = _load4(comb_ptr + 2, 4)
    d0, d1, d2, d3 = _load4(comb_ptr + 3, 4)
    out = out_ptr + row * 4 * DIM + column
    tl.store(out, _written_copy(h0, h1, h2, h3, y, p0, a0, a1, a2, a3), mask=mask)
    tl.store(out + DIM, _written_copy(h0, h1, h2, h3, y, p1, b0, b1, b2, b3), mask=mask)
    tl.store(out + 2 * DIM, _written_copy(h0, h1, h2, h3, y, p2, c0, c1, c2, c3), mask=mask)
    tl.store(out + 3 * DIM, _written_copy(h0, h1, h2, h3, y, p3, d0, d1, d2, d3), mask=mask)


@triton.jit
def _collapse_norm_kernel(
    y_ptr,
    h_ptr,
    post_ptr,
    comb_ptr,
    pre_ptr,
    weight_ptr,
    out_ptr,
    x_ptr,
    q8_ptr,
    eps,
    DIM: tl.constexpr,
    EXPAND: tl.constexpr,
    Q8: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h_ptr += row * 4 * DIM
    out_ptr += row * 4 * DIM
    y_ptr += row * DIM
    x_ptr += row * DIM
    q8_ptr += row * DIM
    w0, w1, w2, w3 = _load4(pre_ptr + row * 4, 1)
    if EXPAND:
        p0, p1, p2, p3 = _load4(post_ptr + row * 4, 1)
        comb_ptr += row * 16
        a0, a1, a2, a3 = _load4(comb_ptr, 4)
        b0, b1, b2, b3 = _load4(comb_ptr + 1, 4)
        c0, c1, c2, c3 = _load4(comb_ptr + 2, 4)
        d0, d1, d2, d3 = _load4(comb_ptr + 3, 4)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, DIM, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        mask = column < DIM
        h0, h1, h2, h3 = _load_copies(h_ptr, column, mask, DIM)
        if EXPAND:
            y = tl.load(y_ptr + column, mask=mask, other=0.0).to(tl.float32)
            n0 = _written_copy(h0, h1, h2, h3, y, p0, a0, a1, a2, a3)
            n1 = _written_copy(h0, h1, h2, h3, y, p1, b0, b1, b2, b3)
            n2 = _written_copy(h0, h1, h2, h3, y, p2, c0, c1, c2, c3)
            n3 = _written_copy(h0, h1, h2, h3, y, p3, d0, d1, d2, d3)
            h0, h1, h2, h3 = n0, n1, n2, n3
            tl.store(out_ptr + column, h0, mask=mask)
            tl.store(out_ptr + DIM + column, h1, mask=mask)
            tl.store(out_ptr + 2 * DIM + column, h2, mask=mask)
            tl.store(out_ptr + 3 * DIM + column, h3, mask=mask)
        x = formats.round_bf16(_sum_copies(h0, h1, h2, h3, w0, w1, w2, w3))
        tl.store(x_ptr + column, x, mask=mask)
        squares += x * x
    mean = tl.math.div_rn(tl.sum(squares, axis=0), DIM * 1.0)
    scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
    tl.debug_barrier()  # the second pass reads what other threads of this program wrote
    for start in tl.range(0, DIM, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        mask = column < DIM
        x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        x = formats.round_bf16(x * scale * weight)
        tl.store(x_ptr + column, x, mask=mask)
        if Q8:
            tl.store(q8_ptr + column, formats.q8_row(x, BLOCK), mask=mask)


def collapse(
    h: Tensor,
    weights: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> Tensor:
    """sum_c weights_c * h_c -> bf16 values [R, D], the reference's bits.

    Args:
        h: bf16 values (bf16 or float32), contiguous [R, 4, D].
        weights: float32, contiguous [R, 4].
    """
    return _collapse(h, weights, out_dtype, settings)


def mean_copies(
    h: Tensor, *, out_dtype: torch.dtype = torch.float32, settings: Config | None = None
) -> Tensor:
    """Plain mean of the copies, bf16 values [R, D], the reference's bits; h as for `collapse`."""
    return _collapse(h, None, out_dtype, settings)


def _collapse(
    h: Tensor, weights: Tensor | None, out_dtype: torch.dtype, settings: Config | None
) -> Tensor:
    num_rows, dim = _shape(h)
    out = torch.empty((num_rows, dim), dtype=out_dtype, device=h.device)
    if num_rows:
        block, launch = _blocks(dim, settings)
        _collapse_kernel[(num_rows, triton.cdiv(dim, block))](
            h, h if weights is None else weights, out, dim, weights is None, block, **launch
        )
    return out


def expand(y: Tensor, h: Tensor, mixed: Mix, *, settings: Config | None = None) -> Tensor:
    """The stream after a sublayer, of h's dtype, the reference's bits.

    Args:
        y: bf16 values (bf16 or float32), contiguous [R, D], the sublayer's result.
        h: bf16 values, contiguous [R, 4, D], the stream that the sublayer read.
        mixed: float32, contiguous.
    """
    num_rows, dim = _shape(h)
    assert y.shape == (num_rows, dim) and y.is_contiguous()
    out = torch.empty_like(h)
    if num_rows:
        block, launch = _blocks(dim, settings)
        _expand_kernel[(num_rows, triton.cdiv(dim, block))](
            y, h, mixed.post, mixed.comb, out, dim, block, **launch
        )
    return out


def collapse_norm(
    h: Tensor,
    pre: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    q8: bool = False,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`rms_norm(collapse(h, pre), norm_weight, eps)`, bf16 values [R, D], and its Q8 form if wanted.

    Bound as for `rows.rms_norm`; the collapsed row is equal to the reference's.
    """
    return _norm_stream(None, h, None, pre, norm_weight, eps, q8, out_dtype, settings)[1:]


def expand_collapse_norm(
    y: Tensor,
    h: Tensor,
    mixed: Mix,
    pre: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    q8: bool = False,
    out_dtype: torch.dtype = torch.float32,
    settings: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From one sublayer's result to the next one's input: reads h once where three calls read it twice.

    Args:
        y, h, mixed: as for `expand`.
        pre: float32 [R, 4], the weights with which the next sublayer reads the new stream.

    Returns:
        The new stream, equal to `expand(y, h, mixed)`; and what `collapse_norm` makes of it, to the
        same bits.
    """
    out, x, quantized = _norm_stream(y, h, mixed, pre, norm_weight, eps, q8, out_dtype, settings)
    assert out is not None
    return out, x, quantized


def _norm_stream(
    y: Tensor | None,
    h: Tensor,
    mixed: Mix | None,
    pre: Tensor,
    norm_weight: Tensor,
    eps: float,
    q8: bool,
    out_dtype: torch.dtype,
    settings: Config | None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    num_rows, dim = _shape(h)
    assert pre.shape == (num_rows, COPIES) and pre.is_contiguous()
    assert norm_weight.shape == (dim,) and norm_weight.is_contiguous()
    x = torch.empty((num_rows, dim), dtype=out_dtype, device=h.device)
    quantized = torch.empty_like(x) if q8 else None
    out = None if mixed is None else torch.empty_like(h)
    if num_rows == 0:
        return out, x, quantized
    chosen = dict(settings or config("collapse_norm", str(dim), _STREAM))
    _collapse_norm_kernel[(num_rows,)](
        x if y is None else y,
        h,
        pre if mixed is None else mixed.post,
        pre if mixed is None else mixed.comb,
        pre,
        norm_weight,
        x if out is None else out,
        x,
        x if quantized is None else quantized,
        eps,
        DIM=dim,
        EXPAND=mixed is not None,
        Q8=q8,
        BLOCK=min(chosen["BLOCK"], max(32, triton.next_power_of_2(dim))),
        STAGES=chosen["num_stages"],
        num_warps=chosen["num_warps"],
        **NO_FMA,
    )
    return out, x, quantized


def _shape(h: Tensor) -> tuple[int, int]:
    num_rows, copies, dim = h.shape
    assert copies == COPIES and h.is_contiguous()
    return num_rows, dim


def _blocks(dim: int, settings: Config | None) -> tuple[int, dict[str, Any]]:
    """Columns of a program of element-wise work, and how it is launched."""
    chosen = settings or config("stream", str(dim), {"BLOCK": 1024, "num_warps": 4})
    block = min(chosen["BLOCK"], triton.next_power_of_2(dim))
    return block, {"num_warps": chosen["num_warps"]} | NO_FMA
