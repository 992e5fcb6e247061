"""Who is full and who is gone are told apart; nobody takes messages for longer than a moment."""

import time
from itertools import count
from pathlib import Path

from phalanx.protocol import link
from phalanx.protocol.limits import SOCKET_HWM
from phalanx.protocol.link import for_a_while, receive, send, thread_pair

FRAME = b"frame"


def test_a_peer_that_takes_nothing_is_full_and_one_that_ended_is_gone(tmp_path: Path) -> None:
    router = link.bind_router(f"ipc://{tmp_path}/s", 1 << 20)
    full, gone = (link.connect_dealer(f"ipc://{tmp_path}/s", name) for name in ("full#1", "gone#1"))
    try:
        assert link.send(full, FRAME) and link.send(gone, FRAME)
        gone.close(linger=2000)
        deadline = time.monotonic() + 10
        heard: list[bytes] = []
        while len(heard) < 2 and router.poll(20_000):
            heard += [identity for identity, _ in link.receive_from(router, 9)]
        assert set(heard) == {b"full#1", b"gone#1"}, "what the dead have said comes"
        while (taken := link.send_to(router, b"gone#1", FRAME)) is not None:
            assert taken and time.monotonic() < deadline
            link.receive_from(router, 9)
            time.sleep(0.01)
        large = bytes(10_000)  # more than what lies in a socket's own buffers
        sent = refused = 0
        deadline = time.monotonic() + 30
        while refused < 10:  # in a row: what this side holds goes to the other's buffers meanwhile
            taken = link.send_to(router, b"full#1", large)
            assert taken is not None and time.monotonic() < deadline
            sent, refused = sent + taken, 0 if taken else refused + 1
            if refused:
                time.sleep(0.02)
        assert SOCKET_HWM <= sent <= 3 * SOCKET_HWM
        assert link.send_to(router, b"nobody#1", FRAME) is None
    finally:
        for socket in (router, full):
            socket.close(linger=0)


def test_many_long_messages_keep_nothing_else_waiting() -> None:
    """64 sequences of one request with long drafts took a scheduler seconds, which counted as hung."""
    here, there = thread_pair("a-turn")
    sent = [b"%d" % number for number in range(20)]
    for frame in sent:
        assert send(there, frame)

    def taken(most: int, each_ns: int) -> list[bytes]:
        return list(for_a_while(lambda: receive(here, 1), most, 100, count(0, each_ns).__next__))

    found = taken(15, 50)
    assert len(found) == 2
    found += taken(15, 0)
    assert len(found) == 17, "others are served as well"
    found += taken(15, 0)
    assert found == sent and not taken(15, 0)
    for socket in (here, there):
        socket.close()
