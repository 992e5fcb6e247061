"""Who reads a stream: the last one that asked for it, as long as it is there."""

import pytest
from gateway_desk import MS, Desk

from phalanx.protocol.messages import (
    Accepted,
    Attach,
    ClientMessage,
    ClientReply,
    Delta,
    Final,
    Generate,
    Sampling,
)

DEAD, HEIR = b"dead", b"heir"
ASKED = Generate(1, prompt_token_ids=(5,), key="k", sampling=Sampling(max_tokens=9))


class TwoReaders(Desk):
    """One client dies; what is sent to it is `lost` so often before that is noticed."""

    lost = 0
    alive = True

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[bytes, ClientReply]] = []

    def _send(self, client: bytes, message: ClientReply) -> bool | None:
        if client == DEAD and not self.alive:
            self.lost -= 1
            return True if self.lost >= 0 else None
        self.heard.append((client, message))
        return True

    def read(self, client: bytes) -> list[ClientReply]:
        got = [message for to, message in self.heard if to == client]
        self.heard = [(to, message) for to, message in self.heard if to != client]
        return got


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("late", ["attach", "generate"])
def test_a_late_word_of_a_dead_client_takes_nothing_from_its_heir(late: str, lost: int) -> None:
    desk = TwoReaders()
    desk.asks(ASKED, client=DEAD)
    accepted = desk.read(DEAD)[0]
    assert isinstance(accepted, Accepted)
    rid = accepted.request_id
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10, 11)
    desk.decodes()
    desk.alive, desk.lost = False, lost
    desk.asks(Attach(2, rid, (1,)), client=HEIR)
    accepted, delta = desk.read(HEIR)
    assert isinstance(delta, Delta) and (delta.offset, delta.token_ids) == (1, (11,))
    again: dict[str, ClientMessage] = {"attach": Attach(3, rid, (2,)), "generate": ASKED}
    for _ in range(2):
        desk.asks(again[late], client=DEAD)
    desk.produces(seat, submit, 2, 12, seq=2)
    desk.decodes()
    desk.passes(200)
    (delta,) = desk.read(HEIR)
    assert isinstance(delta, Delta) and (delta.offset, delta.token_ids) == (2, (12,))
    desk.now += 60_000 * MS
    desk.produces(seat, submit, 3, 13, finish="length", seq=3)
    desk.decodes()
    told = desk.read(HEIR)[-1]
    assert isinstance(told, Final) and told.finish_reason == "length"


def test_who_lives_has_it_until_another_one_asks() -> None:
    desk = TwoReaders()
    desk.asks(ASKED, client=HEIR)
    accepted = desk.read(HEIR)[0]
    assert isinstance(accepted, Accepted)
    desk.asks(Attach(3, accepted.request_id), client=DEAD)
    ((seat, submit),) = desk.submits()
    desk.produces(seat, submit, 0, 10)
    desk.decodes()
    assert isinstance(desk.read(DEAD)[-1], Delta) and not desk.read(HEIR)
    desk.alive = False
    desk.produces(seat, submit, 1, 11, seq=2)
    desk.decodes()
    desk.passes(200)
    (delta,) = desk.read(HEIR)
    assert isinstance(delta, Delta) and delta.token_ids == (10, 11), "from where it is"
