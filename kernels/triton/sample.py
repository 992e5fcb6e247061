# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""From logits to tokens on the GPU: `kernels.reference.sample` in one kernel, a program a row.

A row of 129,280 logits does not fit an SM, and sorting it is what makes samplers slow. So each row is
read once: a fixed sample of it gives a key that a few thousand logits reach, more than a request can
ask for; those are copied to a work space (`sample_passes`), and the token is chosen among them
(`sample_choose`). When the sample misled (too few or too many reach the key: rows full of equal
logits), the exact cut is found by passes over the row; slower, the same token.

What equals the reference: everything that is compared, counted or added, bit for bit. Weights and
noise are float64 `exp` and `log` of the device's library, which may differ from torch's in the last
bit; a token could differ only where that bit decides a cut or a draw. Rows do not see each other, and
a row's path depends on its own logits and settings alone. Launch settings do depend on the number of
rows: they change how long it takes and in which order integers are added, and so no bit.
"""

import math
from dataclasses import replace
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
from phalanx.kernels.triton.sample_choose import choose, score
from phalanx.kernels.triton.sample_parts import (
    HIGHEST,
    ID_BITS,
    LOWEST,
    LOWEST_LOGIT,
    key_logit,
    logit_key,
    splitmix,
)
from phalanx.kernels.triton.sample_passes import (
    BROKEN,
    FINITE,
    collect,
    fill_lanes,
    largest,
    pivot,
    row_cut,
    row_seen,
)

FORCE_TOP_K_MAX: Final = 8192  # candidates of which one program can keep track
FEW_ROWS: Final = 132  # at most one program on each SM of an H200: settings for latency
MANY: Final[Config] = {
    "lanes": 256,  # a tile of a row, and the threads of a program
    "depth": 16,  # tiles on their way
    "group": 16,  # tiles of the sample by which a row's pivot is guessed
    "tile": 2048,  # logits looked at together by greedy rows
    "warps": 8,
    "registers": 128,  # a thread: two programs on an SM
}
_HALF: Final[Config] = MANY | {"lanes": 512, "group": 8, "tile": 4096, "warps": 16}
FEW: Final[Config] = _HALF | {"lanes": 1024, "depth": 8, "group": 4, "warps": 32, "registers": 64}
CANDIDATES: Final[dict[str, list[Config]]] = {
    "few": [FEW, _HALF],
    "many": [MANY, MANY | {"depth": 12}, _HALF | {"depth": 12, "registers": 64}],
}

# The vectors of SamplingRows that the kernel reads, in its order.
_FLOATS: Final = ("temperature", "top_p", "min_p")
_VECTORS: Final = (
    *("seed", "position", "top_k", "num_outputs", "min_tokens", "first_n_no_eos"),
    *_FLOATS,
)

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
        logits: float32 [n, V] on a GPU, never written to; rows of consecutive elements are not copied.
        rows: settings of the n rows, on the same device, or on the CPU (then copied, at once).
        mask: bool [n, V] on the same device, True where a grammar allows the token.
        force_top_k: candidates kept before temperature; min(force_top_k, V) <= FORCE_TOP_K_MAX.
        settings: launch settings in place of the table's; they change the time, no token.

    Returns:
        As the reference. The work space is about 0.3 MB a row.
    """
    assert logits.dtype == torch.float32 and logits.shape[0] == rows.num_rows and force_top_k >= 1
    assert min(force_top_k, logits.shape[1]) <= FORCE_TOP_K_MAX
    assert logits.shape[1] <= 1 << ID_BITS.value
    edits_asked, logprobs_asked = _lists_matter(rows), rows.num_top_logprobs >= 0
    if rows.seed.device != logits.device:
        everything = edits_asked or logprobs_asked
        rows = rows.to(logits.device) if everything else _vectors_to(rows, logits.device)
    if edits_asked:
        broken = ~logits.amax(1).isfinite()
        edited = edit_logits(logits, rows, mask)
        tokens, status = _launch(edited, rows, None, broken, force_top_k, settings)
    else:
        tokens, status = _launch(logits, rows, mask, None, force_top_k, settings)
    if not logprobs_asked:
        return SampleResult(tokens, status, None, None)
    return logprobs_of(tokens, status, logits, rows, mask, force_top_k=force_top_k)


def _lists_matter(rows: SamplingRows) -> bool:
    """Whether any row's lists may change its logits. Reads values only on the CPU."""
    if any(part.values.numel() for part in (rows.blocked_ids, rows.bias_ids, rows.outputs)):
        return True
    if not rows.stop_ids.values.numel():
        return False
    return rows.num_outputs.is_cuda or bool((rows.num_outputs < rows.min_tokens).any())


def _vectors_to(rows: SamplingRows, device: torch.device) -> SamplingRows:
    """What the kernel reads, in one copy; the lists stay where they are."""
    vectors = [getattr(rows, name) for name in _VECTORS]
    words = [
        v.long() if not v.is_floating_point() else v.double().view(torch.int64) for v in vectors
    ]
    moved: dict[str, Any] = dict(zip(_VECTORS, torch.stack(words).to(device), strict=True))
    for name in _FLOATS:
        moved[name] = moved[name].view(torch.float64)
    return replace(rows, **moved)


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
    size, default = ("few", FEW) if num_rows <= FEW_ROWS else ("many", MANY)
    settings = default | (settings or config("sample", f"{vocab}:{size}", default))
    shape = _shape(vocab, force_top_k, settings)
    work = torch.empty(
        num_rows, shape["SLOTS"] * shape["LANES"] * 3 // 2, dtype=torch.int64, device=logits.device
    )
    _sample_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        logits if mask is None else mask.view(torch.uint8),
        status if broken is None else broken.view(torch.uint8),
        *(getattr(rows, name).contiguous() for name in _VECTORS),
        work,
        tokens,
        status,
        rows.eos_id,
        int(rows.purpose),
        int(broken is not None),
        HAS_MASK=mask is not None,
        **shape,
    )
    return tokens, status


def _shape(vocab: int, force_top_k: int, settings: Config) -> dict[str, Any]:
    """The kernel's constants. `pivot` aims at 1.45 times what is wanted, give or take a third; a lane
    has slots for its part of that and five standard deviations."""
    kept = min(force_top_k, vocab)
    lanes = min(settings["lanes"], triton.next_power_of_2(vocab))
    tiles = triton.cdiv(vocab, lanes)
    expected = 1.9 * kept / lanes
    slots = settings.get("slots", math.ceil(expected + 5 * math.sqrt(expected)))
    slots = min(max(slots, triton.cdiv(kept, lanes)), tiles)
    return {
        "V": vocab,
        "K": kept,
        "LANES": lanes,
        "SLOTS": slots + settings["depth"],
        "DEPTH": settings["depth"],
        "GROUP": min(settings["group"], vocab // lanes) if tiles > slots else 0,
        "TILE": settings["tile"],
        "num_warps": settings["warps"],
        "maxnreg": settings["registers"],
    }


@triton.jit(do_not_specialize=["eos", "purpose", "edited"])  # each variant takes 12 s to compile
def _sample_kernel(
    logits,
    stride,
    mask,
    broken,
    seed,
    position,
    top_k,
    num_outputs,
    min_tokens,
    first_n_no_eos,
    temperature,
    top_p,
    min_p,
    work,
    tokens,
    status,
    eos,
    purpose,
    edited,
    V: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    mask += row.to(tl.int64) * V
    work += row.to(tl.int64) * (SLOTS * LANES * 3 // 2)
    scores = (work + SLOTS * LANES).to(tl.pointer_type(tl.float32))
    made = tl.load(num_outputs + row)
    no_end = (made < tl.load(min_tokens + row)) | (made < tl.load(first_n_no_eos + row))
    ban = tl.where(no_end, eos, -1)
    heat = tl.load(temperature + row).to(tl.float64)
    if heat > 0:
        limit = tl.load(top_k + row)
        limit = tl.where((limit > 0) & (limit < K), limit, K).to(tl.int32)
        least = tl.full((), LOWEST_LOGIT, tl.float32)
        origin = tl.zeros((), tl.float32)
        if GROUP > 0:
            least, origin = pivot(logits, mask, ban, limit, V, HAS_MASK, LANES, GROUP)
        seen, hits = fill_lanes(logits, mask, least, work, V, HAS_MASK, LANES, SLOTS, DEPTH)
        count = tl.sum(hits, 0)
        crowded = tl.max(hits, 0) > SLOTS - DEPTH
        hits = tl.minimum(hits, SLOTS - DEPTH)
        most = tl.max(hits, 0)
        request = splitmix(tl.load(seed + row).to(tl.uint64), tl.zeros((), tl.uint64))
        number = tl.load(position + row).to(tl.uint64) * 4 + purpose.to(tl.uint64)
        row_key = splitmix(request, number)
        heat = tl.maximum(heat, _COLDEST)
        rate = (2.0 / heat).to(tl.float32)
        tl.debug_barrier()
        bad, banned, top, excess, best, second, best_logit, best_id = score(
            work, scores, hits, most, ban, origin, rate, least, row_key, LANES
        )  # fmt: skip
        found = count - banned
        seen |= bad | tl.where(count > 0, FINITE, 0)
        if crowded | ((found < limit) & (least > LOWEST_LOGIT)):
            seen = row_seen(logits, V, TILE)
            if (seen & BROKEN) == 0:
                low = logit_key(least).to(tl.int64)
                high = tl.where(crowded, HIGHEST, low)
                low = tl.where(count > limit, low, LOWEST)  # one of them may be banned
                cut, above = row_cut(logits, mask, ban, low, high, limit, V, HAS_MASK, TILE)
                key, ties = cut.to(tl.int32), limit - above
                found = collect(logits, mask, ban, key, ties, work, V, HAS_MASK, TILE)
                hits = (found - tl.arange(0, LANES) + LANES - 1) // LANES
                most = tl.max(hits, 0)
                least = key_logit(key)
                tl.debug_barrier()
                bad, banned, top, excess, best, second, best_logit, best_id = score(
                    work, scores, hits, most, ban, origin, rate, least, row_key, LANES
                )
        token = tl.zeros((), tl.int32)
        if ((seen & BROKEN) == 0) & (found > 0):
            token = choose(
                work, scores, hits, most, found, least, top, excess, best, second, best_logit,
                best_id, origin, rate, row_key, heat, limit, tl.load(top_p + row).to(tl.float64),
                tl.load(min_p + row).to(tl.float64), V, LANES,
            )  # fmt: skip
    else:
        seen, token = largest(logits, mask, ban, V, HAS_MASK, TILE)
        found = (token < V).to(tl.int32)
    bad = (seen & BROKEN) != 0
    was_broken = tl.load(broken + row, mask=edited != 0, other=0) != 0
    bad |= tl.where(edited != 0, was_broken, (seen & FINITE) == 0)
    ended = tl.where(bad, _NAN, tl.where(found == 0, _ALL_BLOCKED, _OK))
    tl.store(status + row, ended.to(tl.uint8))
    tl.store(tokens + row, tl.where(ended == _OK, token, -1).to(tl.int64))
