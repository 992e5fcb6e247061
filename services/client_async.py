"""The client library for asyncio: the same calls and promises as `client.py`, on one connection."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from phalanx.protocol.config import default_run_dir
from phalanx.protocol.link import receive, send
from phalanx.protocol.messages import (
    Abort,
    Delta,
    Done,
    Final,
    Health,
    HealthReply,
    PromptLogprob,
    Replay,
    Replayed,
    Stats,
    StatsReply,
)
from phalanx.services.client import (
    ANSWER_S,
    REPLAY_S,
    SILENCE_S,
    answer,
    begun_at,
    connect,
    make_core,
    make_spec,
)
from phalanx.services.client_core import Asking
from phalanx.services.client_ended import Ended
from phalanx.services.client_flow import Flow, GatewaySilent, Prompt, Result, Spec

_FRAMES_PER_TURN = 200
_FULL_S = 0.01  # until a full connection is offered the rest
_Reply = TypeVar("_Reply", Replayed, StatsReply, HealthReply, Done)


class AsyncStream:
    """A running request; one task iterates it. See `client.Stream`."""

    def __init__(self, client: "AsyncClient", flow: Flow) -> None:
        self._client, self._flow = client, flow
        self._changed = asyncio.Event()
        flow.on_event = self._changed.set

    async def __aiter__(self) -> AsyncIterator[Delta | Final]:
        """Raises Refused, RequestTimeout or GatewaySilent when the request does not end by itself."""
        flow = self._flow
        while True:
            await self._wait(lambda: bool(flow.events) or flow.done)
            while flow.events:
                yield flow.events.popleft()
            if flow.done:
                if flow.error is not None:
                    raise flow.error
                return

    async def batches(self, quiet_s: float | None) -> AsyncIterator[list[Delta | Final]]:
        """As iteration, but everything that came meanwhile at once; [] when nothing came for `quiet_s`."""
        flow = self._flow
        while True:
            try:
                async with asyncio.timeout(quiet_s):
                    await self._wait(lambda: bool(flow.events) or flow.done)
            except TimeoutError:
                yield []
                continue
            if flow.events:
                events = list(flow.events)
                flow.events.clear()
                yield events
            if flow.done and not flow.events:
                if flow.error is not None:
                    raise flow.error
                return

    async def accepted(self) -> "AsyncStream":
        """Wait until the request is journalled: then it survives everything. Raises as iteration."""
        await self._wait(lambda: self._flow.accepted or self._flow.done)
        if self._flow.error is not None:
            raise self._flow.error
        return self

    @property
    def request_id(self) -> str:
        """Empty until the request is accepted."""
        return self._flow.request_id

    @property
    def seed(self) -> int:
        return self._flow.seed

    @property
    def prompt_tokens(self) -> int:
        return self._flow.prompt_tokens

    @property
    def prompt_logprobs(self) -> tuple[PromptLogprob | None, ...]:
        """As far as received, with `prompt_logprobs` asked for: whole before the first Delta of index 0."""
        return tuple(self._flow.prompt_logprobs)

    @property
    def lacks_prompt(self) -> bool:
        """`prompt_logprobs` were asked for and are not whole."""
        return self._flow.lacks_prompt

    def abort(self) -> None:
        """End the request; go on iterating to see its finals. Legal at any time, twice, and late."""
        self._client._abort(self._flow)

    async def results(self) -> list[Result]:
        """Wait for the end; the finished sequences, by index. Raises as iteration."""
        async for _ in self:
            pass
        return self._flow.results()

    async def _wait(self, until: Callable[[], bool]) -> None:
        while not until():
            self._changed.clear()
            await self._changed.wait()


class AsyncClient:
    """See `client.Client`. Use it in one event loop, with `async with` or `close`."""

    def __init__(self, run_dir: Path | str | None = None, *, silence_s: float = SILENCE_S) -> None:
        path = Path(run_dir) if run_dir else default_run_dir()
        self._socket = connect(path)
        self._core = make_core(path, silence_s)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def generate(
        self,
        prompt: Prompt | Spec,
        *,
        timeout: float | None = None,
        n: int = 1,
        stream: bool = True,
        model: str = "",
        key: str = "",
        **sampling: Any,
    ) -> AsyncStream:
        """Start a request. See `client.Client.generate`."""
        spec = make_spec(prompt, n, stream, model, key, sampling)
        flow = self._core.generate(spec, time.monotonic_ns(), _ns_or_none(timeout))
        self._run()
        return AsyncStream(self, flow)

    def attach(
        self,
        request_id: str,
        offsets: Iterable[int] = (),
        *,
        have: Iterable[Sequence[int]] = (),
        timeout: float | None = None,
    ) -> AsyncStream:
        """Take over a request. See `client.Client.attach`."""
        begun = begun_at(offsets, have)
        flow = self._core.attach(request_id, begun, time.monotonic_ns(), _ns_or_none(timeout))
        self._run()
        return AsyncStream(self, flow)

    async def abort(self, request_id: str, *, timeout: float = ANSWER_S) -> None:
        await self._ask(lambda call: Abort(call, request_id), Done, timeout)

    async def replay(
        self, request_id: str, *, seat: int = -1, timeout: float = REPLAY_S
    ) -> Replayed:
        """Run a request that has ended again. See `client.Client.replay`."""
        return await self._ask(lambda call: Replay(call, request_id, seat), Replayed, timeout)

    async def stats(self, *, timeout: float = ANSWER_S) -> StatsReply:
        return await self._ask(Stats, StatsReply, timeout)

    async def health(self, *, timeout: float = ANSWER_S) -> HealthReply:
        return await self._ask(Health, HealthReply, timeout)

    @property
    def ended(self) -> Ended:
        """What came of sequences after their finals: nothing, of a gateway that keeps to its promise."""
        return self._core.ended

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._socket.close(linger=200)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # --- inside ---

    def _run(self) -> None:
        """Serve the connection in the background, and now."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="client")
        self._wake.set()

    def _abort(self, flow: Flow) -> None:
        self._core.abort(flow, time.monotonic_ns())
        self._run()

    async def _ask(
        self, make: Callable[[int], Asking], kind: type[_Reply], timeout: float
    ) -> _Reply:
        question = self._core.ask(make, time.monotonic_ns())
        changed = asyncio.Event()
        question.on_event = changed.set
        self._run()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await changed.wait()
        self._core.forget(question)
        return answer(question, kind, timeout)

    async def _serve(self) -> None:
        """The connection's one task.

        The socket's descriptor tells of changes, not of states (edge-triggered): so everything is
        sent and everything received before waiting on it again.
        """
        loop = asyncio.get_running_loop()
        descriptor = self._socket.fileno()
        loop.add_reader(descriptor, self._wake.set)
        try:
            while True:
                now_ns = time.monotonic_ns()
                self._core.poll(now_ns)
                self._wake.clear()
                self._flush()
                frames = receive(self._socket, _FRAMES_PER_TURN)
                for frame in frames:
                    self._core.on_frame(frame, now_ns)
                if frames or self._core.outgoing:
                    await asyncio.sleep(0 if frames else _FULL_S)  # let the streams' tasks run
                    continue
                due_ns = self._core.next_ns()
                wait_s = None if due_ns is None else max(0, due_ns - now_ns) / 1e9 + 0.001
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
        except Exception as error:
            self._core.fail_all(GatewaySilent(f"the connection failed: {error}"))
            raise
        finally:
            loop.remove_reader(descriptor)

    def _flush(self) -> None:
        outgoing = self._core.outgoing
        while outgoing and send(self._socket, outgoing[0]):
            outgoing.popleft()


def _ns_or_none(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)
