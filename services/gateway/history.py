"""What is remembered of requests that have ended, so that they can be run again and compared. Pure.

It costs no disk and no time of anyone: what a stream is made from, the tokens it was, as long as there
is room for them, and their digest, which is still there when they are gone.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from phalanx.protocol.digests import tokens_digest
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Difference, Final, TokenLogprobs
from phalanx.protocol.prompt_logprobs import entries, record_bytes
from phalanx.services.gateway.entries import Entry
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.streams import Stream

_OVERHEAD_BYTES = 500  # of a record beside its arrays
_LOGPROBS = msgspec.msgpack.Decoder(tuple[TokenLogprobs, ...])


@dataclass(frozen=True)
class PastSequence:
    """How one sequence was delivered."""

    final: Final
    tokens: bytes | None  # int32 ids; None: not kept
    logprobs: bytes  # msgpack of one TokenLogprobs a token; empty: not asked for, or not kept
    scores: bytes = (
        b""  # records of the prompt's log-probabilities (`protocol/prompt_logprobs.py`), likewise
    )
    num_top: int = 0  # likeliest tokens in each

    @classmethod
    def of(cls, stream: Stream) -> "PastSequence":
        final = stream.recorded or stream.final
        assert final is not None
        count = final.offset
        if stream.hollow or len(stream.tokens) < count:
            return cls(final, None, b"")
        asked = stream.sampling.logprobs is not None
        logprobs = msgspec.msgpack.encode(stream.logprobs[:count]) if asked else b""
        tokens = array("i", stream.tokens[:count]).tobytes()
        return cls(
            final,
            tokens,
            logprobs,
            bytes(stream.scores) if stream.scored else b"",
            stream.sampling.prompt_logprobs or 0,
        )

    @property
    def compares_scores(self) -> bool:
        """Whether a second run is to make the prompt's log-probabilities: where none was delivered it is not
        run at all."""
        return bool(self.scores) and self.final.offset > 0

    @property
    def comparable(self) -> bool:
        return self.tokens is not None or bool(self.final.digest)

    def token_logprobs(self) -> tuple[TokenLogprobs, ...]:
        return _LOGPROBS.decode(self.logprobs) if self.logprobs else ()

    def difference(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        error: str = "",
        early: bool = False,
        scores: bytes | bytearray = b"",
    ) -> Difference | None:
        """Where a second run departs from this one, first of all.

        Args:
            scores: of the prompt; not looked at where this one has none.
            error: why the second run did not come to its end by itself.
            early: it was ended to make room for others, which is no difference: what there is, is compared.
        """
        count = self.final.offset
        if error:
            return Difference(len(tokens), "error", self.final.finish_reason, error)
        if self.tokens is None:
            digest = tokens_digest(self.final.index, tokens[:count])
            if len(tokens) == count and digest == self.final.digest:
                return None
            return Difference(count, "digest", self.final.digest.hex(), digest.hex())
        if self.compares_scores and (found := self._other_score(scores, early)) is not None:
            return found
        delivered = memoryview(self.tokens).cast("i")
        told = self.token_logprobs()
        for at in range(min(count, len(tokens))):
            if tokens[at] != delivered[at]:
                return Difference(at, "token", str(delivered[at]), str(tokens[at]))
            if at < len(told) and (at >= len(logprobs) or logprobs[at] != told[at]):
                again = repr(logprobs[at]) if at < len(logprobs) else "none"
                return Difference(at, "logprobs", repr(told[at]), again)
        if len(tokens) != count and not (early and len(tokens) < count):
            return Difference(min(count, len(tokens)), "length", str(count), str(len(tokens)))
        return None

    def _other_score(self, scores: bytes | bytearray, early: bool) -> Difference | None:
        """The first prompt token whose log-probabilities differ."""
        end = min(len(scores), len(self.scores)) if early else len(self.scores)
        if self.scores[:end] == scores[:end]:
            return None
        size = record_bytes(self.num_top)
        for at in range(0, end, size):
            then, now = self.scores[at : at + size], bytes(scores[at : at + size])
            if then != now:
                told = repr(entries(then, self.num_top)[0])
                again = repr(entries(now, self.num_top)[0]) if len(now) == size else "none"
                return Difference(1 + at // size, "prompt_logprobs", told, again)
        return None


@dataclass(frozen=True)
class Past:
    """A request that has ended."""

    entry: Entry
    sequences: tuple[PastSequence, ...]

    @classmethod
    def of(cls, request: Request) -> "Past":
        return cls(request.entry, tuple(PastSequence.of(stream) for stream in request.streams))

    @property
    def light(self) -> "Past":
        """Without its tokens: their digests remain."""
        bare = tuple(replace(s, tokens=None, logprobs=b"", scores=b"") for s in self.sequences)
        return replace(self, sequences=bare)

    @property
    def nbytes(self) -> int:
        arrays = sum(len(s.tokens or b"") + len(s.logprobs) + len(s.scores) for s in self.sequences)
        return len(self.entry.prompt) + arrays + _OVERHEAD_BYTES * len(self.sequences)


class History:
    """The newest ended requests, within bounds of number, memory and time."""

    def __init__(self, most: int, bytes_max: int, ttl_ns: int) -> None:
        self._most, self._bytes_max, self._ttl_ns = most, bytes_max, ttl_ns
        self._past: OrderedDict[str, tuple[int, Past]] = OrderedDict()  # oldest first
        self._full: OrderedDict[str, None] = OrderedDict()  # those that have their tokens
        self.nbytes = self._light_bytes = 0  # as they are, and if none had tokens

    def __len__(self) -> int:
        return len(self._past)

    def add(self, past: Past, now_ns: int) -> None:
        if self._most == 0:
            return
        request_id = past.entry.request_id
        self._past[request_id] = (now_ns, past)
        self._full[request_id] = None
        self.nbytes += past.nbytes
        self._light_bytes += past.light.nbytes
        # What has only a digest left takes at most half, so that the newest have their tokens.
        while len(self._past) > self._most or self._light_bytes > self._bytes_max // 2:
            self._drop(next(iter(self._past)))
        while self.nbytes > self._bytes_max:
            self._lighten(next(iter(self._full)))

    def expire(self, now_ns: int) -> None:
        while self._past:
            request_id, (since_ns, _) = next(iter(self._past.items()))
            if now_ns - since_ns < self._ttl_ns:
                return
            self._drop(request_id)

    def find(self, request_id: str) -> list[Past]:
        """Those whose id is this, or begins so."""
        exact = self._past.get(request_id)
        if exact is not None:
            return [exact[1]]
        return [past for known, (_, past) in self._past.items() if known.startswith(request_id)]

    def describe(self) -> str:
        seconds = self._ttl_ns // 10**9
        return f"the last {self._most} that ended, for {seconds} s and in {self._bytes_max} bytes"

    def _lighten(self, request_id: str) -> None:
        since_ns, past = self._past[request_id]
        del self._full[request_id]
        self.nbytes += past.light.nbytes - past.nbytes
        self._past[request_id] = (since_ns, past.light)

    def _drop(self, request_id: str) -> None:
        _, past = self._past.pop(request_id)
        self._full.pop(request_id, None)
        self.nbytes -= past.nbytes
        self._light_bytes -= past.light.nbytes


def check_comparable(past: Past) -> None:
    """Raises Refused when nothing is left to compare a second run with."""
    for one in past.sequences:
        if not one.comparable:
            text = (
                f"sequence {one.final.index} of {past.entry.request_id} ended with"
                f" {one.final.finish_reason!r}, and neither its tokens nor their digest are kept"
            )
            raise Refused(Code.UNKNOWN_REQUEST, text)
