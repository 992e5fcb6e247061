"""Requests that have ended, run once more as they were, and what differs. Pure.

A replay is placed like any request (or on one rank that is named), under an id of its own, and is
neither journalled nor shown to a tokenizer: only its tokens count. A gateway that dies takes its
replays with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Replayed, ReplayedSequence
from phalanx.services.gateway.entries import Entry
from phalanx.services.gateway.history import Past, PastSequence
from phalanx.services.gateway.streams import End, Stream

RUNS_MAX = 16  # replays at a time; more are refused with `overloaded`
RETRY_AFTER_MS = 1_000


@dataclass(eq=False)
class Run:
    """One replay on its way."""

    request_id: str  # its own
    past: Past | None  # None: nothing to compare with here, the scrubber wants its numbers
    streams: list[Stream]  # in the order of `past.sequences`
    askers: list[tuple[bytes, int]] = field(default_factory=list)  # client, call

    @property
    def done(self) -> bool:
        return all(stream.end is not None for stream in self.streams)

    def report(self, call: int, fingerprint: str) -> Replayed:
        assert self.past is not None
        sequences = tuple(map(_compared, self.past.sequences, self.streams))
        return Replayed(
            call,
            self.past.entry.request_id,
            all(one.difference is None for one in sequences),
            sequences,
            fingerprint,
            self.past.entry.fingerprint,
        )


class Replays:
    """Those that run.

    Args:
        draw: random bits.
        numbers: takes so many stream numbers and returns the first.
    """

    def __init__(self, draw: Callable[[int], int], numbers: Callable[[int], int]) -> None:
        self._draw, self._numbers = draw, numbers
        self._runs: dict[str, Run] = {}

    @property
    def idle(self) -> bool:
        return not self._runs

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._runs.values()))

    def asked(self, client: bytes, call: int) -> bool:
        """This very command is being carried out."""
        return any((client, call) in run.askers for run in self._runs.values())

    def start(self, past: Past, seat: int) -> Run:
        """Its streams are for the caller to place. Raises Refused when too many run."""
        if len(self._runs) >= RUNS_MAX:
            text = f"{RUNS_MAX} replays run; try again in {RETRY_AFTER_MS} ms"
            raise Refused(Code.OVERLOADED, text, RETRY_AFTER_MS)
        entry = msgspec.structs.replace(past.entry, request_id=f"{self._draw(128):032x}")
        number = self._numbers(len(past.sequences))
        streams = []
        for at, one in enumerate(past.sequences):
            stream = Stream(entry, one.final.index, number + at)
            stream.silent = stream.afresh = True
            stream.pin = None if seat < 0 else seat
            # What ended it (a stop string, an abort) is not run again: the tokens up to there are.
            most = max(1, one.final.offset)
            stream.sampling = msgspec.structs.replace(
                stream.sampling,
                max_tokens=most,
                prompt_logprobs=one.num_top if one.compares_scores else None,
            )
            if one.final.offset == 0:
                stream.end = End("length")
            streams.append(stream)
        run = self._runs[entry.request_id] = Run(entry.request_id, past, streams)
        return run

    def probe(self, entry: Entry, seat: int, copies_as: str) -> Stream:
        """For the scrubber: one sequence on one seat, behind everything else that waits there.

        All seats ask the same copies of experts, those of the request `copies_as`: else a copy that is wrong
        would make a difference between ranks that are well.
        """
        entry = msgspec.structs.replace(entry, request_id=f"{self._draw(128):032x}")
        stream = Stream(entry, 0, self._numbers(1))
        stream.silent = stream.afresh = True
        stream.pin, stream.priority = seat, -1
        stream.copies_as = copies_as
        self._runs[entry.request_id] = Run(entry.request_id, None, [stream])
        return stream

    def find(self, request_id: str, index: int) -> Stream | None:
        run = self._runs.get(request_id)
        streams = run.streams if run is not None else ()
        return next((stream for stream in streams if stream.index == index), None)

    def of(self, stream: Stream) -> Run | None:
        return self._runs.get(stream.request_id)

    def end(self, run: Run) -> None:
        del self._runs[run.request_id]


def _compared(past: PastSequence, stream: Stream) -> ReplayedSequence:
    end, count, delivered = stream.end, len(stream.tokens), past.final.offset
    error = end.error or end.reason if end is not None and end.reason == "error" else ""
    early = end is not None and end.code is Code.KV_PRESSURE and count < delivered
    ended = f"after {count} of {delivered} tokens: {end.error}" if early and end is not None else ""
    return ReplayedSequence(
        past.final.index,
        min(count, delivered) if early else delivered,
        "digest" if past.tokens is None else "tokens",
        min(len(past.token_logprobs()), count) if early else len(past.token_logprobs()),
        stream.seat,
        past.difference(stream.tokens, stream.logprobs, error, early, stream.scores),
        ended,
        stream.num_scores if past.compares_scores else 0,
    )
