"""What was lost of the journal (its file was deleted, or its disk was full for too long) lies there again before
anything rests on it: an end that a client is told, or a successor."""

import pytest
from gateway_desk import MS, Desk

from phalanx.protocol.limits import HAND_OVER_MS
from phalanx.protocol.messages import Abort, Done, Final
from phalanx.services.gateway.ending import Ending
from phalanx.services.gateway.entries import Accept, Again, Finish, Op
from phalanx.services.gateway.logs import REWRITE_NS


class LossyDesk(Desk):
    """Its journal takes changes when it is told to, and may lose all that it has."""

    def commits(self, failure: str = "", lost: bool = False) -> list[Op]:
        """What was for the journal since the last time."""
        self.core.turn(self.now)
        number, ops = self.core.take_ops()
        if lost:  # as `JournalWriter` says it
            self.core.on_journal(0, failure, self.now)
            self.core.on_journal_lost(self.now)
        self.core.on_journal(number, failure, self.now)
        self.core.deliver(self._send, self.now)
        return ops

    def loses(self) -> None:
        self.core.on_journal(0, "", self.now)
        self.core.on_journal_lost(self.now)

    def later(self, ns: int) -> None:
        self.now += ns
        self.core.turn(self.now)


def aborted(desk: Desk) -> bool:
    """Whether the client has been told so, by a final and an answer: both or none."""
    told = desk.told()
    finals = [m.finish_reason for m in told if isinstance(m, Final)]
    answers = [m for m in told if isinstance(m, Done)]
    assert (finals, len(answers)) in ([([], 0), (["abort"], 1)])
    return bool(finals)


@pytest.mark.parametrize("again_soon", [False, True])
def test_an_abort_is_told_when_what_was_lost_is_on_disk_again(again_soon: bool) -> None:
    """The writer dropped its Finish: that it takes what came later is not enough."""
    desk = LossyDesk()
    rid = desk.start()
    if again_soon:  # so that it is not written again at once
        desk.loses()
        desk.commits()
    desk.asks(Abort(2, rid), commit=False)
    desk.commits(lost=True)
    assert not aborted(desk)
    if again_soon:
        desk.now += REWRITE_NS
    written = desk.commits()
    assert {type(op) for op in written} >= {Again, Finish}
    assert aborted(desk) and desk.core.idle


def test_an_abort_is_told_when_the_disk_takes_nothing_again() -> None:
    """As any other that cannot be written down: it has ended here."""
    desk = LossyDesk()
    rid = desk.start()
    desk.asks(Abort(2, rid), commit=False)
    desk.commits(lost=True)
    assert not aborted(desk)
    desk.commits(failure="disk full")
    assert aborted(desk) and not desk.core.idle


def test_who_hands_over_writes_first_what_was_lost() -> None:
    """Though it was lost twice within a second, and then a third time."""
    desk = LossyDesk()
    desk.start()
    desk.loses()
    assert desk.commits() and desk.core.on_disk
    desk.loses()
    ending = Ending(desk.core)
    begun_ns = desk.now
    ending.hand_over(begun_ns + HAND_OVER_MS * MS)
    for _ in range(2):
        assert not ending.over(desk.now)
        desk.later(100 * MS)
        assert not ending.over(desk.now)
        written = desk.commits()
        assert [type(op) for op in written[:1]] == [Again] and ending.over(desk.now)
        desk.loses()
    assert not ending.over(desk.now) and ending.over(begun_ns + HAND_OVER_MS * MS)


def test_what_is_accepted_meanwhile_is_told_at_once() -> None:
    """Its own entry is never dropped."""
    desk = LossyDesk()
    desk.loses()
    desk.core.turn(desk.now)
    desk.loses()
    desk.clear()
    desk.start()
    assert any(isinstance(op, Accept) for op in desk.ops)
