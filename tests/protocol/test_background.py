"""Looks that may hang are made beside the loop: one at a time, and nobody waits for them."""

import threading
import time

import pytest
from supervisor.node import until

from phalanx.protocol.background import Background, within


def test_what_was_found_is_picked_up_with_the_next_question() -> None:
    looks = Background[int]("test")
    assert looks.ask(lambda: 1) == []
    looks.end(10)
    assert looks.ask(lambda: 2) == [1]
    looks.end(10)
    assert looks.ask(lambda: 3) == [2]


def test_a_look_that_hangs_keeps_nobody_and_no_other_is_begun() -> None:
    looks, hangs, begun = Background[int]("test"), threading.Event(), list[int]()

    def look() -> int:
        begun.append(len(begun))
        hangs.wait()
        return begun[-1]

    started = time.monotonic()
    for _ in range(1000):
        assert looks.ask(look) == []
    looks.end(0.01)
    assert time.monotonic() - started < 5 and begun == [0]
    hangs.set()
    looks.end(10)
    assert looks.ask(lambda: 7) == [0], "it goes on"


def test_a_look_that_fails_ends_no_later_one() -> None:
    looks = Background[int]("test")
    threading.excepthook, before = lambda _: None, threading.excepthook
    try:
        looks.ask(lambda: 1 // 0)
        assert looks._thread is not None
        looks._thread.join(10)
    finally:
        threading.excepthook = before
    until(lambda: looks.ask(lambda: 5) == [5])


def test_within_a_limit() -> None:
    over = threading.Event()
    assert within(10.0, lambda: "words", "") == "words"
    assert within(0.01, lambda: "words" if over.wait() else "", "none") == "none"
    over.set()


def test_without_room_for_a_thread_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    looks = Background[int]("test")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        assert within(10.0, lambda: "words", "none") == "none"
        assert looks.ask(lambda: 1) == []
    assert looks.ask(lambda: 2) == []
    looks.end(10)
    assert looks.ask(lambda: 3) == [2]
