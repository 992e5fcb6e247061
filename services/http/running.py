"""A request on its way through the node: streams merged, the reply written, everything let go at the end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.messages import Delta, Final, PromptLogprob
from phalanx.services.client_async import AsyncClient, AsyncStream
from phalanx.services.client_flow import Spec
from phalanx.services.http import errors
from phalanx.services.http.counts import Counted
from phalanx.services.http.replies import SSE, Reply, Started, check_end, joined

_KEEP_ALIVE = b": keep-alive\n\n"


class Running:
    """The streams of one HTTP request: one a prompt."""

    def __init__(self, client: AsyncClient, specs: Sequence[Spec], timeout_s: float | None) -> None:
        """Raises Refused when a request cannot be sent at all."""
        self._streams: list[AsyncStream] = []
        try:
            for spec in specs:
                self._streams.append(client.generate(spec, timeout=timeout_s))
        except PhalanxError:
            self.abandon()
            raise

    async def accepted(self) -> list[Started]:
        """Raises HttpError; nothing runs then."""
        try:
            for stream in self._streams:
                await stream.accepted()
        except PhalanxError as error:
            self.abandon()
            raise errors.of(error) from error
        return [Started(stream.request_id, stream.prompt_tokens) for stream in self._streams]

    def abandon(self) -> None:
        """End what still runs: nobody reads it any more."""
        for stream in self._streams:
            stream.abort()

    def scores(self, prompt: int) -> tuple[PromptLogprob | None, ...] | None:
        """Of the prompt's tokens; empty unless asked for, None while some are missing."""
        stream = self._streams[prompt]
        return None if stream.lacks_prompt else stream.prompt_logprobs

    async def batches(self, quiet_s: float) -> AsyncIterator[tuple[int, list[Delta | Final]]]:
        """(prompt, its new events); (-1, []) when nothing came for `quiet_s`. Raises PhalanxError."""
        if len(self._streams) == 1:
            async for events in self._streams[0].batches(quiet_s):
                yield (0, events) if events else (-1, [])
            return
        queue: asyncio.Queue[tuple[int, list[Delta | Final] | PhalanxError | None]]
        queue = asyncio.Queue()

        async def forward(number: int, stream: AsyncStream) -> None:
            try:
                async for events in stream.batches(None):
                    queue.put_nowait((number, events))
                queue.put_nowait((number, None))
            except PhalanxError as error:
                queue.put_nowait((number, error))

        tasks = [
            asyncio.create_task(forward(number, stream))
            for number, stream in enumerate(self._streams)
        ]
        try:
            left = len(tasks)
            while left:
                try:
                    async with asyncio.timeout(quiet_s):
                        number, found = await queue.get()
                except TimeoutError:
                    yield -1, []
                    continue
                if isinstance(found, PhalanxError):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield number, found
        finally:
            for task in tasks:
                task.cancel()


class Telling:
    """Tells a reply what came, the scores of a prompt first: they come with its sequence 0, and the others run at their
    own pace, so what is theirs waits here."""

    def __init__(
        self, reply: Reply, scores: Callable[[int], Sequence[PromptLogprob | None] | None]
    ) -> None:
        self._reply, self._scores = reply, scores
        self._begun = set[int]()
        self._held: dict[int, list[Delta | Final]] = {}

    def take(self, prompt: int, events: list[Delta | Final]) -> list[SSE]:
        """Raises HttpError when a sequence ended badly."""
        said: list[SSE] = []
        if prompt not in self._begun:
            for event in events:
                if isinstance(event, Final):
                    check_end(event)
            events = self._held[prompt] = self._held.get(prompt, []) + events
            if (scores := self._scores(prompt)) is None:
                return []
            self._begun.add(prompt)
            del self._held[prompt]
            said += self._reply.scored(prompt, scores) if scores else []
        return said + [sse for one in joined(events) for sse in self._reply.take(prompt, one)]


async def stream_of(
    running: Running,
    reply: Reply,
    started: list[Started],
    keep_alive_s: float,
    counted: Counted,
) -> AsyncIterator[bytes]:
    """The reply as server-sent events. A pause of the node is bridged with comments."""
    telling = Telling(reply, running.scores)
    try:
        yield b"".join(event.encode() for event in reply.begin(started))
        async for prompt, events in running.batches(keep_alive_s):
            if not events:
                yield _KEEP_ALIVE
                continue
            counted.saw(events)
            if said := telling.take(prompt, events):
                yield b"".join(event.encode() for event in said)
        yield b"".join(event.encode() for event in reply.end())
    except PhalanxError as error:
        failed = errors.of(error)
        counted.status = failed.status
        yield b"".join(event.encode() for event in reply.fail(failed))
    finally:
        running.abandon()


async def document_of(
    running: Running, reply: Reply, started: list[Started], counted: Counted
) -> dict[str, Any]:
    """The whole reply. Raises HttpError."""
    try:
        reply.begin(started)
        telling = Telling(reply, running.scores)
        async for prompt, events in running.batches(3600.0):
            if events:
                counted.saw(events)
                telling.take(prompt, events)
        return reply.document()
    except PhalanxError as error:
        raise errors.of(error) from error
    finally:
        running.abandon()
