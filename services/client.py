"""The client library: `with Client(run_dir) as client: for part in client.generate("Hello"): ...`

One connection carries any number of requests. Streams survive the death of every process of the
node: they pause and go on. Every call has a deadline or fails when the gateway stays silent. A
`Client` belongs to one thread; `client_async.py` has the same for asyncio.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import zmq

from phalanx.protocol.config import default_run_dir
from phalanx.protocol.errors import Refused
from phalanx.protocol.link import connect_dealer, receive, send
from phalanx.protocol.messages import (
    Abort,
    Delta,
    Done,
    Error,
    Final,
    Health,
    HealthReply,
    PromptLogprob,
    Replay,
    Replayed,
    Sampling,
    Stats,
    StatsReply,
    Usage,
)
from phalanx.protocol.rundir import CLIENT_SOCKET, endpoint, is_running
from phalanx.services.client_core import Asking, ClientCore, Question
from phalanx.services.client_flow import (
    Begun,
    Flow,
    GatewaySilent,
    NoNode,
    Prompt,
    RequestTimeout,
    Result,
    Spec,
)

__all__ = [
    "Client",
    "GatewaySilent",
    "NoNode",
    "Refused",
    "RequestTimeout",
    "Result",
    "Spec",
    "Stream",
]

SILENCE_S = 60.0
ANSWER_S = 5.0  # for questions that the gateway answers at once
REPLAY_S = 600.0  # for a request to run again
CONCURRENCY = 5_000
_FRAMES_PER_TURN = 1_000
_Reply = TypeVar("_Reply", Replayed, StatsReply, HealthReply, Done)


class Stream:
    """A running request. Iterate it for its `Delta`s and `Final`s, in order within each sequence."""

    def __init__(self, client: "Client", flow: Flow) -> None:
        self._client, self._flow = client, flow

    def __iter__(self) -> Iterator[Delta | Final]:
        """Raises Refused, RequestTimeout or GatewaySilent when the request does not end by itself."""
        flow = self._flow
        while True:
            self._client._pump(lambda: bool(flow.events) or flow.done)
            while flow.events:
                yield flow.events.popleft()
            if flow.done:
                if flow.error is not None:
                    raise flow.error
                return

    def accepted(self) -> "Stream":
        """Wait until the request is journalled: then it survives everything. Raises as iteration."""
        self._client._pump(lambda: self._flow.accepted or self._flow.done)
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

    def abort(self) -> None:
        """End the request; go on iterating to see its finals."""
        self._client._abort(self._flow)

    def results(self) -> list[Result]:
        """Wait for the end; the finished sequences, by index. Raises as iteration."""
        for _ in self:
            pass
        return self._flow.results()


class Client:
    """A connection to the node in `run_dir`.

    Args:
        silence_s: With something open and nothing heard for this long, everything open fails.

    Raises:
        NoNode: there is no gateway's socket in `run_dir`.
    """

    def __init__(self, run_dir: Path | str | None = None, *, silence_s: float = SILENCE_S) -> None:
        path = Path(run_dir) if run_dir else default_run_dir()
        self._socket = connect(path)
        self._core = make_core(path, silence_s)

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
    ) -> Stream:
        """Start a request: a text, token ids or chat messages with any field of `Sampling`.

        Args:
            timeout: Seconds to the last final; then the request is aborted and iteration raises.

        Raises:
            Refused: it cannot be sent (too large, not valid Unicode); the gateway's own refusals
                are raised by the stream.
        """
        spec = make_spec(prompt, n, stream, model, key, sampling)
        return Stream(self, self._core.generate(spec, time.monotonic_ns(), _ns_or_none(timeout)))

    def generate_many(
        self,
        specs: Iterable[Spec],
        *,
        timeout: float | None = None,
        concurrency: int = CONCURRENCY,
    ) -> Iterator[tuple[int, Result]]:
        """Run many requests at once; yields (position, result) as sequences end.

        A request that is refused yields one result with `error` and goes under; one that times out, or that
        nobody answers any more, one for each sequence that has not ended, with what came of it. An overloaded
        node is asked again. `timeout` is for each request, from when it is sent.
        """
        source = enumerate(specs)
        flows: dict[int, tuple[Flow, int]] = {}  # with how many results were yielded
        changed: list[int] = []
        more = True
        try:
            while more or flows:
                while more and len(flows) < concurrency:
                    position, spec = next(source, (-1, None))
                    if spec is None:
                        more = False
                        break
                    refused = self._start(position, spec, timeout, flows, changed)
                    if refused is not None:
                        yield position, refused
                self._pump(lambda: bool(changed) or not flows)
                for position in dict.fromkeys(changed):
                    flow, told = flows[position]
                    yield from finished(position, flow, told)
                    flows[position] = (flow, len(flow.ended))
                    if flow.done:
                        del flows[position]
                changed.clear()
        finally:
            for flow, _ in flows.values():
                self._abandon(flow)

    def attach(
        self,
        request_id: str,
        offsets: Iterable[int] = (),
        *,
        have: Iterable[Sequence[int]] = (),
        timeout: float | None = None,
    ) -> Stream:
        """Take over a request, each sequence from where it was left.

        Args:
            offsets: numbers of tokens, one a sequence (absent: 0).
            have: instead, the tokens themselves: then a stream that does not begin with them ends
                with the code `stream_changed`.
        """
        begun = begun_at(offsets, have)
        now_ns = time.monotonic_ns()
        flow = self._core.attach(request_id, begun, now_ns, _ns_or_none(timeout))
        return Stream(self, flow)

    def abort(self, request_id: str, *, timeout: float = ANSWER_S) -> None:
        """End a request of anyone. Raises Refused when it is unknown."""
        self._ask(lambda call: Abort(call, request_id), Done, timeout)

    def replay(self, request_id: str, *, seat: int = -1, timeout: float = REPLAY_S) -> Replayed:
        """Run a request that has ended again, on any rank or on `seat`, and tell what differs.

        Args:
            request_id: or the beginning of it, if only one begins so.

        Raises:
            Refused: it has not ended, or is no longer kept, or the node takes no replay now.
            GatewaySilent: it took more than `timeout` seconds.
        """
        return self._ask(lambda call: Replay(call, request_id, seat), Replayed, timeout)

    def stats(self, *, timeout: float = ANSWER_S) -> StatsReply:
        return self._ask(Stats, StatsReply, timeout)

    def health(self, *, timeout: float = ANSWER_S) -> HealthReply:
        return self._ask(Health, HealthReply, timeout)

    def close(self) -> None:
        """Requests that still run go on until their clients have been silent for too long."""
        self._socket.close(linger=200)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- inside ---

    def _start(
        self,
        position: int,
        spec: Spec,
        timeout: float | None,
        flows: dict[int, tuple[Flow, int]],
        changed: list[int],
    ) -> Result | None:
        try:
            flow = self._core.generate(spec, time.monotonic_ns(), _ns_or_none(timeout), True)
        except Refused as refused:
            return failed(refused)
        flow.keep_events = False  # only results are asked for
        flow.on_event = lambda: changed.append(position)
        flows[position] = (flow, 0)
        return None

    def _abort(self, flow: Flow) -> None:
        self._core.abort(flow, time.monotonic_ns())
        self._flush()

    def _abandon(self, flow: Flow) -> None:
        self._core.drop(flow, time.monotonic_ns())
        self._flush()

    def _ask(
        self,
        make: Callable[[int], Asking],
        kind: type[_Reply],
        timeout: float,
    ) -> _Reply:
        now_ns = time.monotonic_ns()
        question = self._core.ask(make, now_ns)
        self._pump(lambda: question.reply is not None, now_ns + _ns(timeout))
        self._core.forget(question)
        return answer(question, kind, timeout)

    def _pump(self, until: Callable[[], bool], deadline_ns: int | None = None) -> None:
        """Serve the connection until the condition holds or the deadline passes."""
        while True:
            now_ns = time.monotonic_ns()
            self._core.poll(now_ns)
            self._flush()
            if until() or (deadline_ns is not None and now_ns >= deadline_ns):
                return
            due = [at for at in (self._core.next_ns(), deadline_ns) if at is not None]
            wait_ms = None if not due else max(0, min(due) - now_ns) // 1_000_000 + 1
            events = zmq.POLLIN | (zmq.POLLOUT if self._core.outgoing else 0)
            if self._socket.poll(wait_ms, events):
                now_ns = time.monotonic_ns()
                for frame in receive(self._socket, _FRAMES_PER_TURN):
                    self._core.on_frame(frame, now_ns)

    def _flush(self) -> None:
        outgoing = self._core.outgoing
        while outgoing and send(self._socket, outgoing[0]):
            outgoing.popleft()


def connect(run_dir: Path) -> "zmq.Socket[bytes]":
    """Raises NoNode. The socket's file may be away for a moment: a gateway starts, or finds it deleted."""
    if node_gone(run_dir):
        raise NoNode(f"no node is running in {run_dir}: start one with `phalanx up`")
    # A name of its own lets this client be recognised when its connection is made anew; with a `#` in
    # it, damaged frames are found out (`protocol/link.py`).
    return connect_dealer(endpoint(run_dir, CLIENT_SOCKET), f"client#{token_hex(16)}")


def node_gone(run_dir: Path) -> bool:
    """No node is running, and the last one has ended: one that was killed leaves its gateway's socket, and whoever
    waits for its successor waits there."""
    return not (run_dir / CLIENT_SOCKET).exists() and not is_running(run_dir)


def make_core(run_dir: Path, silence_s: float) -> ClientCore:
    where = str(run_dir / CLIENT_SOCKET)
    return ClientCore(token_hex, _ns(silence_s), where, lambda: node_gone(run_dir))


def make_spec(
    prompt: Prompt | Spec, n: int, stream: bool, model: str, key: str, sampling: dict[str, Any]
) -> Spec:
    if isinstance(prompt, Spec):
        return prompt
    return Spec(prompt, msgspec.convert(sampling, Sampling), n, stream, model, key)


def begun_at(offsets: Iterable[int], have: Iterable[Sequence[int]]) -> list[Begun]:
    """Where an attached flow begins. Raises ValueError when both are given."""
    places = [Begun(offset) for offset in offsets]
    tokens = [Begun(token_ids=ids) for ids in have]
    if places and tokens:
        raise ValueError("give offsets or the tokens themselves, not both")
    return places or tokens


def failed(error: Exception) -> Result:
    """A request that never began, or whose end nobody knows."""
    code = error.code if isinstance(error, Refused) else None
    retry_after_ms = error.retry_after_ms if isinstance(error, Refused) else 0
    return Result(
        "",
        0,
        "",
        (),
        "error",
        Usage(0, 0),
        0,
        None,
        code=code,
        error=str(error),
        retry_after_ms=retry_after_ms,
    )


def finished(position: int, flow: Flow, told: int) -> Iterator[tuple[int, Result]]:
    """The results of `flow` beyond the first `told` ones, in the order in which they ended."""
    for index in flow.ended[told:]:
        yield position, flow.result(index)
    if flow.error is None:
        return
    left = [index for index, one in enumerate(flow.sequences) if one.final is None]
    for index in left:
        yield position, flow.result(index)
    if not left:  # it was never accepted
        asked = flow.generate.sampling.seed if flow.generate is not None else None
        yield position, replace(failed(flow.error), seed=asked or 0)


def answer(question: Question, kind: type[_Reply], timeout: float) -> _Reply:
    reply = question.reply
    if reply is None:
        raise GatewaySilent(f"the gateway did not answer within {timeout:g} s")
    if isinstance(reply, Error):
        raise Refused(reply.code, reply.message, reply.retry_after_ms)
    assert isinstance(reply, kind)
    return reply


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _ns_or_none(seconds: float | None) -> int | None:
    return None if seconds is None else _ns(seconds)
