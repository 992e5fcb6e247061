"""Lockstep of the expert-parallel group: which step runs next, and waiting for the others.

Workers step together because every MoE layer needs every rank. A rank with a plan, or one that sees
a peer at its own next step, posts that step on the board; it runs once every member has posted it.
Nobody posts: all are parked. A rank with nothing to do takes the step as a placeholder.
"""

import time
from collections.abc import Callable, Iterable

from phalanx.protocol.board import Board, Post
from phalanx.protocol.errors import EpochChanged, PhalanxError
from phalanx.protocol.limits import EXCHANGE_DEADLINE_MS

_SPIN_TURNS = (
    20  # looks before the first sleep: a peer that is about to finish costs no system call
)
_SLICE_MS = 20.0  # longest sleep between looks at the epoch word; also bounds a lost wake-up


class Group:
    """This rank's view of the group during one epoch."""

    def __init__(
        self, board: Board, seat: int, members: Iterable[int], epoch: int, beat: Callable[[], None]
    ) -> None:
        self.board, self.seat, self.epoch = board, seat, epoch
        self.members = sorted(members)
        self.peers = [member for member in self.members if member != seat]
        self.step = 1  # the next one
        self._beat = beat

    def peer_waits(self) -> bool:
        """Whether some peer has posted our next step: then we must join it."""
        mine = (self.epoch, self.step)
        return any(self.board.seats[peer].posted >= mine for peer in self.peers)

    def enter(self, work: bool, plan_version: int) -> int:
        """Post our next step and wait until every member has. Returns the lowest plan version.

        Raises EpochChanged when the epoch word moves meanwhile.
        """
        flags = Post.WORK if work else Post.NONE
        self.board.seats[self.seat].post(self.epoch, self.step, flags, plan_version)
        self.ring_peers()
        mine = (self.epoch, self.step)
        self.wait(lambda: all(self.board.seats[peer].posted >= mine for peer in self.peers), "post")
        self.step += 1
        return min([plan_version, *(self.board.seats[peer].posted_version for peer in self.peers)])

    def ring_peers(self) -> None:
        for peer in self.peers:
            self.board.seats[peer].bell.ring()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Return when `ready()`; it is looked at again whenever somebody rings our bell.

        Raises EpochChanged when the epoch moves, PhalanxError when EXCHANGE_DEADLINE_MS have passed
        (the supervisor acts long before: it sees which rank makes no progress).
        """
        bell = self.board.seats[self.seat].bell
        started_ns = 0
        turns = 0
        while True:
            heard = bell.value
            if ready():
                return
            if self.board.epoch != self.epoch:
                raise EpochChanged(f"epoch {self.epoch} became {self.board.epoch} during {what}")
            turns += 1
            if turns <= _SPIN_TURNS:
                continue
            now_ns = time.monotonic_ns()
            started_ns = started_ns or now_ns
            if now_ns - started_ns > EXCHANGE_DEADLINE_MS * 1_000_000:
                raise PhalanxError(
                    f"rank {self.seat} waited {EXCHANGE_DEADLINE_MS} ms for its peers {self.peers}"
                    f" in {what} of step {self.step}, epoch {self.epoch}"
                )
            self._beat()
            bell.wait(heard, _SLICE_MS)
