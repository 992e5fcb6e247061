"""Lockstep of the expert-parallel group: rounds of votes, and waiting for the others.

Workers step together because every MoE layer needs every rank. A rank that has something to say, or
sees a peer at its own next round, posts a vote for that round on the board; the round is over once
every member has posted it, and all of them read the same votes. Under policy `mixed` each round is a
step. Nobody posts: all are parked. A rank with nothing to do takes the step as a placeholder.
"""

import time
from collections.abc import Callable, Iterable

from phalanx.protocol.board import Board
from phalanx.protocol.errors import EpochChanged, PhalanxError
from phalanx.protocol.limits import EXCHANGE_DEADLINE_MS

_SPIN_TURNS = (
    20  # looks before the first sleep: a peer that is about to finish costs no system call
)
_SLICE_MS = 20.0  # longest sleep between looks at the epoch word; also bounds a lost wake-up


class Group:
    """This rank's view of the group during one epoch.

    Args:
        version: The placement version that this rank is ready to run.
    """

    def __init__(
        self,
        board: Board,
        seat: int,
        members: Iterable[int],
        epoch: int,
        beat: Callable[[], None],
        version: int = 0,
    ) -> None:
        self.board, self.seat, self.epoch, self.version = board, seat, epoch, version
        self.members = sorted(members)
        self.peers = [member for member in self.members if member != seat]
        self.round = 1  # the next one
        self._beat = beat

    def peer_waits(self) -> bool:
        """Whether some peer has posted our next round: then we must join it."""
        mine = (self.epoch, self.round)
        return any(self.board.seats[peer].posted >= mine for peer in self.peers)

    def enter(self, vote: int) -> list[int]:
        """Vote in our next round and wait until every member has. Returns all votes, by seat.

        Raises EpochChanged when the epoch word moves meanwhile.
        """
        self.post(vote)
        self.wait(self.complete, "vote")
        return self.votes()

    def post(self, vote: int) -> None:
        self.board.seats[self.seat].post(self.epoch, self.round, vote, self.version)
        self.ring_peers()

    def complete(self) -> bool:
        """Whether every member has posted the round that we posted."""
        mine = (self.epoch, self.round)
        return all(self.board.seats[peer].posted >= mine for peer in self.peers)

    def votes(self) -> list[int]:
        """The votes of the complete round, by seat; the next round begins.

        Raises PhalanxError when a peer would run another placement: rows would meet wrong experts.
        """
        found = [self.board.seats[member].vote(self.round) for member in self.members]
        lowest = min(version for _, version in found)
        if lowest != self.version:
            raise PhalanxError(
                f"rank {self.seat} runs placement {self.version}, a rank of {self.peers} only"
                f" {lowest}, in round {self.round} of epoch {self.epoch}"
            )
        self.round += 1
        return [vote for vote, _ in found]

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
                    f" in {what} of round {self.round}, epoch {self.epoch}"
                )
            self._beat()
            bell.wait(heard, _SLICE_MS)
