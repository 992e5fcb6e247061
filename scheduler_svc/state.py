"""The sequences of one rank: a row of the shared table each, plus what has no fixed size. Pure."""

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import FinishReason, Sampling, Submit, TokenLogprobs, TokensItem
from phalanx.protocol.queues import Phase, QueueTable, State

Key = tuple[str, int]  # (request_id, index)
Rows = npt.NDArray[np.intp]


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. Numbers that change with every step live in its row of the table."""

    request_id: str
    index: int
    attempt: int
    prompt: bytes  # int32 ids
    sampling: Sampling
    outputs: "array[int]"
    resumed_outputs: int  # of the outputs, those that came with Submit
    max_outputs: int
    arrival_ns: int
    order: tuple[int, int, int]  # place in the waiting queue; smaller goes first
    row: int = -1  # -1: finished, out of the table
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    known: bool = False  # its worker has it in its slot
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # after the resumed outputs
    finish: FinishReason | None = None
    code: Code | None = None
    error: str = ""
    finished_ns: int = 0

    @property
    def key(self) -> Key:
        return self.request_id, self.index

    @property
    def num_prompt(self) -> int:
        return len(self.prompt) // 4

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) // 4 + len(self.outputs)

    def tokens(self) -> bytes:
        """int32 [num_tokens]: prompt and outputs."""
        return self.prompt + self.outputs.tobytes()

    def item(self, offset: int) -> TokensItem:
        """Its tokens from `offset` on and, if it has finished, its end."""
        offset = min(max(offset, 0), len(self.outputs))
        # Log-probabilities of tokens produced elsewhere stayed there.
        have = offset >= self.resumed_outputs
        logprobs = self.logprobs[offset - self.resumed_outputs :] if have else []
        return TokensItem(
            self.request_id,
            self.index,
            self.attempt,
            offset,
            tuple(self.outputs[offset:]),
            self.finish,
            self.code,
            self.error,
            0,
            tuple(logprobs),
        )


def sequence_of(
    submit: Submit, max_outputs: int, order: tuple[int, int, int], now_ns: int
) -> Sequence:
    outputs = array("i")
    outputs.frombytes(submit.outputs)
    return Sequence(
        request_id=submit.request_id,
        index=submit.index,
        attempt=submit.attempt,
        prompt=submit.prompt,
        sampling=submit.sampling,
        outputs=outputs,
        resumed_outputs=len(outputs),
        max_outputs=max_outputs,
        arrival_ns=now_ns,
        order=order,
    )


class Table:
    """Gives rows of the shared columns to sequences and takes them back."""

    def __init__(self, columns: QueueTable) -> None:
        self.columns = columns
        self.by_row: dict[int, Sequence] = {}
        self._free = list(range(columns.rows - 1, -1, -1))
        self._version = columns.header["version"]

    @property
    def free(self) -> int:
        return len(self._free)

    def insert(self, sequence: Sequence, end_token: int) -> None:
        """Give `sequence` a row, waiting. The caller has looked at `free`."""
        row = sequence.row = self._free.pop()
        self.by_row[row] = sequence
        t = self.columns
        t.request_ids[row] = np.frombuffer(bytes.fromhex(sequence.request_id), np.uint8)
        t.index[row], t.attempt[row] = sequence.index, sequence.attempt
        t.arrival_ns[row] = sequence.arrival_ns
        t.prompt_tokens[row] = sequence.num_prompt
        t.output_tokens[row] = len(sequence.outputs)
        t.max_tokens[row] = sequence.max_outputs
        t.min_tokens[row] = min(sequence.sampling.min_tokens, sequence.max_outputs + 1)
        t.end_token[row] = -1 if sequence.sampling.ignore_eos else end_token
        t.slot[row] = -1
        for column in (t.cached_tokens, t.preemptions, t.blocks, t.told, t.last_token):
            column[row] = 0
        for column in (t.committed, t.planned, t.in_flight):
            column[row] = 0
        t.predicted[row] = len(sequence.sampling.predicted_token_ids)
        t.phase[row] = Phase.RESUMED if sequence.outputs else Phase.QUEUED
        t.state[row] = State.WAITING

    def remove(self, sequence: Sequence) -> None:
        self.columns.state[sequence.row] = State.FREE
        del self.by_row[sequence.row]
        self._free.append(sequence.row)
        sequence.row = -1

    def begin(self) -> None:
        """A change starts: readers wait for `end`, or take what they see."""
        self._version[0] += np.uint64(1)

    def end(self) -> None:
        self._version[0] += np.uint64(1)
