"""Runs that nobody reads: requests that have ended, for who asks for a replay, and the scrubber's probes. Pure.

Both are placed like any request. `replays.py` has what runs, `scrub.py` what two ranks made of the same.
"""

from collections.abc import Mapping

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Replay, ScrubReport
from phalanx.services.gateway.admission import Admission, Settings
from phalanx.services.gateway.delivery import Delivery
from phalanx.services.gateway.entries import Entry
from phalanx.services.gateway.history import History, Past, check_comparable
from phalanx.services.gateway.logs import Logs
from phalanx.services.gateway.placement import Placement
from phalanx.services.gateway.replays import Replays, Run
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.scrub import Scrubber, bits_of, probe_of
from phalanx.services.gateway.streams import End, Stream

MS = 1_000_000


class Reruns:
    def __init__(
        self,
        settings: Settings,
        admission: Admission,
        placement: Placement,
        delivery: Delivery,
        logs: Logs,
    ) -> None:
        self._model = settings.model
        self._admission, self._placement = admission, placement
        self._delivery, self._logs = delivery, logs
        self._history = History(
            settings.history_requests, settings.history_bytes, settings.history_ttl_s * 1000 * MS
        )
        self._replays = Replays(settings.draw, admission.number)
        self._scrubs = settings.scrub_every_s > 0
        self._scrubber = Scrubber(int(settings.scrub_every_s * 1000) * MS)
        self._probe: Entry | None = None  # for the scrubber, of the request that ended last

    @property
    def idle(self) -> bool:
        return self._replays.idle

    def find(self, request_id: str, index: int) -> Stream | None:
        return self._replays.find(request_id, index)

    def finished(self, request: Request) -> None:
        """It has ended: the scrubber may make the beginning of it again."""
        if self._scrubs:
            self._probe = probe_of(request, self._model.vocab_size) or self._probe

    def forgotten(self, request: Request, now_ns: int) -> None:
        """What a replay of it needs is remembered for longer."""
        self._history.add(Past.of(request), now_ns)

    def take_scrub_report(self) -> ScrubReport | None:
        """For the supervisor, if there is news."""
        return self._scrubber.take_report()

    # --- replays ---

    def on_replay(
        self, client: bytes, message: Replay, requests: Mapping[str, Request], now_ns: int
    ) -> None:
        if self._replays.asked(client, message.call):
            return  # the answer comes when it is done
        try:
            if self._admission.draining:
                raise Refused(Code.SHUTDOWN, "the node is shutting down and runs nothing again")
            if message.seat >= 0:
                self._placement.seats.check_rank(message.seat)
            past = self._past(message.request_id, requests)
            if past.entry.model != self._model.name:
                text = (
                    f"it was served by the model {past.entry.model!r}, this is {self._model.name!r}"
                )
                raise Refused(Code.UNKNOWN_MODEL, text)
            check_comparable(past)
            run = self._replays.start(past, message.seat)
        except Refused as refused:
            self._delivery.refuse(client, message.call, refused)
            return
        run.askers.append((client, message.call))
        for stream in run.streams:
            self._placement.enqueue(stream)
        self._finish(run, now_ns)  # of nothing, if no token was delivered

    def _past(self, request_id: str, requests: Mapping[str, Request]) -> Past:
        """The ended request of this id, or the only one whose id begins so. Raises Refused."""
        known = requests.get(request_id)
        mine = [known] if known is not None else []
        if not mine and request_id:
            mine = [r for other, r in requests.items() if other.startswith(request_id)]
        past = [Past.of(request) for request in mine if request.ended]
        past += [] if known is not None else self._history.find(request_id)
        if request_id and len(past) == 1 and len(mine) <= 1:
            return past[0]
        if mine and not past:
            text = f"the request {request_id!r} has not ended yet: there is nothing to compare with"
            raise Refused(Code.NOT_READY, text)
        if past:
            raise Refused(Code.BAD_REQUEST, f"more than one request begins with {request_id!r}")
        text = (
            f"no ended request {request_id!r} is kept; kept are {self._history.describe()}"
            " (gateway.history_* in the configuration)"
        )
        raise Refused(Code.UNKNOWN_REQUEST, text)

    def produced(self, stream: Stream, now_ns: int) -> None:
        """A stream has new tokens, or its end."""
        run = self._replays.of(stream)
        if run is not None and stream.end is not None:
            self._finish(run, now_ns)

    def fail(self, stream: Stream, end: End, now_ns: int) -> None:
        stream.end = end
        self.produced(stream, now_ns)

    def end_all(self, refused: Refused) -> None:
        for run in self._replays:
            self._end(run)
            for client, call in run.askers:
                self._delivery.refuse(client, call, refused)

    def _finish(self, run: Run, now_ns: int) -> None:
        if not run.done:
            return
        self._end(run)
        if run.past is None:
            self._scrubbed(run.streams[0], now_ns)
        for client, call in run.askers:
            self._delivery.reply(client, run.report(call, self._logs.fingerprint))

    def _end(self, run: Run) -> None:
        self._replays.end(run)
        for stream in run.streams:
            self._placement.release(stream, "abort")
            stream.end = stream.end or End("abort")  # nor is it placed, if it waits

    # --- the scrubber ---

    def tick(self, now_ns: int) -> None:
        """Compare two ranks, if it is time and there is something to compare them with."""
        self._history.expire(now_ns)
        seats = self._placement.seats
        self._scrubber.forget(seats.worker_incarnations())
        if not self._scrubber.due(now_ns):
            return
        usable = seats.usable(now_ns)
        if self._probe is None or len(usable) < 2 or self._admission.draining:
            self._scrubber.put_off(now_ns)
            return
        for seat in self._scrubber.begin(self._probe, usable, seats.worker_incarnations()):
            probe = self._replays.probe(self._probe, seat, self._probe.request_id)
            self._placement.enqueue(probe)

    def _scrubbed(self, stream: Stream, now_ns: int) -> None:
        """A rank has answered."""
        bits, seats = bits_of(stream), self._placement.seats
        if bits is None:
            self._scrubber.give_up(now_ns)
            for run in self._replays:
                if run.past is None:
                    self._end(run)
            return
        usable, workers = seats.usable(now_ns), seats.worker_incarnations()
        more = self._scrubber.on_answer(stream.seat, bits, usable, workers, now_ns)
        if more is not None:
            self._placement.enqueue(self._replays.probe(stream.entry, more, stream.copies_as))
