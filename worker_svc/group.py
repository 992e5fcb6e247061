"""Lockstep of the expert-parallel group: rounds of votes, and waiting for the others.

Workers step together because every MoE layer needs every rank. A rank that has something to say, or
sees a peer at its own next round, posts a vote for that round on the board; the round is over once
every member has posted it, and all of them read the same votes. Under policy `mixed` each round is a
step. Nobody posts: all are parked. A rank with nothing to do takes the step as a placeholder.

A vote also says which placement of experts the rank could run: once all of them say the same new one,
all go by it from that very round on.
"""

import time
from collections.abc import Callable, Iterable

from phalanx.protocol.board import ROUNDS, Board, ProcessPhase
from phalanx.protocol.errors import EpochChanged, PhalanxError
from phalanx.protocol.limits import EXCHANGE_DEADLINE_MS

# Looks before the first sleep: a peer that is about to finish costs no system call.
_SPIN_TURNS = 20
_SLICE_MS = 20.0  # longest sleep between looks at the epoch word; also bounds a lost wake-up
# Looks are never that far apart unless we did not run (a paused container): then nobody did, and nobody is late.
_GAP_NS = 1_000_000_000


def nobody() -> list[int]:
    """For waits that are for no peer."""
    return []


class Group:
    """This rank's view of the group during one epoch.

    Attributes:
        version: The placement version that the group runs.
        ready: The one that this rank could run in its next round; between rounds it may become another
            one, or `version` again.
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
        self.board, self.seat, self.epoch = board, seat, epoch
        self.version = self.ready = version
        self.members = sorted(members)
        self.peers = [member for member in self.members if member != seat]
        self.round = 1  # the next one
        self._beat = beat
        self._row = board.processes[seat]  # a worker's row is that of its seat

    def peer_waits(self) -> bool:
        """Whether some peer has posted our next round: then we must join it."""
        return any(self._has_posted(peer) for peer in self.peers)

    def enter(self, vote: int) -> list[int]:
        """Vote in our next round and wait until every member has. Returns all votes, by seat.

        Raises EpochChanged when the epoch word moves meanwhile.
        """
        self.post(vote)
        self.wait(self.complete, "vote", self.behind)
        return self.votes()

    def post(self, vote: int) -> None:
        self.board.seats[self.seat].post(self.epoch, self.round, vote, self.ready)
        self.ring_peers()

    def complete(self) -> bool:
        """Whether every member has posted the round that we posted."""
        return all(self._has_posted(peer) for peer in self.peers)

    def behind(self) -> list[int]:
        """The peers that have not posted our round yet."""
        return [peer for peer in self.peers if not self._has_posted(peer)]

    def _has_posted(self, peer: int) -> bool:
        epoch, number = self.board.seats[peer].posted
        if epoch != self.epoch:
            return epoch > self.epoch
        return (number - self.round) % ROUNDS < ROUNDS // 2  # its number may have begun again

    def votes(self) -> list[int]:
        """The votes of the complete round, by seat; the next round begins.

        When all are ready for the same placement, `version` is that one. All ranks read the same votes:
        they change together, or not at all.

        Raises PhalanxError when a peer still runs an earlier placement: rows would meet wrong experts.
        """
        found = [self.board.seats[member].vote(self.round) for member in self.members]
        versions = {version for _, version in found}
        if min(versions) < self.version:
            raise PhalanxError(
                f"rank {self.seat} runs placement {self.version}, a rank of {self.peers} only"
                f" {min(versions)}, in round {self.round} of epoch {self.epoch}"
            )
        if versions == {self.ready}:
            self.version = self.ready
        self.round += 1
        return [vote for vote, _ in found]

    def _may_finish(self, behind: Callable[[], list[int]]) -> bool:
        board, odd = self.board, self.epoch + 1
        if board.epoch != odd or not board.may_finish:
            return False
        return all(board.seats[peer].stop_ack != odd for peer in behind())

    def ring_peers(self) -> None:
        for peer in self.peers:
            self.board.seats[peer].bell.ring()

    def wait(
        self,
        ready: Callable[[], bool],
        what: str,
        behind: Callable[[], list[int]] = nobody,
        *,
        in_step: bool = False,
    ) -> None:
        """Return when `ready()`; it is looked at again whenever somebody rings our bell.

        `in_step`: rows of a step are waited for. When the epoch moves though nobody fell, the step is finished,
        unless one that we wait for has left it.

        Meanwhile our heartbeat row names those who are `behind`: who waits is never to blame for the wait.

        Raises EpochChanged when the epoch moves, PhalanxError when EXCHANGE_DEADLINE_MS have passed, not
        counting time in which we did not run (the supervisor acts long before: it sees who is waited for).
        """
        bell = self.board.seats[self.seat].bell
        started_ns = looked_ns = 0
        turns = 0
        try:
            while True:
                heard = bell.value
                if ready():
                    return
                if self.board.epoch != self.epoch and not (in_step and self._may_finish(behind)):
                    if in_step and ready():  # what it left behind it had stored before
                        return
                    raise EpochChanged(
                        f"epoch {self.epoch} became {self.board.epoch} during {what}"
                    )
                turns += 1
                if turns <= _SPIN_TURNS:
                    continue
                now_ns = time.monotonic_ns()
                started_ns = started_ns or now_ns
                if looked_ns and now_ns - looked_ns > _GAP_NS:
                    started_ns += now_ns - looked_ns
                looked_ns = now_ns
                late = behind()
                if now_ns - started_ns > EXCHANGE_DEADLINE_MS * 1_000_000:
                    raise PhalanxError(
                        f"rank {self.seat} waited {EXCHANGE_DEADLINE_MS} ms for its peers {late}"
                        f" in {what} of round {self.round}, epoch {self.epoch}"
                    )
                self._row.wait_for(late)
                self._beat()
                bell.wait(heard, _SLICE_MS)
        finally:
            if looked_ns:
                self._row.phase = ProcessPhase.BUSY
