"""Routes. A request is authenticated, understood, let in, run and answered; each step may refuse it in the
words of the API that was called."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from phalanx.protocol.config import HttpConfig
from phalanx.protocol.errors import Code, PhalanxError
from phalanx.protocol.limits import CLIENT_STALL_MS
from phalanx.protocol.log import Logger
from phalanx.services.client_async import AsyncClient
from phalanx.services.http import completions, errors, recipe
from phalanx.services.http.counts import Counted, Counts
from phalanx.services.http.errors import HttpError, bad
from phalanx.services.http.gate import Gate
from phalanx.services.http.keys import Keys
from phalanx.services.http.replies import Asked
from phalanx.services.http.running import Running, document_of, stream_of
from phalanx.services.http.tokens import Tokens
from phalanx.services.metrics import CONTENT_TYPE, exposition
from phalanx.services.template import RECIPE_MODEL

HEALTH_S = 0.5  # an answer that comes later is no sign of health
REQUEST_ID_CHARS_MAX = 128
LONG_BODY_BYTES = 1 << 16
_Body = Callable[[HttpError], dict[str, Any]]


class Stalled(Exception):
    """Whoever asked takes nothing of what he is sent."""


class EventStream(StreamingResponse):
    """Server-sent events; at their end, or when the client leaves or takes nothing for CLIENT_STALL_MS, everything
    they hold is let go: an end that never comes would keep its place from others."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        whole: contextlib.AsyncExitStack,
        headers: dict[str, str],
        on_stall: Callable[[], None],
        on_leave: Callable[[], None],
    ) -> None:
        more = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers | more, media_type="text/event-stream")
        self._whole, self._on_stall, self._on_leave = whole, on_stall, on_leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ended = False

        async def send_soon(message: Message) -> None:
            nonlocal ended
            try:
                async with asyncio.timeout(CLIENT_STALL_MS / 1000):
                    await send(message)
            except TimeoutError as error:
                raise Stalled from error
            ended |= message["type"] == "http.response.body" and not message.get("more_body", False)

        async with self._whole:
            try:
                with contextlib.suppress(ClientDisconnect):
                    await super().__call__(scope, receive, send_soon)
                if not ended:
                    self._on_leave()
            except Stalled:  # the server closes the connection of an answer without an end
                self._on_stall()


@dataclass
class Server:
    """What the routes share."""

    config: HttpConfig
    client: AsyncClient
    gate: Gate
    keys: Keys
    model: recipe.Model
    tokens: Tokens
    log: Logger
    run_dir: Path
    counts: Counts
    stopping: bool = False

    def app(self) -> Starlette:
        chat, messages = self._route(recipe.CHAT), self._route(recipe.MESSAGES)
        responses = self._route(recipe.RESPONSES)
        count = self._guarded(self._count, errors.anthropic_body)
        routes = [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._one_model), methods=["GET"]),
            Route("/v1/messages/count_tokens", count, methods=["POST"]),
            Route("/tokenize", self._guarded(self._tokenize), methods=["POST"]),
            Route("/detokenize", self._guarded(self._detokenize), methods=["POST"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ping", self._health, methods=["GET", "POST"]),
        ]
        origins = list(self.config.cors_origins)
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
        return Starlette(routes=routes, middleware=[cors] if origins else [])

    # ------------------------------------------------------------ generation

    def _route(self, api: recipe.Api) -> Callable[[Request], Awaitable[Response]]:
        words = errors.anthropic_body if api is recipe.MESSAGES else errors.openai_body

        async def handle(request: Request) -> Response:
            return await self._generate(
                request, words, lambda body: recipe.ask(api, body, self.model)
            )

        return handle

    async def _completions(self, request: Request) -> Response:
        def ask(body: dict[str, Any]) -> Asked:
            return completions.ask(body, self.model.name, self.tokens.words)

        return await self._generate(request, errors.openai_body, ask)

    async def _generate(
        self, request: Request, words: _Body, ask: Callable[[dict[str, Any]], Asked]
    ) -> Response:
        request_id = _request_id(request)
        headers = {"x-request-id": request_id}
        counted = self.counts.request(request.url.path)
        # Its `finally` is the end of the request: for a stream long after this function returned.
        whole = contextlib.AsyncExitStack()
        whole.callback(counted.end)
        try:
            who = self.keys.who(request.headers)
            self._refuse_if_stopping()
            with _bearable():
                body, size = await self._sized_body(request)
                self._check_model(body)
                asked = await self._understood(ask, body, size)
                timeout_s = self._timeout_s(request, body)
            self._refuse_if_stopping()  # since it came
            await self._while_connected(request, whole.enter_async_context(self.gate.place(who)))
            running = Running(self.client, asked.specs, timeout_s)
            whole.callback(running.abandon)
            started = await self._while_connected(request, running.accepted())
            self.log.info(
                "accepted", http_id=request_id, requests=[s.request_id for s in started], key=who
            )
            reply = asked.reply()
            if asked.stream:
                events = stream_of(running, reply, started, self.config.keep_alive_s, counted)

                def stalled() -> None:
                    why = f"nothing was taken for {CLIENT_STALL_MS // 1000} s"
                    failed = errors.of_code(Code.SLOW_CLIENT, why)
                    counted.status = failed.status
                    self.log.warning("failed", http_id=request_id, key=who, error=failed.text)

                return EventStream(
                    events,
                    whole.pop_all(),
                    headers,
                    stalled,
                    lambda: self._left(counted, request_id),
                )
            work = document_of(running, reply, started, counted)
            document = await self._while_connected(request, work)
            return _json(document, headers=headers)
        except ClientDisconnect:
            self._left(counted, request_id)
            return Response(status_code=499)  # nobody reads it
        except PhalanxError as error:
            failed = errors.of(error)
            counted.status = failed.status
            if failed.status >= 500:
                self.log.warning("failed", http_id=request_id, error=failed.text)
            return _json(words(failed), failed.status, {**headers, **failed.headers})
        finally:
            await whole.aclose()

    def _left(self, counted: Counted, request_id: str) -> None:
        """The client, before its answer was whole. An answer that failed remains one."""
        if counted.status == 200:
            counted.status = 499
        self.log.info("the client left", http_id=request_id)

    async def _while_connected(self, request: Request, work: Awaitable[Any]) -> Any:
        """The work's result. Raises ClientDisconnect when the client leaves before it is done."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(request.receive())
        try:
            while True:
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return task.result()
                if gone.result()["type"] == "http.disconnect":
                    raise ClientDisconnect
                gone = asyncio.ensure_future(request.receive())
        finally:
            for pending in (task, gone):
                if not pending.done():
                    pending.cancel()
                    with contextlib.suppress(asyncio.CancelledError, PhalanxError):
                        await pending

    # ------------------------------------------------------------ other questions

    def _guarded(
        self,
        handle: Callable[[Request], Awaitable[dict[str, Any]]],
        words: _Body = errors.openai_body,
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            headers = {"x-request-id": _request_id(request)}
            try:
                self.keys.who(request.headers)
                with _bearable():
                    return _json(await handle(request), headers=headers)
            except PhalanxError as error:
                failed = errors.of(error)
                return _json(words(failed), failed.status, {**headers, **failed.headers})

        return guarded

    async def _models(self, request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def _one_model(self, request: Request) -> dict[str, Any]:
        self._check_model({"model": request.path_params["name"]})
        return self._card()

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": 0,
            "owned_by": "phalanx",
            "max_model_len": self.model.max_positions,
        }

    async def _tokenize(self, request: Request) -> dict[str, Any]:
        return await self.tokens.tokenize(await self._body(request), self.model)

    async def _detokenize(self, request: Request) -> dict[str, Any]:
        return await self.tokens.detokenize(await self._body(request))

    async def _count(self, request: Request) -> dict[str, Any]:
        body = await self._body(request)
        asked = recipe.ask(recipe.MESSAGES, {"max_tokens": 1} | body, self.model)
        return {"input_tokens": len(await self.tokens.encode_spans(asked.specs[0].prompt))}

    async def _metrics(self, request: Request) -> Response:
        """Live state, gathered now, and this process's own counts."""
        text = await asyncio.to_thread(exposition, self.run_dir, self.counts.registry)
        return Response(text, media_type=CONTENT_TYPE)

    def _refuse_if_stopping(self) -> None:
        if self.stopping:
            raise HttpError(503, "shutdown", "the server is stopping", retry_after_s=5)

    async def _health(self, request: Request) -> Response:
        try:
            health = await self.client.health(timeout=HEALTH_S)
        except PhalanxError as error:
            return _json({"healthy": False, "reasons": [f"gateway: {error}"]}, 503)
        status = 200 if health.healthy and not self.stopping else 503
        body = {
            "healthy": status == 200,
            "epoch": health.epoch,
            "model": health.model,
            "reasons": [*health.reasons, *(["http is stopping"] if self.stopping else [])],
        }
        return _json(body, status)

    # ------------------------------------------------------------ bodies

    async def _understood(
        self, ask: Callable[[dict[str, Any]], Asked], body: dict[str, Any], size: int
    ) -> Asked:
        """A long body is read in a thread: no stream must wait for it."""
        return ask(body) if size < LONG_BODY_BYTES else await asyncio.to_thread(ask, body)

    async def _body(self, request: Request) -> dict[str, Any]:
        return (await self._sized_body(request))[0]

    async def _sized_body(self, request: Request) -> tuple[dict[str, Any], int]:
        """(the body as a JSON object, its bytes). Raises HttpError 400 or 413."""
        most = self.config.max_body_bytes
        too_large = HttpError(413, "too_large", f"the body has more than {most} bytes")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise too_large
            parts.append(part)
        try:
            return msgspec.json.decode(b"".join(parts), type=dict[str, Any]), size
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad(f"the body is not a JSON object: {error}") from error

    def _check_model(self, body: dict[str, Any]) -> None:
        name = body.get("model", self.model.name)
        if name not in (self.model.name, RECIPE_MODEL):
            text = f"the model {name!r} is not served here, {self.model.name!r} is"
            raise HttpError(404, "model_not_found", text, param="model")

    def _timeout_s(self, request: Request, body: dict[str, Any]) -> float | None:
        """The request's own deadline: header `x-request-timeout` or field `timeout`, in seconds."""
        given = request.headers.get("x-request-timeout", body.get("timeout"))
        if given is None:
            return self.config.request_timeout_s or None
        try:
            seconds = float(given)
        except (TypeError, ValueError) as error:
            raise bad(f"timeout is {given!r}, it must be a number of seconds") from error
        if not 0 < seconds <= 1e7:
            raise bad(f"timeout is {given} s, it must be above 0 and at most 1e7", "timeout")
        return seconds


@contextlib.contextmanager
def _bearable() -> Iterator[None]:
    """A body that Python cannot take in is refused, as any other mistake of the client. Raises HttpError 400."""
    try:
        yield
    except RecursionError as error:
        raise bad(f"the body is nested too deeply: {error}") from error
    except OverflowError as error:
        raise bad(f"a number in the body is too large: {error}") from error


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    usable = given.isascii() and given.isprintable() and len(given) <= REQUEST_ID_CHARS_MAX
    return given if given and usable else f"req_{token_hex(12)}"


def _json(
    document: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(document), status, headers, media_type="application/json")
