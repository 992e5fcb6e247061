# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""From logits to tokens on the GPU: `kernels.reference.sample` in one kernel, a program a row.

A row of 129,280 logits does not fit an SM, and sorting it is what makes samplers slow. So each row is
read once: a fixed sample of it gives a key that a few thousand logits reach; those are copied to a work
space; and every later step (the exact forced top-k, top-k, top-p, min-p, the draw) works on them. Cuts
are found by bisecting the 31 bits of a key, counting or adding integer masses. When the sample misled
(too few or too many reach the key: rows full of equal logits), the exact cut is found by passes over the
row; slower, the same token.

What equals the reference: everything that is compared, counted or added, bit for bit. Weights and
noise are float64 `exp` and `log` of the device's library, which may differ from torch's in the last
bit; a token could differ only where that bit decides a cut or a draw. Rows do not see each other, and
a row's path depends on its own logits and settings alone.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from phalanx.kernels.reference.penalties import edit_logits
from phalanx.kernels.reference.sample import (
    FORCE_TOP_K,
    TEMPERATURE_MIN,
    SampleResult,
    SampleStatus,
    logprobs_of,
)
from phalanx.kernels.reference.sampling_rows import SamplingRows
from phalanx.kernels.triton.configs import Config, config
from phalanx.kernels.triton.sample_parts import (
    BROKEN,
    EMPTY,
    FINITE,
    HIGHEST,
    LOWEST,
    collect,
    count_cut,
    draw,
    filtered,
    greedy_pass,
    pivot,
    row_cut,
    splitmix,
    trim,
    weigh,
)

FORCE_TOP_K_MAX: Final = 8192  # candidates that one program can hold
DEFAULT: Final[Config] = {
    "block": 2048,  # logits of a row read at a time
    "chunk": 1024,  # candidates weighed or drawn at a time
    "sample": 4096,  # logits of a row looked at before it is read
    "stages": 4,
    "warps": 16,
    "registers": 64,  # a thread: two programs on an SM
}
CANDIDATES: Final[list[Config]] = [
    DEFAULT,
    DEFAULT | {"block": 4096, "stages": 3},
    DEFAULT | {"block": 4096, "registers": 128},
    DEFAULT | {"warps": 8, "registers": 128},
    DEFAULT | {"block": 4096, "warps": 32},
    DEFAULT | {"stages": 1},
]

_OK: Final = tl.constexpr(int(SampleStatus.OK))
_ALL_BLOCKED: Final = tl.constexpr(int(SampleStatus.ALL_BLOCKED))
_NAN: Final = tl.constexpr(int(SampleStatus.NAN))
_COLDEST: Final = tl.constexpr(TEMPERATURE_MIN)


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    mask: torch.Tensor | None = None,
    *,
    force_top_k: int = FORCE_TOP_K,
    settings: Config | None = None,
) -> SampleResult:
    """Make one token a row; the meaning is that of `kernels.reference.sample.sample`.

    With the rows on the device, no edit lists (outputs, stop ids, bias, blocked ids) and no logprobs,
    this is one launch without a synchronisation, and can be captured in a CUDA graph; masks and bans
    on ending are part of it. Edit lists and logprobs go through the reference's torch operations on
    the same device, which synchronise; the token is the same with or without logprobs.

    Args:
        logits: float32 [n, V] on a GPU, rows of consecutive elements (16-byte aligned ones are read
            faster), never written to.
        rows: settings of the n rows, on the same device, or on the CPU (then copied).
        mask: bool [n, V] on the same device, True where a grammar allows the token.
        force_top_k: candidates kept before temperature; min(force_top_k, V) <= FORCE_TOP_K_MAX.
        settings: launch settings in place of the table's; they change the time, no token.
    """
    assert logits.dtype == torch.float32 and logits.shape[0] == rows.num_rows and force_top_k >= 1
    assert min(force_top_k, logits.shape[1]) <= FORCE_TOP_K_MAX
    edits_asked = _lists_matter(rows)
    rows = rows if rows.seed.device == logits.device else rows.to(logits.device)
    if edits_asked:
        broken = ~logits.amax(1).isfinite()
        edited = edit_logits(logits, rows, mask)
        tokens, status = _launch(edited, rows, None, broken, force_top_k, settings)
    else:
        tokens, status = _launch(logits, rows, mask, None, force_top_k, settings)
    if rows.num_top_logprobs < 0:
        return SampleResult(tokens, status, None, None)
    return logprobs_of(tokens, status, logits, rows, mask, force_top_k=force_top_k)


def _lists_matter(rows: SamplingRows) -> bool:
    """Whether any row's lists may change its logits. Reads values only on the CPU."""
    if any(part.values.numel() for part in (rows.blocked_ids, rows.bias_ids, rows.outputs)):
        return True
    if not rows.stop_ids.values.numel():
        return False
    return rows.num_outputs.is_cuda or bool((rows.num_outputs < rows.min_tokens).any())


def _launch(
    logits: torch.Tensor,
    rows: SamplingRows,
    mask: torch.Tensor | None,
    broken: torch.Tensor | None,
    force_top_k: int,
    settings: Config | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, status). `broken`, bool [n]: rows whose logits were unusable before they were edited."""
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    status = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    if not num_rows:
        return tokens, status
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if mask is not None:
        mask = mask.contiguous()
    shape = _shape(vocab, force_top_k, settings or config("sample", str(vocab), DEFAULT))
    work = torch.empty(num_rows, shape["WORK"], dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, shape["TOP"], dtype=torch.float64, device=logits.device)
    _sample_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        logits if mask is None else mask.view(torch.uint8),
        logits if broken is None else broken.view(torch.uint8),
        rows.seed,
        rows.position,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.num_outputs,
        rows.min_tokens,
        rows.first_n_no_eos,
        work,
        weights,
        tokens,
        status,
        rows.eos_id,
        int(rows.purpose),
        HAS_MASK=mask is not None,
        EDITED=broken is not None,
        **shape,
    )
    return tokens, status


def _shape(vocab: int, force_top_k: int, settings: Config) -> dict[str, Any]:
    """The kernel's constants. ROOM, for what reaches the pivot, is twice what is wanted; the sample
    aims at 1.45 times."""
    settings = DEFAULT | settings
    kept = min(force_top_k, vocab)
    room = settings.get("room", triton.next_power_of_2(2 * kept))
    sample_size = min(settings["sample"], triton.next_power_of_2(vocab + 1) // 2)
    aim = 1.45 * kept * sample_size / vocab
    top = triton.next_power_of_2(kept)
    return {
        "V": vocab,
        "K": kept,
        "TOP": top,
        "ROOM": room,
        "WORK": 2 * room + 3 * top,
        "SAMPLE": sample_size if vocab > room else 0,
        "LEAST": max(1, int(0.97 * aim)),
        "MOST": max(1, int(1.03 * aim)),
        "BLOCK": min(settings["block"], triton.next_power_of_2(vocab)),
        "CHUNK": min(settings["chunk"], top),
        "STAGES": settings["stages"],
        "num_warps": settings["warps"],
        "maxnreg": settings["registers"],
    }


@triton.jit(do_not_specialize=["eos", "purpose"])
def _sample_kernel(
    logits,
    stride,
    mask,
    broken,
    seed,
    position,
    temperature,
    top_k,
    top_p,
    min_p,
    num_outputs,
    min_tokens,
    first_n_no_eos,
    work,
    weights,
    tokens,
    status,
    eos,
    purpose,
    V: tl.constexpr,
    K: tl.constexpr,
    TOP: tl.constexpr,
    ROOM: tl.constexpr,
    WORK: tl.constexpr,
    SAMPLE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EDITED: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    mask += row.to(tl.int64) * V
    work += row.to(tl.int64) * WORK
    weights += row.to(tl.int64) * TOP
    made = tl.load(num_outputs + row)
    no_end = (made < tl.load(min_tokens + row)) | (made < tl.load(first_n_no_eos + row))
    ban = tl.where(no_end, eos, -1)
    heat = tl.load(temperature + row).to(tl.float64)
    if heat > 0:
        cut = tl.full((), LOWEST, tl.int64)
        if SAMPLE > 0:
            cut = pivot(logits, mask, ban, V, HAS_MASK, SAMPLE, LEAST, MOST)
        seen, count = collect(
            logits, mask, ban, cut.to(tl.int32), 0, work, work + ROOM,
            V, HAS_MASK, BLOCK, STAGES, ROOM, False,
        )  # fmt: skip
        if (count > ROOM) | ((count < K) & (cut > LOWEST)):
            cut, above = row_cut(
                logits, mask, ban, tl.where(count > ROOM, cut, LOWEST),
                tl.where(count > ROOM, HIGHEST, cut - 1), K, V, HAS_MASK, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
            seen, count = collect(
                logits, mask, ban, cut.to(tl.int32), K - above, work, work + ROOM,
                V, HAS_MASK, BLOCK, STAGES, ROOM, True,
            )  # fmt: skip
        tl.debug_barrier()
        token = tl.zeros((), tl.int32)
        if (count > 0) & ((seen & BROKEN) == 0):
            request = splitmix(tl.load(seed + row).to(tl.uint64), tl.zeros((), tl.uint64))
            number = tl.load(position + row).to(tl.uint64) * 4 + purpose.to(tl.uint64)
            token = _choose(
                work, weights, count, cut, splitmix(request, number), tl.maximum(heat, _COLDEST),
                tl.load(top_k + row), tl.load(top_p + row).to(tl.float64),
                tl.load(min_p + row).to(tl.float64), V, K, TOP, ROOM, CHUNK,
            )  # fmt: skip
    else:
        seen, token = greedy_pass(logits, mask, ban, V, HAS_MASK, BLOCK, STAGES)
        count = (token < V).to(tl.int32)
    bad = (seen & BROKEN) != 0
    if EDITED:
        bad |= tl.load(broken + row) != 0
    else:
        bad |= (seen & FINITE) == 0
    ended = tl.where(bad, _NAN, tl.where(count == 0, _ALL_BLOCKED, _OK))
    tl.store(status + row, ended.to(tl.uint8))
    tl.store(tokens + row, tl.where(ended == _OK, token, -1).to(tl.int64))


@triton.jit
def _choose(
    work,
    weights,
    count,
    pivot_key,
    row_key,
    temperature,
    top_k,
    top_p,
    min_p,
    V: tl.constexpr,
    K: tl.constexpr,
    TOP: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token of a row whose `count` best (key, id) lie at `work`, in ascending id."""
    limit = tl.where((top_k > 0) & (top_k < K), top_k, K).to(tl.int32)
    at = tl.arange(0, ROOM)
    keys = tl.load(work + at, mask=at < count, other=EMPTY)
    top_key = tl.max(keys, 0)
    keys_in = work
    ids_in = work + ROOM
    if count > limit:
        cut = count_cut(keys, pivot_key, top_key.to(tl.int64), limit, limit).to(tl.int32)
        ties = limit - tl.sum((keys > cut).to(tl.int32), 0)
        best = work + 2 * ROOM
        trim(work, work + ROOM, count, cut, ties, best, best + TOP, ROOM, CHUNK)
        tl.debug_barrier()
        keys_in = best
        ids_in = best + TOP
        count = limit
    weigh(keys_in, count, top_key, temperature, weights, CHUNK)
    tl.debug_barrier()
    places = work + 2 * ROOM + 2 * TOP
    chosen = ((top_p < 1) | (min_p > 0)).to(tl.int32)
    if chosen > 0:
        count = filtered(keys_in, weights, count, top_key, top_p, min_p, places, TOP)
        tl.debug_barrier()
    return draw(ids_in, weights, places, chosen, count, row_key, V, CHUNK)
