"""The board: one small arena of the supervisor that every process maps.

It carries what must be seen within microseconds: the epoch word, doorbells, what each rank posted
for the step, STOP and GO acknowledgements, heartbeats, the topology itself, and beside it a placement
that is proposed to the running group. Each word has one writer, named below. Readers never lock.
"""

from collections.abc import Iterable
from enum import IntEnum

import msgspec

from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.errors import ArenaError
from phalanx.protocol.futex import Word
from phalanx.protocol.limits import MAX_PROCESSES, MAX_SEATS, TOPOLOGY_BYTES_MAX
from phalanx.protocol.mark import Mark
from phalanx.protocol.topology import Proposal, Topology

_GLOBAL_BYTES = 256
_SEAT_BYTES = 256
_PROCESS_BYTES = 128
_FINISHED = 14  # u32 of the global bytes: the newest odd epoch in which steps may be finished
_SUPERVISOR_BEAT = 8  # u64 of the global bytes, in a cache line of its own
_MARK_AT = 64  # in a process's bytes
_SEATS_AT = _GLOBAL_BYTES
_PROCESSES_AT = _SEATS_AT + MAX_SEATS * _SEAT_BYTES
_TOPOLOGY_AT = _PROCESSES_AT + MAX_PROCESSES * _PROCESS_BYTES
_PROPOSAL_AT = _TOPOLOGY_AT + 2 * TOPOLOGY_BYTES_MAX  # two places each, see `_Published`
BOARD_BYTES = _PROPOSAL_AT + 2 * TOPOLOGY_BYTES_MAX
ROUNDS = (
    2**32
)  # their numbers are told apart in an epoch; a million of them take minutes, all of them weeks


class Vote:
    """What a rank says of itself before a step: bits of one plain number, 0 for nothing."""

    PLAN = 1  # it has rows to run; under policy `ballot` rows of a decode step
    WANTS_PROMPT = 2  # `ballot`: a prompt step would have something to do here
    PROMPT_PLAN = 4  # `ballot`, second vote: rows of a prompt step are ready


class ProcessPhase(IntEnum):
    """What a process does now, for `status` and for the watchdog."""

    NONE = 0
    STARTING = 1
    LOADING = 2
    READY = 3
    BUSY = 4  # in a step, or in one long piece of work that reports progress
    DRAINING = 5
    COMPILING = 6  # a kernel, within a step: no sign of life until it is there
    WAITING = 7  # in a step, for the peers that `ProcessRow.awaits` names: it could not be quicker


class _Published:
    """A part of the board that its writer replaces as a whole: a reader sees the old or the new one.

    One word tells of it: how often it was written, and the length in bytes. There are two places, written in
    turn: what is whole stays so while the next one is written, even if the writer never gets to its end.
    """

    def __init__(self, what: str, data: memoryview, word_at: int, at: int) -> None:
        self._what, self._word = what, data[8 * word_at : 8 * word_at + 8].cast("Q")
        ends = at + TOPOLOGY_BYTES_MAX, at + 2 * TOPOLOGY_BYTES_MAX
        self._places = tuple(data[end - TOPOLOGY_BYTES_MAX : end] for end in ends)

    @property
    def version(self) -> int:
        return self._word[0] >> 32

    def write(self, encoded: bytes) -> None:
        if len(encoded) > TOPOLOGY_BYTES_MAX:
            raise ArenaError(
                f"the {self._what} takes {len(encoded)} bytes, the board has {TOPOLOGY_BYTES_MAX}"
            )
        version = self.version + 1
        self._places[version % 2][: len(encoded)] = encoded
        self._word[0] = version << 32 | len(encoded)

    def read(self) -> bytes:
        """What was written last; empty before the first time."""
        while True:
            word = self._word[0]
            version, length = word >> 32, word % 2**32
            encoded = bytes(self._places[version % 2][:length])
            if self._word[0] == word:
                return encoded  # else the next one is whole, and perhaps that after it begun, in this place


class Board:
    """Typed access to the words. `Board.create` in the supervisor, `Board.attach` elsewhere."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        data = arena.data
        self._u32 = data[:_TOPOLOGY_AT].cast("I")
        self._u64 = data[:_TOPOLOGY_AT].cast("Q")
        self._topology = _Published("topology", data, 2, _TOPOLOGY_AT)
        self._proposal = _Published("proposal", data, 3, _PROPOSAL_AT)
        self._epoch = Word(data, 0)  # written by the supervisor; odd while stopped
        self.supervisor_bell = Word(data, 4)  # rung by whoever acknowledges something
        self.seats = [SeatRow(self, seat) for seat in range(MAX_SEATS)]
        self.processes = [ProcessRow(self, index) for index in range(MAX_PROCESSES)]

    @classmethod
    def create(cls, node: str) -> "Board":
        return cls(Arena.create(arena_name(node, "board", 0), BOARD_BYTES, "supervisor"))

    @classmethod
    def attach(cls, node: str) -> "Board":
        arena = Arena.attach(arena_name(node, "board", 0))
        if arena.nbytes != BOARD_BYTES:
            raise ArenaError(f"the board has {arena.nbytes} bytes, expected {BOARD_BYTES}")
        return cls(arena)

    @property
    def epoch(self) -> int:
        return self._epoch.value

    def set_epoch(self, epoch: int, seats: list[int], *, ends_steps: bool = True) -> None:
        """Supervisor only: move the epoch word and wake the workers of `seats`.

        Args:
            ends_steps: an odd word ends the steps under way; else nobody fell, and they may be finished.
        """
        if not ends_steps:
            self._u32[_FINISHED] = epoch
        self._epoch.value = epoch
        for seat in seats:
            self.seats[seat].bell.ring()

    @property
    def may_finish(self) -> bool:
        """Whether the word is odd and the steps under way may be finished all the same."""
        epoch = self._epoch.value
        return epoch % 2 == 1 and self._u32[_FINISHED] == epoch

    @property
    def supervisor_beat_ns(self) -> int:
        """CLOCK_MONOTONIC of the supervisor's last turn; 0 before the first."""
        return self._u64[_SUPERVISOR_BEAT]

    @supervisor_beat_ns.setter
    def supervisor_beat_ns(self, now_ns: int) -> None:
        self._u64[_SUPERVISOR_BEAT] = now_ns

    def publish(self, topology: Topology) -> None:
        """Supervisor only: replace the topology."""
        self._topology.write(msgspec.msgpack.encode(topology))

    @property
    def topology_version(self) -> int:
        return self._topology.version

    def topology(self) -> Topology | None:
        """The topology published last; None before the first."""
        encoded = self._topology.read()
        return msgspec.msgpack.decode(encoded, type=Topology) if encoded else None

    def propose(self, proposal: Proposal) -> None:
        """Supervisor only: a placement for the group that runs; it replaces what was proposed before.

        Members get ready for it beside their steps (`SeatRow.placement_ready`), and run it from the first
        round on for which every one of them was (`placement_run`). No version is ever given to two
        placements. The supervisor rings the members' bells.
        """
        self._proposal.write(msgspec.msgpack.encode(proposal))

    def withdraw(self) -> None:
        """Supervisor only: nothing is proposed any more. Who runs it already goes on with it."""
        self._proposal.write(b"")

    @property
    def proposal_version(self) -> int:
        """Of this part of the board, not of a placement: changes with every proposal and withdrawal."""
        return self._proposal.version

    def proposal(self) -> Proposal | None:
        """What is proposed now."""
        encoded = self._proposal.read()
        return msgspec.msgpack.decode(encoded, type=Proposal) if encoded else None

    def close(self) -> None:
        self.arena.close()


class SeatRow:
    """The words of one seat (rank)."""

    def __init__(self, board: Board, seat: int) -> None:
        base = _SEATS_AT + seat * _SEAT_BYTES
        self._u32, self._u64 = board._u32, board._u64
        self._at32, self._at64 = base // 4, base // 8
        data = board.arena.data
        self.bell = Word(data, base)  # the worker of the seat sleeps on it; anyone rings
        self.scheduler_bell = Word(data, base + 4)  # the scheduler of the seat sleeps on it

    # Written by the worker: its vote in each round (`worker_svc/group.py`).
    def post(self, epoch: int, number: int, vote: int, version: int) -> None:
        """Vote in round `number`, with the placement version that this rank could run now.

        (epoch, number) is one word and goes last, so that a peer never pairs the round of one epoch
        with the number of another. There are two words for votes, used in turn: a quick rank posts
        the next round before a slow one has read this one. It cannot be two rounds ahead, because a
        round ends when everybody has posted it, and the slow one posts the next after it has read.
        """
        self._u64[self._at64 + 9 + number % 2] = version << 8 | vote
        self._u64[self._at64 + 8] = epoch << 32 | number % ROUNDS

    @property
    def posted(self) -> tuple[int, int]:
        """(epoch, round % ROUNDS) as posted last; rounds count from 1 in every epoch."""
        word = self._u64[self._at64 + 8]
        return word >> 32, word % ROUNDS

    def vote(self, number: int) -> tuple[int, int]:
        """(`Vote` as a plain number, placement version) posted for that round: the newest or the one
        before it."""
        word = self._u64[self._at64 + 9 + number % 2]
        return word & 0xFF, word >> 8

    # Written by the worker: answers to STOP and GO.
    @property
    def stop_ack(self) -> int:
        """The odd epoch that this worker acknowledged last."""
        return self._u32[self._at32 + 8]

    @stop_ack.setter
    def stop_ack(self, epoch: int) -> None:
        self._u32[self._at32 + 8] = epoch

    @property
    def go_ack(self) -> int:
        """The even epoch that this worker is ready to run: experts loaded, receive region mapped."""
        return self._u32[self._at32 + 9]

    @go_ack.setter
    def go_ack(self, epoch: int) -> None:
        self._u32[self._at32 + 9] = epoch

    @property
    def worker_incarnation(self) -> int:
        """Which incarnation wrote the acknowledgements above."""
        return self._u32[self._at32 + 10]

    @worker_incarnation.setter
    def worker_incarnation(self, incarnation: int) -> None:
        self._u32[self._at32 + 10] = incarnation

    @property
    def steps_run(self) -> int:
        """Steps this seat's worker has finished, placeholder steps included."""
        return self._u64[self._at64 + 6]

    @steps_run.setter
    def steps_run(self, steps: int) -> None:
        self._u64[self._at64 + 6] = steps

    @property
    def blocks(self) -> int:
        """KV blocks of this seat's worker, or of the last one that was there; 0 before the first."""
        return self._u32[self._at32 + 11]

    @blocks.setter
    def blocks(self, blocks: int) -> None:
        self._u32[self._at32 + 11] = blocks

    # Written by the worker: how far it is with what is proposed to it. The supervisor's bell is rung.
    @property
    def placement_ready(self) -> int:
        """The highest placement version that it could run in its next round."""
        return self._u64[self._at64 + 11]

    @placement_ready.setter
    def placement_ready(self, version: int) -> None:
        self._u64[self._at64 + 11] = version

    @property
    def placement_run(self) -> int:
        """The placement version that it runs: of its epoch's GO, or that of a flip since."""
        return self._u64[self._at64 + 12]

    @placement_run.setter
    def placement_run(self, version: int) -> None:
        self._u64[self._at64 + 12] = version

    @property
    def placement_slots(self) -> int:
        """Expert slots of a layer that it has now: a proposed placement uses no slot beyond them."""
        return self._u64[self._at64 + 13]

    @placement_slots.setter
    def placement_slots(self, slots: int) -> None:
        self._u64[self._at64 + 13] = slots

    @property
    def placement_copied(self) -> int:
        """Grows with each piece of work for a proposal: experts copied, layers laid out."""
        return self._u64[self._at64 + 14]

    @placement_copied.setter
    def placement_copied(self, pieces: int) -> None:
        self._u64[self._at64 + 14] = pieces

    # Written by the supervisor: an expert of this seat that another rank computed otherwise.
    @property
    def doubted(self) -> tuple[int, int] | None:
        """(layer, expert) that the worker's scrubber shall look at first."""
        word = self._u64[self._at64 + 15]
        return (word >> 32, word % 2**32 - 1) if word else None

    def doubt(self, layer: int, expert: int) -> None:
        self._u64[self._at64 + 15] = layer << 32 | expert + 1

    def forget_doubt(self) -> None:
        self._u64[self._at64 + 15] = 0

    # Written by the scheduler: which link arena the worker shall use.
    @property
    def link(self) -> int:
        """(scheduler incarnation << 32) | link number; 0 before the first."""
        return self._u64[self._at64 + 7]

    @link.setter
    def link(self, link: int) -> None:
        self._u64[self._at64 + 7] = link


class ProcessRow:
    """The heartbeat of one process: written by that process, read by the supervisor."""

    def __init__(self, board: Board, index: int) -> None:
        base = _PROCESSES_AT + index * _PROCESS_BYTES
        self._u64, self._at = board._u64, base // 8
        self.mark = Mark(board.arena.data, base + _MARK_AT)  # held by the process while it lives

    def beat(self, now_ns: int) -> None:
        self._u64[self._at] = now_ns

    @property
    def beat_ns(self) -> int:
        """CLOCK_MONOTONIC of the last proof of life; 0 before the first."""
        return self._u64[self._at]

    @property
    def progress(self) -> int:
        """Grows whenever a piece of work is done (a layer, a chunk, a message): a long prefill is progress."""
        return self._u64[self._at + 1]

    def advance(self) -> None:
        self._u64[self._at + 1] += 1

    @property
    def phase(self) -> ProcessPhase:
        return ProcessPhase(self._u64[self._at + 2])

    @phase.setter
    def phase(self, phase: ProcessPhase) -> None:
        self._u64[self._at + 2] = int(phase)

    @property
    def awaits(self) -> int:
        """The seats that a rank waits for while its phase is WAITING, one bit each."""
        return self._u64[self._at + 4]

    def wait_for(self, seats: Iterable[int]) -> None:
        """Say for whom we wait. Nobody is to be blamed for a wait for none: then the phase stays as it is."""
        mask = 0
        for seat in seats:
            mask |= 1 << seat
        if mask:
            self._u64[self._at + 4] = mask
            self.phase = ProcessPhase.WAITING

    @property
    def ready_heard(self) -> int:
        """Written by the supervisor: the incarnation whose Ready it has. Until then it is repeated."""
        return self._u64[self._at + 3]

    @ready_heard.setter
    def ready_heard(self, incarnation: int) -> None:
        self._u64[self._at + 3] = incarnation

    def clear(self) -> None:
        """Supervisor only, before the process starts and when the one before it is reaped."""
        for word in range(_PROCESS_BYTES // 8):
            self._u64[self._at + word] = 0
