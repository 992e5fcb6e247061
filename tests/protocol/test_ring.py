"""A ring delivers every message once, in order, over any wrap; a full one says how far the reader is."""

import random
import signal
import subprocess
import sys
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.errors import RingFull
from phalanx.protocol.futex import Word
from phalanx.protocol.limits import PLAN_BYTES_MAX, PLAN_RING_BYTES
from phalanx.protocol.ring import RING_HEADER_BYTES, Ring

PRODUCER = """
import sys
from phalanx.protocol.arena import Arena
from phalanx.protocol.errors import RingFull
from phalanx.protocol.futex import Word
from phalanx.protocol.ring import Ring
arena = Arena.attach(sys.argv[1])
ring = Ring(arena.data[64:], "test", Word(arena.data, 0))
for number in range(int(sys.argv[2])):
    message = number.to_bytes(4, "little") * (1 + number % 50)
    while True:
        try:
            ring.write(message)
            break
        except RingFull:
            pass
"""


def make(capacity: int) -> Ring:
    buffer = memoryview(bytearray(8 + RING_HEADER_BYTES + capacity))
    return Ring(buffer[8:], "test", Word(buffer, 0))


@given(st.lists(st.one_of(st.binary(max_size=90), st.none()), max_size=200), st.integers(25, 60))
def test_equals_a_queue(actions: list[bytes | None], words: int) -> None:
    ring, queue = make(8 * words), list[bytes]()
    for action in actions:
        if action is None:
            assert ring.read() == (queue.pop(0) if queue else None)
        else:
            try:
                ring.write(action)
            except RingFull as full:
                assert queue, f"an empty ring refused {len(action)} bytes: {full}"
            else:
                queue.append(action)
    while queue:
        assert ring.read() == queue.pop(0)
    assert ring.empty() and ring.read() is None


def test_full_names_the_distance() -> None:
    ring = make(64)
    ring.write(b"x" * 40)
    with pytest.raises(RingFull, match="the reader is 48 of 64 bytes behind"):
        ring.write(b"y" * 40)


def test_two_of_the_largest_plans_fit_wherever_the_ring_is() -> None:
    ring = make(PLAN_RING_BYTES - RING_HEADER_BYTES)
    first, second = b"a" * PLAN_BYTES_MAX, b"b" * PLAN_BYTES_MAX
    for step in (0, 1, 100_000, 700_000, 1_300_000, PLAN_BYTES_MAX - 9):
        ring.write(bytes(step))
        ring.read()
        ring.write(first)
        ring.write(second)
        assert (ring.read(), ring.read(), ring.read()) == (first, second, None)


@pytest.mark.process
def test_two_processes_across_a_futex() -> None:
    count = 20_000
    node = f"test{uuid.uuid4().hex[:8]}"
    with Arena.create(arena_name(node, "ring", 1), 1 << 14) as arena:
        bell = Word(arena.data, 0)
        ring = Ring(arena.data[64:], "test", bell)
        child = subprocess.Popen([sys.executable, "-P", "-c", PRODUCER, arena.name, str(count)])
        for number in range(count):
            while True:
                heard = bell.value
                if (message := ring.read()) is not None:
                    break
                bell.wait(heard, 1000)
            assert message == number.to_bytes(4, "little") * (1 + number % 50)
        assert child.wait(10) == 0


@pytest.mark.process
def test_a_killed_producer_leaves_a_readable_ring() -> None:
    """Whatever the moment of the kill: complete messages only, in order, then nothing."""
    rng = random.Random(7)
    for _ in range(5):
        node = f"test{uuid.uuid4().hex[:8]}"
        with Arena.create(arena_name(node, "ring", 1), 1 << 14) as arena:
            ring = Ring(arena.data[64:], "test", Word(arena.data, 0))
            child = subprocess.Popen([sys.executable, "-P", "-c", PRODUCER, arena.name, "1000000"])
            number, stop_at = 0, rng.randrange(200, 5000)
            while child.poll() is None:
                if (message := ring.read()) is not None:
                    assert message == number.to_bytes(4, "little") * (1 + number % 50)
                    number += 1
                    if number == stop_at:
                        child.send_signal(signal.SIGKILL)
            while (message := ring.read()) is not None:
                assert message == number.to_bytes(4, "little") * (1 + number % 50)
                number += 1
            assert number >= stop_at
