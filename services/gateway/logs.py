"""What is written down of requests, and who waits for it: the journal and the token log. Pure.

The journal has what was promised, and its changes become durable in order; whoever must not be told before that waits
here. The token log has the tokens, so that the next gateway goes on where this one was. Where these could not be made
again the same (`logged`), they are journalled instead, and told once they are on disk.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from phalanx.services.gateway.admission import Pending
from phalanx.services.gateway.entries import (
    Accept,
    Again,
    Alive,
    Finish,
    Forget,
    Note,
    Op,
    Placed,
    Stamp,
)
from phalanx.services.gateway.ledger import Ledger
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.streams import Stream

MS = 1_000_000
REWRITE_NS = 1_000 * MS  # between two times that all of a lost journal is written again
DELIVERED_NS = 10_000 * MS  # what was told this long ago is not on its way to its reader any more


@dataclass(frozen=True, eq=False)
class Noted:
    """Who waits for the log: so many tokens and scores of a stream, or its end as well."""

    stream: Stream
    count: int
    scores: int
    end: bool = False

    def joined(self, other: "Noted | None") -> "Noted":
        """Who waits for both of one stream."""
        if other is None:
            return self
        most = max(self.count, other.count), max(self.scores, other.scores)
        return Noted(self.stream, *most, end=self.end or other.end)


@dataclass(frozen=True, eq=False)
class Rewritten:
    """Who waits for the journal to have what was lost of it: nothing is told before from the log of a stream."""


class Logs:
    def __init__(self, logged: bool, now_ns: int) -> None:
        self.fingerprint = ""  # of the node's numerics, which what is accepted now belongs to
        self._logged = logged
        self._ledger: Ledger[Pending | Request | Noted | Rewritten] = Ledger()
        self._unlogged: dict[int, Noted] = {}  # by stream: the disk did not take them yet
        self._unwritten: Rewritten | None = None  # nor this
        self._rewriting: Rewritten | None = None  # the newest, until it is on disk
        self._behind: list[
            Request
        ] = []  # wait for it as well: what they waited for may be in what was lost
        self._lost = False  # the journal was, and nothing was done about it yet
        self._rewrite_at_ns = now_ns  # not before
        self._rewrite_every_ns = REWRITE_NS
        self._fresh: dict[int, Stream] = {}  # with something for the token log
        self._stamps: list[Note] = []  # likewise

    # --- what comes out ---

    def take_ops(self) -> tuple[int, list[Op]]:
        """Changes for the journal and the number of the last one, to be told to `settle`."""
        return self._ledger.take()

    def take_notes(self, placed: Iterable[Placed]) -> list[Note]:
        """News for the token log, with who was given what."""
        notes: list[Note] = [*self._stamps, *placed]
        self._stamps.clear()
        for stream in self._fresh.values():
            notes += stream.note()
        self._fresh.clear()
        return [] if self._logged else notes

    def all_notes(self, requests: Iterable[Request], now_ns: int) -> Iterator[Note]:
        """What a new token log begins with: all but what was delivered a while ago."""
        if self._logged:
            return
        yield Stamp(self.fingerprint)
        for request in requests:
            delivered_ns = request.delivered_ns
            late = delivered_ns is not None and now_ns - delivered_ns > DELIVERED_NS
            if not late or request.being_read:
                for stream in request.streams:
                    yield from stream.note_all()

    @property
    def on_disk(self) -> bool:
        """Nothing is on its way to the journal, nor lacks there."""
        return self._ledger.idle and self._rewriting is None

    @property
    def idle(self) -> bool:
        """Nor is there anything that the disk did not take."""
        return self.on_disk and not self._unlogged

    @property
    def lacks(self) -> str:
        """What it cannot promise for now, for people; empty: nothing."""
        if self._rewriting is None:
            return ""
        return (
            "the gateway's journal broke, was deleted or could not be written for too long; what is open is not"
            " in it yet, so a death of the gateway would lose it"
        )

    # --- what is to be remembered ---

    def accept(self, pending: Pending) -> None:
        """It waits for it."""
        assert pending.entry is not None
        self._ledger.add(Accept(pending.entry))
        self._ledger.wait(pending)

    def stamp(self, fingerprint: str) -> None:
        """The node's numerics are known, or are others; empty: not yet."""
        if fingerprint and fingerprint != self.fingerprint:
            self.fingerprint = fingerprint
            self._ledger.add(Stamp(fingerprint))
            self._stamps.append(Stamp(fingerprint))

    def fell(self, stream: Stream) -> None:
        self._ledger.add(stream.fell())

    def note(self, stream: Stream) -> None:
        """It has new tokens. Where it could not be made again, they are told once they are on disk."""
        if stream.logged is None:
            self._fresh[stream.number] = stream
        elif fresh := stream.note():
            for op in fresh:
                self._ledger.add(op)
            self._ledger.wait(Noted(stream, stream.noted, stream.scores_noted))

    def ended(self, stream: Stream) -> None:
        assert stream.final is not None
        self.note(stream)
        if stream.final is not stream.recorded:
            self._ledger.add(Finish(stream.final))
            if stream.logged is not None:
                self._ledger.wait(Noted(stream, stream.noted, stream.scores_noted, end=True))

    def wait(self, request: Request) -> None:
        """It waits for what was journalled of it so far."""
        self._ledger.wait(request)

    def awaited_by(self, request: Request) -> bool:
        return request in self._behind or self._ledger.awaited_by(request)

    def forget(self, request: Request) -> None:
        self._ledger.add(Forget(request.request_id))

    def alive(self) -> None:
        """Whatever has not ended is worked on."""
        self._ledger.add(Alive())

    # --- the disk's answers ---

    def settle(self, done: int, failure: str) -> Iterator[Pending | Request | Stream]:
        """The changes up to number `done` are durable, or could not be made so: who waited for them, and streams of
        which more may be told now."""
        settled = self._ledger.settle(done)
        if not failure and any(waiter is self._rewriting for waiter in settled):
            self._rewriting = None
        if failure or self._rewriting is None:
            behind, self._behind = self._behind, []
            yield from behind
        for waiter in settled:
            if isinstance(waiter, Request) and not failure and self._rewriting is not None:
                if waiter not in self._behind:
                    self._behind.append(waiter)
            elif isinstance(waiter, Pending | Request):
                yield waiter
            elif isinstance(waiter, Rewritten):
                if failure and waiter is self._rewriting:
                    self._unwritten = waiter
            elif failure or self._rewriting is not None:
                # The journal tries again with whatever comes next.
                number = waiter.stream.number
                self._unlogged[number] = waiter.joined(self._unlogged.get(number))
            else:
                stream = waiter.stream
                assert stream.logged is not None
                stream.logged = max(stream.logged, waiter.count)
                stream.scores_logged = max(stream.scores_logged, waiter.scores)
                stream.end_logged |= waiter.end
                yield stream

    def lost(self, requests: Iterable[Request], now_ns: int) -> None:
        """The journal's file broke or was deleted, and another takes its place, or not all that was for it could be
        kept until its disk took it: what is known here is written once more."""
        self._lost, self._rewriting = True, Rewritten()
        self._rewrite(requests, now_ns)

    def hurry(self) -> None:
        """Whoever comes next goes by the journal: what is lost of it is written with the next tick."""
        self._rewrite_at_ns = self._rewrite_every_ns = 0

    def tick(self, requests: Iterable[Request], now_ns: int) -> None:
        self._rewrite(requests, now_ns)
        again: list[Noted | Rewritten] = [*self._unlogged.values()]
        again += [self._unwritten] if self._unwritten is not None else []
        self._unlogged, self._unwritten = {}, None
        if again:
            self._ledger.add(Alive())  # something that comes next: see `settle`
        for waiter in again:
            self._ledger.wait(waiter)

    def _rewrite(self, requests: Iterable[Request], now_ns: int) -> None:
        if not self._lost or self._rewriting is None or now_ns < self._rewrite_at_ns:
            return
        self._lost, self._rewrite_at_ns = False, now_ns + self._rewrite_every_ns
        for request in requests:
            told = request.entry.fingerprint or self.fingerprint
            self._ledger.add(Again(msgspec.structs.replace(request.entry, fingerprint=told)))
            for stream in request.streams:
                if stream.logged is not None:
                    stream.noted = stream.scores_noted = 0
                    self.note(stream)
                if stream.falls:
                    self.fell(stream)
                if (final := stream.recorded or stream.final) is not None:
                    self._ledger.add(Finish(final))
        self._ledger.add(Alive())  # with nothing to write there would be no commit to wait for
        self._ledger.wait(self._rewriting)
