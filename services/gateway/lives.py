"""The lives of accepted requests: read by a client, shown as tokens become text, ended once, kept, forgotten. Pure.

Whatever ends a sequence (its scheduler, a stop string, an abort, an error) comes by `_ended`, so each has one Final.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from phalanx.protocol.digests import DIGEST_BYTES
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Abort, Accepted, Attach, DecodedItem, Done, Final
from phalanx.services.gateway.admission import Admission, Settings
from phalanx.services.gateway.delivery import Delivery
from phalanx.services.gateway.entries import Recovered
from phalanx.services.gateway.kept import Kept
from phalanx.services.gateway.logs import Logs
from phalanx.services.gateway.placement import Placement
from phalanx.services.gateway.recovery import Recovery, recall, recall_ends
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.streams import End, Stream
from phalanx.services.gateway.texts import Texts

MS = 1_000_000


class Lives:
    """
    Args:
        finished: hears of requests all of whose sequences have ended.
    """

    def __init__(
        self,
        settings: Settings,
        admission: Admission,
        placement: Placement,
        texts: Texts,
        recovery: Recovery,
        logs: Logs,
        delivery: Delivery,
        finished: Callable[[Request], None],
    ) -> None:
        self._logged, self._poison = settings.logged, settings.poison
        self._admission, self._placement, self._texts = admission, placement, texts
        self._recovery, self._logs, self._delivery = recovery, logs, delivery
        self._finished = finished
        self._requests: dict[str, Request] = {}
        self._kept = Kept(settings.keep_undelivered_s * 1000 * MS, settings.logged)
        self._abort_calls: dict[str, list[tuple[bytes, int]]] = {}  # to be answered when durable
        self._closed: End | None = None  # the end of everything that is still open at shutdown
        self.num_accepted = self.num_sequences = 0
        self.num_ended: dict[str, int] = {}  # sequences, by reason

    @property
    def requests(self) -> Mapping[str, Request]:
        return self._requests

    @property
    def num_open(self) -> int:
        return len(self._requests) - len(self._kept)

    def find(self, request_id: str, index: int) -> Stream | None:
        request = self._requests.get(request_id)
        if request is None or not 0 <= index < request.entry.n:
            return None
        return request.streams[index]

    # --- the beginning ---

    def accept(self, request: Request, client: bytes, call: int, now_ns: int) -> None:
        self._requests[request.request_id] = request
        self.num_accepted += 1
        self.num_sequences += len(request.streams)
        for stream in request.streams:
            stream.logged = 0 if self._logged else None
        self.attach(request, client, call, now_ns)
        for stream in request.streams:
            self._placement.enqueue(stream)
        if self._closed is not None:
            self._abort(request, self._closed, now_ns)

    def recover(self, one: Recovered, now_ns: int) -> None:
        """A request of the last gateway."""
        request = self._admission.recover(one.entry)
        self._requests[request.request_id] = request
        why = self._poison.get(request.request_id)
        if why is None:
            recall(request, one, self._logged)
        else:
            recall_ends(request, one.finals, self._logged)
        for stream in request.streams:
            if stream.final is not None:
                self._admission.sequence_ended()
                continue
            self.num_sequences += 1
            if why is None:
                self._recovery.add(stream)
                self._texts.decode(stream)  # what the log has of it
            else:
                self.fail(stream, End("error", Code.INTERNAL, why), now_ns)
        if request.finished and request.finished_ns is None:
            self._keep(request, now_ns)

    # --- its readers ---

    def attach(
        self,
        request: Request,
        client: bytes,
        call: int,
        now_ns: int,
        offsets: Sequence[int] = (),
        digests: Sequence[bytes] = (),
        prompt_offset: int = 0,
    ) -> None:
        seed = request.entry.sampling.seed
        assert seed is not None
        entry = request.entry
        scored = entry.sampling.prompt_logprobs is not None
        accepted = Accepted(call, entry.request_id, seed, entry.prompt_tokens, entry.n, scored)
        self._delivery.reply(client, accepted)
        request.attach(client, offsets, digests, prompt_offset)
        if why := self._poison.get(request.request_id):
            request.end_what_is_missed(End("error", Code.INTERNAL, why))
        else:
            self._recovery.revive(request)
        self._compare(request, now_ns)
        self._delivery.offer(request)

    def on_attach(self, client: bytes, message: Attach, now_ns: int) -> None:
        request = self._requests.get(message.request_id)
        wrong = _unknown(message.request_id) if request is None else _misfit(request, message)
        if request is None or wrong is not None:
            assert wrong is not None
            self._delivery.refuse(client, message.call, wrong)
            return
        offsets, digests = message.offsets, message.digests
        self.attach(request, client, message.call, now_ns, offsets, digests, message.prompt_offset)

    def told_all(self, client: bytes, request_id: str) -> bool:
        """Whether this client got everything already: messages to it keep their order, so one that asks
        nevertheless has lost some."""
        request = self._requests.get(request_id)
        if request is None:
            return True
        view = request.view
        return view is not None and view.client == client and all(view.finals)

    def give_up_client(self, client: bytes, stalled_ms: int, now_ns: int) -> None:
        end = End("abort", Code.SLOW_CLIENT, f"the client took nothing for {stalled_ms} ms")
        for request in list(self._requests.values()):
            if request.view is not None and request.view.client == client:
                request.view = None
                self._abort(request, end, now_ns)

    def _compare(self, request: Request, now_ns: int) -> None:
        """A reader whose tokens are not the beginning of its stream gets an error, never the rest."""
        view = request.view
        for stream in request.strangers():
            assert view is not None
            cursor = view.cursors[stream.index]
            text = (
                f"the {cursor} tokens that the client has are not the first {cursor} of this stream:"
                " it is not continued; send the request again"
            )
            final = stream.final_of(End("error", Code.STREAM_CHANGED, text), cursor)
            view.ends[stream.index] = final
            if stream.final is None:
                self._end_with(request, stream, final, now_ns)

    # --- its streams ---

    def produced(self, stream: Stream) -> None:
        """It has new tokens, or its end."""
        request = self._requests.get(stream.request_id)
        if request is None:
            return  # forgotten
        self._logs.note(stream)
        self._texts.decode(stream)
        if stream.sampling.prompt_logprobs is not None:
            self._delivery.offer(request)

    def on_decoded(self, stream: Stream, item: DecodedItem, flush: bool, now_ns: int) -> None:
        request = self._requests.get(stream.request_id)
        if request is None or stream.final is not None:
            return
        stream.show(item, flush)
        if stream.final is None:
            self._texts.decode(stream)
        elif stream.recorded is not None and stream.final is not stream.recorded:
            self._end_with(request, stream, stream.final, now_ns)
        else:
            # A scheduler that has not ended it by itself is told to: it was a stop string.
            self._placement.release(stream, None if stream.end is not None else "stop")
            self._ended(stream, now_ns)
        self._compare(request, now_ns)
        self._delivery.offer(request)

    def on_logged(self, stream: Stream) -> None:
        """More of it is on disk."""
        if (request := self._requests.get(stream.request_id)) is not None:
            self._delivery.offer(request)

    # --- the end ---

    def fail(self, stream: Stream, end: End, now_ns: int) -> None:
        """The stream ends with an error at what was shown of it."""
        request = self._requests.get(stream.request_id)
        if request is None:
            return
        final = stream.final_of(end, max(len(stream.shown), _reached(request, stream)))
        self._end_with(request, stream, final, now_ns)
        self._delivery.offer(request)

    def on_abort(self, client: bytes, message: Abort, now_ns: int) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            self._delivery.refuse(client, message.call, _unknown(message.request_id))
            return
        if request.finished and not request.held:
            self._delivery.reply(client, Done(message.call))
            return
        self._abort_calls.setdefault(request.request_id, []).append((client, message.call))
        self._abort(request, End("abort"), now_ns)

    def on_journalled(self, request: Request) -> None:
        """An abort that could not be journalled is told as well: the request has ended here."""
        if self._logs.awaited_by(request):
            return
        request.held = False
        self._delivery.offer(request)
        for client, call in self._abort_calls.pop(request.request_id, ()):
            self._delivery.reply(client, Done(call))

    def end_all(self, end: End, now_ns: int) -> None:
        """Also what the journal still has to take."""
        self._closed = end
        for request in list(self._requests.values()):
            self._abort(request, end, now_ns)

    def _abort(self, request: Request, end: End, now_ns: int) -> None:
        """End what is open. Clients hear of it once the journal has it: it never comes back to life."""
        ended = [stream for stream in request.streams if stream.final is None]
        for stream in ended:
            final = stream.final_of(end, _reached(request, stream))
            self._end_with(request, stream, final, now_ns)
        if any(stream.final is not stream.recorded for stream in ended):
            request.held = True
            self._logs.wait(request)
        elif ended:  # what was only told again: the journal has its end already
            self.on_journalled(request)

    def _end_with(self, request: Request, stream: Stream, final: Final, now_ns: int) -> None:
        """End it; but what ended before and is only told again stays as it ended: `final` is for the
        one who reads it now."""
        if stream.recorded is not None and request.view is not None:
            request.view.ends[stream.index] = final
            request.view.proofs.pop(stream.index, None)
        stream.final = stream.recorded or final
        self._placement.release(stream, "abort")
        self._ended(stream, now_ns)

    def _ended(self, stream: Stream, now_ns: int) -> None:
        assert stream.final is not None
        self._recovery.discard(stream)
        request = self._requests[stream.request_id]
        self._logs.ended(stream)
        if stream.recorded is None:
            reason = stream.final.finish_reason
            self.num_ended[reason] = self.num_ended.get(reason, 0) + 1
            self._admission.sequence_ended()
        if request.finished:
            self._keep(request, now_ns)
            self._finished(request)
        self._compare(request, now_ns)

    def _keep(self, request: Request, now_ns: int) -> None:
        if request.finished_ns is None:
            self._admission.request_ended(request)
        self._kept.keep(request, now_ns)

    def forget_old(self, now_ns: int) -> Iterator[Request]:
        """Those that nobody can read any more from here on."""
        for request in self._kept.old(now_ns):
            self._kept.forget(request)
            self._admission.forget(request)
            del self._requests[request.request_id]
            for stream in request.streams:
                self._recovery.discard(stream)
                self._placement.release(stream, "abort")
            self._logs.forget(request)
            yield request


def _reached(request: Request, stream: Stream) -> int:
    """How many of its tokens the stream's reader has; without one, the most that any reader got. By their word: no
    stream has more than were asked for."""
    most = request.entry.sampling.max_tokens
    assert most is not None
    told = request.view.cursors[stream.index] if request.view is not None else stream.sent
    return min(told, most)


def _misfit(request: Request, message: Attach) -> Refused | None:
    """What is wrong with the place from which a client wants to read on."""
    entry = request.entry
    if (
        len(message.offsets) > entry.n
        or any(at < 0 for at in message.offsets)
        or not 0 <= message.prompt_offset <= entry.prompt_tokens
    ):
        text = (
            f"offsets are {message.offsets} and prompt_offset is {message.prompt_offset}; the request has"
            f" {entry.n} sequences and {entry.prompt_tokens} prompt tokens"
        )
        return Refused(Code.BAD_REQUEST, text)
    if len(message.digests) > len(message.offsets) or not all(
        len(digest) in (0, DIGEST_BYTES) for digest in message.digests
    ):
        text = f"digests go with offsets, each of {DIGEST_BYTES} bytes or empty"
        return Refused(Code.BAD_REQUEST, text)
    return None


def _unknown(request_id: str) -> Refused:
    return Refused(
        Code.UNKNOWN_REQUEST, f"no request {request_id!r} is known; it may have ended long ago"
    )
