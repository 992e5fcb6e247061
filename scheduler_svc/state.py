"""The sequences of one rank: a row of the shared table each, plus what has no fixed size. Pure."""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

import msgspec
import numpy as np

from phalanx.protocol.errors import Code
from phalanx.protocol.introductions import introduction_bytes
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import (
    FinishReason,
    Sampling,
    Submit,
    TokenLogprobs,
    TokenRows,
    TokensItem,
)
from phalanx.protocol.queues import REQUEST_ID_BYTES, Phase, QueueTable, State
from phalanx.protocol.steps import NewSequence
from phalanx.scheduler_svc.compiled import ROWS
from phalanx.scheduler_svc.outputs import Int32, Outputs
from phalanx.scheduler_svc.scores import NO_SCORES, Scores
from phalanx.scheduler_svc.stops import StopIds

if TYPE_CHECKING:
    from phalanx.scheduler_svc._rows import Passes

Key = tuple[str, int]  # (request_id, index)
# Plain ints: numpy is ten times slower with an IntEnum, which it takes for an object.
FREE, WAITING, RUNNING, ENDING = (int(state) for state in State)
QUEUED, RESUMED, PREEMPTED, PREFILL, DECODE, LOADING = (int(phase) for phase in Phase)


@dataclass(slots=True, eq=False)
class Load:
    """Stored blocks and a state on their way into regions of the staging arena, and from there to a worker."""

    sequence: "Sequence"
    blocks: list[int]  # regions of the staging arena, one for each of the sequence's first blocks
    state: int  # region of the state
    deadline_ns: int  # then the sequence waits no longer
    calls: set[int] = field(default_factory=set)  # Gets that are not answered yet
    wanted: bool = True  # the sequence, or a step under way, still needs the regions

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * BLOCK_SIZE


class Sequence(msgspec.Struct, eq=False):
    """One sequence. Numbers that change with every step live in its row of the table."""

    key: Key
    attempt: int
    prompt: bytes  # int32 ids
    num_prompt: int
    sampling: Sampling
    resumed: bytes  # int32 ids: the outputs that came with Submit
    max_outputs: int
    arrival_ns: int
    begun_ns: int  # nothing that its blocks come from was computed before
    # Place in the waiting queue, smaller goes first: 0 if it is ahead of arrivals else 1, then the time.
    order: tuple[int, int, int]
    handle: int  # its name in TokenRows
    copy_key: int  # 63 bits of (request_id, index): the same on every rank and after every move
    afresh: bool = False  # neither read from the KV store nor written there
    table: "Table | None" = None  # with its row and outputs; None: not yet, or finished
    row: int = -1
    ended: bytes = b""  # int32 ids: the outputs, once it is out of the table
    slot: int = -1
    blocks: list[int] = []
    known: bool = False  # its worker has it in its slot
    overtaken: int = 0  # how often a later one went first while it waited
    keys: list[bytes] = []  # of its first blocks, as far as they were looked up
    stored: int = 0  # so many of these blocks are in the KV store, with the state at their end
    leads: bool = False  # another one waits to be forked from it: no more than its prompt is loaded
    # Blocks of another prompt's that it shares, where no state is stored: one is worth while.
    common: int = 0
    marks: tuple[int, ...] | None = None  # where chunks of its prefill end; None: not decided yet
    load: Load | None = None
    cached: int = 0  # prompt tokens that its first prefill found in the store
    logprobs: list[TokenLogprobs] = []  # after the resumed outputs
    first_score: int = (
        0  # records of its prompt's log-probabilities before this one were told elsewhere
    )
    scores: Scores = NO_SCORES
    finish: FinishReason | None = None
    code: Code | None = None
    error: str = ""
    finished_ns: int = 0
    final_due_ns: int = 0  # when its final is said again
    settings_bytes: int = 0  # of a plan that tells its worker of it, beside its tokens

    def __post_init__(self) -> None:
        self.settings_bytes = introduction_bytes(self.sampling)
        if self.sampling.prompt_logprobs is not None:
            self.scores = Scores(self.sampling, self.num_prompt, self.first_score)

    @property
    def ahead(self) -> bool:
        """It goes ahead of arrivals: it ran before, or was accepted before."""
        return self.order[0] == 0

    @property
    def plain(self) -> bool:
        """Nothing goes with its tokens from now on."""
        return self.sampling.logprobs is None and self.scores.complete

    @property
    def request_id(self) -> str:
        return self.key[0]

    @property
    def index(self) -> int:
        return self.key[1]

    @property
    def num_outputs(self) -> int:
        if self.table is not None:
            return self.table.columns.output_tokens.item(self.row)
        return len(self.ended or self.resumed) // 4

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_outputs

    @property
    def num_resumed(self) -> int:
        return len(self.resumed) // 4

    def outputs(self) -> Int32:
        """A view, good until the next step enters."""
        if self.table is not None:
            return self.table.outputs.of(self.row, self.num_outputs)
        return np.frombuffer(self.ended or self.resumed, np.int32)

    def tokens(self) -> bytes:
        """int32 [num_tokens]: prompt and outputs."""
        return self.prompt + self.outputs().tobytes() if self.num_outputs else self.prompt

    def item(self, offset: int, end: int | None = None) -> TokensItem:
        """Its tokens from `offset` on and, if it has finished, its end; or nothing but its tokens up to `end`."""
        outputs = self.outputs() if end is None else self.outputs()[:end]
        offset = min(max(offset, 0), len(outputs))
        # Log-probabilities of tokens produced elsewhere stayed there.
        have = offset >= self.num_resumed
        logprobs = (
            self.logprobs[offset - self.num_resumed :][: len(outputs) - offset] if have else []
        )
        if self.table is not None:
            self.table.name(self)
        return TokensItem(
            self.request_id,
            self.index,
            self.attempt,
            offset,
            tuple(outputs[offset:].tolist()),
            self.finish if end is None else None,
            self.code if end is None else None,
            self.error if end is None else "",
            self.cached,
            tuple(logprobs),
            self.handle,
        )

    def score_item(self, first: int, end: int) -> TokensItem:
        """Records `first` .. `end` of its prompt's log-probabilities, and no token."""
        return TokensItem(
            self.request_id,
            self.index,
            self.attempt,
            self.num_outputs,
            (),
            prompt_offset=first,
            prompt_logprobs=self.scores.of(first, end),
        )


class Chunk(msgspec.Struct, eq=False):
    """Tokens `start .. start + count` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the last chunk: its last row gives the next token
    region: int = -1  # where the worker copies the state slot to afterwards; -1: nowhere

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def scored(self) -> int:
        """Its rows, the first ones, that tell the logprob of the prompt token after them."""
        if self.sequence.sampling.prompt_logprobs is None:
            return 0
        return max(0, min(self.end, self.sequence.num_prompt - 1) - self.start)


# A sequence, and why it ends.
Ended = tuple[Sequence, FinishReason, Code | None, str]
# (plan under way, ended sequences that it still writes): these come back with its result.
Fence = tuple[int, list[Sequence]]


def copy_key(request_id: str, index: int) -> int:
    name = f"{request_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def sequence_of(
    submit: Submit, max_outputs: int, order: tuple[int, int, int], now_ns: int
) -> Sequence:
    return Sequence(
        key=(submit.request_id, submit.index),
        attempt=submit.attempt,
        prompt=submit.prompt,
        num_prompt=len(submit.prompt) // 4,
        sampling=submit.sampling,
        resumed=submit.outputs,
        max_outputs=max_outputs,
        arrival_ns=now_ns,
        begun_ns=now_ns,
        order=order,
        handle=order[2],
        copy_key=copy_key(submit.copies_as or submit.request_id, submit.index),
        afresh=submit.afresh,
        first_score=submit.num_scores,
    )


# The compiled passes know them, too.
_CONSTANTS = (
    FREE,
    WAITING,
    RUNNING,
    ENDING,
    QUEUED,
    RESUMED,
    PREFILL,
    DECODE,
    BLOCK_SIZE,
    REQUEST_ID_BYTES,
)


def _passes(columns: QueueTable, outputs: Outputs) -> Optional["Passes"]:
    if ROWS is None:
        return None
    passes: Passes = ROWS.Passes(
        {**vars(columns), **outputs.columns},
        _CONSTANTS,
        (Sequence, Chunk, Sampling, TokensItem, TokenRows, NewSequence),
        NO_SCORES,
    )
    return passes


class Table:
    """Gives rows of the shared columns to sequences and takes them back.

    `passes` are the compiled ones over its rows; None: they run in Python.
    """

    def __init__(self, columns: QueueTable, compiled: bool = True) -> None:
        self.columns = columns
        self.outputs = Outputs(columns.rows)
        self.passes = _passes(columns, self.outputs) if compiled else None
        self.stop_ids = StopIds(columns.rows)
        self.by_row: dict[int, Sequence] = {}
        self._free = list(range(columns.rows - 1, -1, -1))
        self._version = columns.header["version"].data

    @property
    def free(self) -> int:
        return len(self._free)

    def insert(self, sequence: Sequence, end_token: int) -> None:
        """Give `sequence` a row, waiting. The caller has looked at `free`."""
        row = self._free.pop()
        sampling, max_outputs = sequence.sampling, sequence.max_outputs
        self.outputs.open(row, sequence.resumed, max_outputs)
        self.stop_ids.open(row, sampling, end_token)
        sequence.table, sequence.row = self, row
        self.by_row[row] = sequence
        t, (request_id, index) = self.columns, sequence.key
        if self.passes is not None:
            self.passes.insert(sequence, end_token, bytes.fromhex(request_id))
            return
        t.request_ids[row] = np.frombuffer(bytes.fromhex(request_id), np.uint8)
        t.index[row], t.attempt[row] = index, sequence.attempt
        t.arrival_ns[row] = sequence.arrival_ns
        t.prompt_tokens[row] = sequence.num_prompt
        t.output_tokens[row] = len(sequence.resumed) // 4
        t.max_tokens[row] = max_outputs
        t.min_tokens[row] = min(sampling.min_tokens, max_outputs + 1)
        t.end_token[row] = -1 if sampling.ignore_eos else end_token
        t.slot[row] = -1
        for column in (t.cached_tokens, t.preemptions, t.blocks, t.told, t.last_token):
            column[row] = 0
        t.committed[row] = t.planned[row] = 0
        t.last_plan[row] = t.named[row] = 0
        t.handle[row] = sequence.handle
        rows_max = t.rows_max[row] = sequence.num_prompt + max_outputs - 1
        predicted = sequence.num_prompt + len(sampling.predicted_token_ids)
        t.drafted_max[row] = min(predicted, rows_max) - 1
        t.phase[row] = RESUMED if sequence.resumed else QUEUED
        t.state[row] = WAITING

    def remove(self, sequences: list[Sequence]) -> None:
        if self.passes is not None:
            self.passes.remove(self, sequences)
            return
        rows = [sequence.row for sequence in sequences]
        at, by_row = np.array(rows, np.intp), self.by_row
        outputs = self.outputs.close(at, self.columns.output_tokens.take(at).tolist())
        self.stop_ids.close(rows)
        self.columns.state[at] = FREE
        self._free += rows
        for sequence, tokens in zip(sequences, outputs, strict=True):
            del by_row[sequence.row]
            sequence.ended, sequence.table, sequence.row = tokens, None, -1

    def name(self, sequence: Sequence) -> None:
        """Its handle is told: from now on its tokens may travel as a row, which nothing must follow."""
        if sequence.plain and sequence.finish is None:
            self.columns.named[sequence.row] = 1

    def begin(self) -> None:
        """A change starts: readers wait for `end`, or take what they see."""
        self._version[0] += 1

    def end(self) -> None:
        self._version[0] += 1
