"""Expert exchange over shared memory: each rank owns a receive region that its peers store into.

One exchange a MoE layer, in two legs. Dispatch: every rank stores, for each peer, the rows that
chose an expert held there. Combine: every rank stores the results back. A store is data, then count,
then the flag word with the exchange's number; the reader waits on flags. Each leg of a pair is
written again only after the other leg's flag of the exchange before was seen, so one buffer a leg
is enough. Each epoch has a fresh region: a dying peer may store into an old one at any time, which
nobody reads any more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.protocol.arena import KEEP_FREE_BYTES, Arena, arena_name
from phalanx.protocol.errors import ArenaError, NoRoom
from phalanx.protocol.failpoints import failpoint
from phalanx.worker_svc.group import Group

_FLAG_BYTES = 64  # flag and count share a cache line of their own
_NUMBERS = 2**32 - 1  # they are told apart from those before, and from 0: none yet
_LOOK_S = 0.005  # between two looks whether there is room, or an old region may be used again


@dataclass(frozen=True)
class Shape:
    """What one exchange can carry: at most `pairs` (row, expert) pairs between two ranks."""

    pairs: int
    hidden: int

    @property
    def dispatch_bytes(self) -> int:
        # expert slot int32, routing weight f32, row bf16
        return _FLAG_BYTES + self.pairs * (4 + 4 + 2 * self.hidden)

    @property
    def combine_bytes(self) -> int:
        return _FLAG_BYTES + self.pairs * 2 * self.hidden

    @property
    def source_bytes(self) -> int:
        """Both legs for one source, rounded up to a page."""
        return -(-(self.dispatch_bytes + self.combine_bytes) // 4096) * 4096


class Inbox:
    """The part of a region that one source rank stores into."""

    def __init__(self, region: memoryview, shape: Shape) -> None:
        n, d = shape.pairs, shape.hidden
        dispatch = region[: shape.dispatch_bytes]
        combine = region[shape.dispatch_bytes : shape.dispatch_bytes + shape.combine_bytes]
        self.dispatch_header = dispatch[:8].cast("I")  # flag, count
        self.combine_header = combine[:8].cast("I")
        at = _FLAG_BYTES
        self.slots = torch.frombuffer(dispatch, dtype=torch.int32, count=n, offset=at)
        self.weights = torch.frombuffer(dispatch, dtype=torch.float32, count=n, offset=at + 4 * n)
        self.rows = _matrix(dispatch, n, d, at + 8 * n)
        self.results = _matrix(combine, n, d, _FLAG_BYTES)

    def clear(self) -> None:
        """No exchange was begun here: numbers count from 1 in every epoch."""
        for header in (self.dispatch_header, self.combine_header):
            header[0] = header[1] = 0

    def store_dispatch(
        self, number: int, slots: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor
    ) -> None:
        count = slots.shape[0]
        if count:
            self.slots[:count] = slots
            self.weights[:count] = weights
            self.rows[:count] = rows
        self.dispatch_header[1] = count
        self.dispatch_header[0] = number

    def store_combine(self, number: int, results: torch.Tensor) -> None:
        if results.shape[0]:
            self.results[: results.shape[0]] = results
        self.combine_header[1] = results.shape[0]
        self.combine_header[0] = number


def _matrix(buffer: memoryview, rows: int, columns: int, offset: int) -> torch.Tensor:
    flat = torch.frombuffer(buffer, dtype=torch.bfloat16, count=rows * columns, offset=offset)
    return flat.view(rows, columns)


def region_name(node: str, seat: int, incarnation: int, epoch: int) -> str:
    return arena_name(node, f"xch{seat}", f"{incarnation}.{epoch}")


class Region:
    """The memory that a rank receives into, with room for every seat of the node.

    It is there before the rank says that it is ready: one that finds no room fails before it joins. A
    rank that runs goes on when /dev/shm is full: then it takes the region that it has again, as soon
    as all who could store into it are gone.
    """

    def __init__(
        self, node: str, seat: int, incarnation: int, seats: int, shape: Shape, *, newcomer: bool
    ) -> None:
        """Raises NoRoom. A `newcomer` leaves room for its peers, whose regions may have to grow."""
        self.shape, self.seat = shape, seat
        self._node, self._incarnation, self._seats = node, incarnation, seats
        self._used = False  # by some epoch
        self._arena: Arena | None = None
        if seats > 1:
            grow = seats * self._nbytes if newcomer else 0
            self._arena = self._create(0, KEEP_FREE_BYTES + grow)

    @property
    def _nbytes(self) -> int:
        return self._seats * self.shape.source_bytes

    def name(self, epoch: int) -> str:
        return region_name(self._node, self.seat, self._incarnation, epoch)

    def peer_name(self, seat: int, incarnation: int, epoch: int) -> str:
        return region_name(self._node, seat, incarnation, epoch)

    def _create(self, epoch: int, keep_free: int) -> Arena:
        return Arena.create(
            self.name(epoch), self._nbytes, f"worker-{self.seat}", keep_free=keep_free
        )

    def enter(self, epoch: int, members: int, over: Callable[[], bool]) -> Arena | None:
        """Memory for an epoch of so many ranks, which nobody stores into yet.

        `over` is asked as long as there is none, and so tells the world that we live: whether that
        epoch will not run after all. Then there is none.
        """
        if members > self._seats:
            self.close()
            self._seats = members
        while not over():
            if self._arena is not None and not self._used:
                return self._take(self._arena, epoch)
            try:
                fresh = self._create(epoch, 0)
            except NoRoom:
                if self._arena is not None and self._left_alone(self._arena):
                    return self._take(self._arena, epoch)
                time.sleep(_LOOK_S)
            else:
                self.close()
                self._arena, self._used = fresh, True
                return fresh
        return None

    def _left_alone(self, arena: Arena) -> bool:
        arena.rename(
            self.name(0)
        )  # first: from here on nobody finds it who does not hold it already
        return not arena.written_by_others()

    def _take(self, arena: Arena, epoch: int) -> Arena:
        for position in range(self._seats):
            Inbox(source_part(arena, position, self.shape), self.shape).clear()
        arena.rename(self.name(epoch))
        self._used = True
        return arena

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def source_part(arena: Arena, position: int, shape: Shape) -> memoryview:
    """What the member at that position, in the order of seats, stores into."""
    return arena.data[position * shape.source_bytes : (position + 1) * shape.source_bytes]


class Exchange:
    """The buffers of one epoch: our own region, and where we store in every peer's.

    Construct it before acknowledging GO; `connect` once the epoch runs (every peer has its own then).
    """

    def __init__(self, region: Region, epoch: int, members: list[int], own: Arena | None) -> None:
        """`own` is what `region.enter` gave for this epoch; None: there are no peers."""
        self.shape, self._region, self._epoch = region.shape, region, epoch
        self._seat, self._members = region.seat, sorted(members)
        self._number = 0  # exchanges begun in this epoch; all ranks count alike
        self._theirs: list[Arena] = []
        self._inboxes: dict[int, Inbox] = {}
        self._outboxes: dict[int, Inbox] = {}
        self.peers = [member for member in self._members if member != self._seat]
        if own is not None:
            self._inboxes = {peer: self._inbox(own, peer) for peer in self.peers}

    def connect(self, group: Group, incarnations: dict[int, int]) -> None:
        """Map every peer's region. `incarnations` gives each member's worker incarnation.

        Raises ArenaError when one cannot be mapped: then none is, and this may be tried again.
        """
        self._group = group
        try:
            for peer in self.peers:
                name = self._region.peer_name(peer, incarnations[peer], self._epoch)
                theirs = Arena.attach(name, writes=True)
                self._theirs.append(theirs)
                self._outboxes[peer] = self._inbox(theirs, self._seat)
        except ArenaError:
            self._disconnect()
            raise

    def _inbox(self, arena: Arena, source: int) -> Inbox:
        return Inbox(source_part(arena, self._members.index(source), self.shape), self.shape)

    def begin(self) -> None:
        """Start the next exchange. All ranks run the same layers, so all count alike.

        A thousand layers a second use up the numbers in 50 days: then they begin again.
        """
        self._number = self._number % _NUMBERS + 1

    def send(
        self, peer: int, slots: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Store the pairs that `peer` shall compute.

        Args:
            slots: int32 [n] expert slots at the peer.
            weights: float32 [n] routing weights.
            rows: bfloat16 [n, hidden] expert inputs.
        """
        failpoint("worker.exchange.before_send")
        self._outboxes[peer].store_dispatch(self._number, slots, weights, rows)
        self._group.board.seats[peer].bell.ring()

    def received(self) -> list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Wait for every peer's pairs: (peer, slots [n], weights [n], rows [n, hidden]) in seat order.

        The tensors are views of the region, valid until `reply` to that peer.
        """
        self._wait({peer: box.dispatch_header for peer, box in self._inboxes.items()}, "dispatch")
        return [
            (peer, inbox.slots[:n], inbox.weights[:n], inbox.rows[:n])
            for peer, inbox in self._inboxes.items()
            for n in [inbox.dispatch_header[1]]
        ]

    def reply(self, peer: int, results: torch.Tensor) -> None:
        """Store the results (bfloat16 [n, hidden]) of what `peer` sent, in its order."""
        failpoint("worker.exchange.before_reply")
        self._outboxes[peer].store_combine(self._number, results)
        self._group.board.seats[peer].bell.ring()

    def results(self) -> dict[int, torch.Tensor]:
        """Wait for every peer's results: bfloat16 [n, hidden] each, valid until the next exchange."""
        self._wait({peer: box.combine_header for peer, box in self._inboxes.items()}, "combine")
        return {
            peer: inbox.results[: inbox.combine_header[1]] for peer, inbox in self._inboxes.items()
        }

    def _wait(self, headers: dict[int, memoryview], leg: str) -> None:
        number = self._number
        self._group.wait(
            lambda: all(header[0] == number for header in headers.values()),
            leg,
            lambda: [peer for peer, header in headers.items() if header[0] != number],
            in_step=True,
        )

    def close(self) -> None:
        """Let go of the buffers. Our own memory is the region's, for the next epoch."""
        self._inboxes.clear()
        self._disconnect()

    def _disconnect(self) -> None:
        self._outboxes.clear()
        for arena in self._theirs:
            arena.close()
        self._theirs.clear()
