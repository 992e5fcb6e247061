"""The scheduler's shell: what it takes from its sockets in one turn."""

from itertools import count

import structlog

from phalanx.protocol.codec import Decoder, encode
from phalanx.protocol.link import send, thread_pair
from phalanx.protocol.messages import BusFromGateway, FinalSeen
from phalanx.scheduler_svc.main import MESSAGES_PER_TURN, TURN_NS, decoded


def test_many_long_messages_keep_neither_a_step_nor_a_sign_of_life_waiting() -> None:
    """64 sequences of one request with long drafts took seconds: their scheduler was killed as hung."""
    here, there = thread_pair("scheduler-turn")
    decoder, log = Decoder[BusFromGateway](BusFromGateway), structlog.get_logger()
    sent = [FinalSeen((("a", number, 1),)) for number in range(MESSAGES_PER_TURN + 9)]
    for message in sent:
        send(there, encode(message))
    send(there, b"no message")
    slow, quick = count(0, TURN_NS // 2).__next__, lambda: 0
    found = list(decoded(here, decoder, log, slow))
    assert len(found) == 2
    found += decoded(here, decoder, log, quick)
    assert len(found) == 2 + MESSAGES_PER_TURN, "others are served as well"
    found += decoded(here, decoder, log, quick)
    assert found == sent and not list(decoded(here, decoder, log, quick))
    for socket in (here, there):
        socket.close()
