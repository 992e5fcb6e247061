"""Who takes nothing of his stream loses it, and what it holds; who takes it slowly does not. Who leaves is told apart."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from phalanx.services.http import app
from phalanx.services.http.app import EventStream

LIMIT_MS = 1_000
SCOPE: Any = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}


def telling(told: list[str]) -> tuple[Callable[[], None], Callable[[], None]]:
    """What is heard of one that stalls, and of one that leaves."""
    return lambda: told.append("stalled"), lambda: told.append("left")


@pytest.mark.parametrize(("taken", "pause_s"), [(0, 0.0), (3, 0.0), (6, 0.2)])
def test_a_stream_ends_when_nobody_takes_it(
    taken: int, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five parts, with what begins it and what ends it: `taken` messages, then none."""
    monkeypatch.setattr(app, "CLIENT_STALL_MS", LIMIT_MS)
    told: list[str] = []
    sent: list[Any] = []

    async def parts() -> AsyncIterator[bytes]:
        for part in range(5):
            yield b"%d" % part

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        await asyncio.sleep(pause_s)
        if len(sent) > taken:
            await asyncio.Event().wait()
        sent.append(message)

    async def answer() -> None:
        whole = contextlib.AsyncExitStack()
        whole.callback(told.append, "let go")
        stream = EventStream(parts(), whole, {}, *telling(told))
        await asyncio.wait_for(stream(SCOPE, receive, send), 20)

    asyncio.run(answer())
    if taken == 6:
        assert told == ["let go"] and sent[-1] == {
            "type": "http.response.body",
            "body": b"",
            "more_body": False,
        }
    else:
        assert told == ["stalled", "let go"] and len(sent) == taken + 1


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
@pytest.mark.parametrize("before_end", [True, False])
def test_who_leaves_before_the_end_is_noticed(spec: str, before_end: bool) -> None:
    """Servers tell it in one of two ways: by what is received, or when something is sent."""
    told: list[str] = []
    gone = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b"0"
        if before_end:
            gone.set()
            await asyncio.sleep(0.01)
        yield b"1"

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if gone.is_set() and spec == "2.4":
            raise OSError
        if not message.get("more_body", True):
            gone.set()

    async def answer() -> None:
        whole = contextlib.AsyncExitStack()
        whole.callback(told.append, "let go")
        stream = EventStream(parts(), whole, {}, *telling(told))
        scope = SCOPE | {"asgi": {"version": "3.0", "spec_version": spec}}
        await asyncio.wait_for(stream(scope, receive, send), 20)

    asyncio.run(answer())
    assert told == (["left", "let go"] if before_end else ["let go"])
