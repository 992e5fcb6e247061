"""What travels through the step rings of one rank: plans to the worker, results back.

Both rings live in the link arena, made by the scheduler and named by (seat, scheduler incarnation,
link number); a restart of either side makes a new one. Arrays are little-endian bytes, so that one
plan is one small message whatever the batch.
"""

import re
from typing import Any

import msgspec

from phalanx.protocol.arena import Arena, arena_name, names
from phalanx.protocol.board import SeatRow
from phalanx.protocol.errors import ArenaError
from phalanx.protocol.limits import PLAN_RING_BYTES, RING_BYTES
from phalanx.protocol.messages import Sampling, TokenLogprobs
from phalanx.protocol.ring import Ring, positions_in


class WorkerHello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first message on the result ring: what this worker offers. All its slots are free now."""

    worker_incarnation: int
    num_blocks: int  # block 0 included
    num_slots: int
    max_model_len: int  # positions
    vocab_size: int
    eos_token_id: int
    block_bytes: int
    slot_bytes: int
    block_arena: str  # KV block i lies at i * block_bytes
    snapshot_arena: str  # staging for window states; region i at i * slot_bytes
    num_snapshots: int
    max_drafts: int  # draft rows of one sequence that the rings can take back
    fingerprint: str


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that takes a state slot with this step."""

    slot: int
    copy_key: int  # < 2**63, from (request_id, index): picks among copies of an expert
    num_prompt: int  # tokens of the prompt; later tokens are outputs (penalties, limits)
    sampling: Sampling
    tokens: bytes  # int32: every token known now, prompt and resumed outputs


class Restore(msgspec.Struct, frozen=True, array_like=True):
    """What a new sequence of the plan finds in its blocks and its slot: copied from the staging arena
    before the step's first row. All places are bytes from the start of its payload."""

    slot: int
    state: int  # where the slot's bytes lie
    blocks: bytes  # int32 [n]: the sequence's first blocks
    places: bytes  # int64 [n]: where each block's bytes lie


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """One step of one rank. Sequence i owns rows cu[i] .. cu[i+1] of the step.

    A plan may be made before the result of the one before it is known. Then `carry` marks the
    sequences that continue that step, with one row and drafts: the worker knows their length and
    newest token; `starts` is an upper bound, and the token id is a placeholder.
    """

    seq: int  # counts plans within the link
    seen: int  # the newest result this plan knew; a plan that missed an aborted one is aborted, too
    new: tuple[NewSequence, ...]
    slots: bytes  # int32 [num_seqs] state slot of each sequence
    starts: bytes  # int32 [num_seqs] tokens whose KV is committed before this step
    seqlens_q: bytes  # int32 [num_seqs] rows of this step, draft rows included
    drafts: bytes  # uint8 [num_seqs] at most this many of the rows, the last ones, verify drafts
    sample: bytes  # uint8 [num_seqs] 1: sample after the last row before the drafts, and after each
    carry: bytes  # uint8 [num_seqs] 1: length and newest token are those that the slot has then
    token_ids: bytes  # int32 [sum(seqlens_q - drafts)] input ids; drafts are the worker's
    block_counts: bytes  # int32 [num_seqs] blocks added to the sequence's table by this step
    block_ids: bytes  # int32 [sum(block_counts)]
    snapshots: tuple[tuple[int, int], ...] = ()  # (slot, region): copy the slot after the commit
    # (slot, new slot, block, new block): copy slot and block (0: none) before the step's first row. The
    # new ones belong to a sequence of `new`, which goes on from what the other had computed by then.
    forks: tuple[tuple[int, int, int, int], ...] = ()
    restores: tuple[Restore, ...] = ()  # done before the forks
    staging: str = ""  # the scheduler's arena that they are copied from
    turn: int = 0  # policy `ballot`: rows of a prompt step, for the `PromptTurn` of this number


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What a rank's scheduler has to do, under policy `ballot`; said whenever it changes."""

    wants_prompt: bool = False  # a prompt step would have something to do
    decodes: bool = False  # a plan of decode rows is under way, or follows
    declined: int = 0  # the newest `PromptTurn` for which there was nothing to do after all


class PromptTurn(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The group would take a prompt step now: answer with a plan of this turn, or decline it.

    Plans made before this is known come back aborted.
    """

    turn: int


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """`aborted`: the epoch moved; nothing of the plan was committed, plan it again.

    `unrestored`: aborted because the staging arena could not be read: plan what it restores without that.
    """

    seq: int
    aborted: bool
    counts: bytes = b""  # uint8, for each sampled sequence in plan order: its new tokens
    tokens: bytes = b""  # int32 [sum(counts)]
    # A uint8 SampleStatus for each sampled sequence: 0, or why no more tokens came.
    status: bytes = b""
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # parallel to tokens; empty: none was asked for
    step_us: int = 0
    # For each sequence that asked for them and has rows before its last prompt token, in plan order:
    # the records (`prompt_logprobs.py`) of the prompt tokens after those rows.
    prompt_logprobs: tuple[bytes, ...] = ()
    unrestored: bool = False


ToScheduler = WorkerHello | StepResult | PromptTurn
ToWorker = StepPlan | Offer
_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(ToWorker)
_result_decoder = msgspec.msgpack.Decoder(ToScheduler)


# Of the rings of plans and of results in the link arena.
_PLACES = (0, PLAN_RING_BYTES), (PLAN_RING_BYTES, PLAN_RING_BYTES + RING_BYTES)


def link_arena_name(node: str, seat: int, link: int) -> str:
    return arena_name(node, f"link{seat}", f"{link >> 32}.{link & 0xFFFFFFFF}")


class Link:
    """Both rings of one rank. The scheduler creates it, the worker attaches."""

    def __init__(self, arena: Arena, seat: SeatRow) -> None:
        self.arena = arena
        plans, results = (arena.data[at:end] for at, end in _PLACES)
        self._plans = Ring(plans, f"{arena.name} plans", seat.bell)
        self._results = Ring(results, f"{arena.name} results", seat.scheduler_bell)

    @classmethod
    def create(cls, node: str, number: int, link: int, seat: SeatRow) -> "Link":
        arena = Arena.create(
            link_arena_name(node, number, link),
            _PLACES[-1][1],
            f"scheduler-{number}",
            keep_free=0,
        )
        return cls(arena, seat)

    @classmethod
    def attach(cls, node: str, number: int, link: int, seat: SeatRow) -> "Link":
        return cls(Arena.attach(link_arena_name(node, number, link)), seat)

    def send_plan(self, plan: ToWorker) -> None:
        self._plans.write(_encoder.encode(plan))

    def next_plan(self) -> ToWorker | None:
        encoded = self._plans.read()
        return None if encoded is None else _plan_decoder.decode(encoded)

    def send_result(self, result: ToScheduler) -> None:
        self._results.write(_encoder.encode(result))

    def next_result(self) -> ToScheduler | None:
        encoded = self._results.read()
        return None if encoded is None else _result_decoder.decode(encoded)

    @property
    def taken(self) -> bool:
        """Whether some worker has said hello on it: plans that it left unread are for nobody else."""
        return self._results.positions[0] > 0

    def close(self) -> None:
        self.arena.close()


def read_rings(node: str, seat: int, incarnation: int) -> list[dict[str, Any]]:
    """Who is behind in the link of a seat's scheduler, asking neither side: of each ring its reader and the
    bytes ever written and read. Nothing while there is no link."""
    numbers = [
        int(match[1])
        for name in names(node)
        if (match := re.fullmatch(rf".*-link{seat}-{incarnation}\.(\d+)", name))
    ]
    if not numbers:
        return []
    try:
        with Arena.attach(link_arena_name(node, seat, incarnation << 32 | max(numbers))) as arena:
            found: list[dict[str, Any]] = []
            for at, (name, reader) in enumerate((("plans", "worker"), ("results", "scheduler"))):
                with positions_in(arena.data[_PLACES[at][0] :]) as positions:
                    head, tail = positions
                found.append(
                    {"ring": name, "reader": f"{reader}-{seat}", "written": head, "read": tail}
                )
            return found
    except ArenaError:
        return []  # its owner made another one meanwhile
