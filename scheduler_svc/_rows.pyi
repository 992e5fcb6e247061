"""The compiled passes; their docstrings are in `_rows.c`."""

from typing import Any

from phalanx.protocol.messages import Sampling, TokenRows, TokensItem
from phalanx.protocol.steps import NewSequence, StepResult
from phalanx.scheduler_svc.outputs import Int32
from phalanx.scheduler_svc.plan import Flight, Wire
from phalanx.scheduler_svc.prefill import Stored
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.scores import Scores
from phalanx.scheduler_svc.state import Chunk, Ended, Fence, Key, Load, Sequence, Table
from phalanx.scheduler_svc.stops import Rows

class Passes:
    def __init__(
        self,
        columns: dict[str, Any],
        constants: tuple[int, int, int, int, int, int, int, int, int, int],
        classes: tuple[
            type[Sequence],
            type[Chunk],
            type[Sampling],
            type[TokensItem],
            type[TokenRows],
            type[NewSequence],
        ],
        no_scores: Scores,
    ) -> None: ...
    def insert(self, sequence: Sequence, end_token: int, request_id: bytes, /) -> None: ...
    def take_decoders(
        self, rank: Rank, rows: Rows, budget: int, max_drafts: int, /
    ) -> tuple[Rows | bytes, bytes, int] | None: ...
    def start_whole(
        self,
        rank: Rank,
        begun: set[str],
        stored: Stored | None,
        room: int,
        left: int,
        most: int,
        used_max: float,
        /,
    ) -> tuple[list[Chunk], int]: ...
    def plan(
        self, rank: Rank, rows: Rows, drafts: Int32, chunks: list[Chunk], seq: int, seen: int, /
    ) -> tuple[
        Wire,
        bytes | None,
        bytes | None,
        list[Sequence],
        list[Chunk],
        list[Load],
        bool,
        bool,
        int,
        int,
    ]: ...
    def to_decode(self, rank: Rank, sequences: list[Sequence], rows: Rows, /) -> bytes: ...
    def commit(
        self, table: Table, flight: Flight, result: StepResult, /
    ) -> tuple[
        TokenRows | None,
        list[TokensItem],
        list[Ended],
        list[Sequence],
        list[tuple[Sequence, int]],
    ]: ...
    def finish(
        self,
        rank: Rank,
        ended: list[Ended],
        kept: dict[Key, Sequence],
        now_ns: int,
        due_ns: int,
        /,
    ) -> tuple[list[Fence], list[Sequence]] | None: ...
    def free(self, rank: Rank, sequences: list[Sequence], /) -> None: ...
    def remove(self, table: Table, sequences: list[Sequence], /) -> None: ...
