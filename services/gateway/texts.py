"""Work for the tokenizers: who does it, and who does it again when one of them dies. Pure.

Every job is stateless, so any tokenizer may do it, and do it twice. A reply whose call is no longer
known is stale and dropped. Decodes grow into larger batches while the tokenizers are busy; long
texts never occupy the last tokenizer, so that running streams keep flowing.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from phalanx.protocol.messages import (
    ChatMessage,
    Decode,
    Decoded,
    DecodedItem,
    Encode,
    Encoded,
    EncodeFailed,
    Span,
)
from phalanx.services.gateway.streams import Stream

# Of one Decode. A new gateway has whole streams to decode: in pieces, so that each is answered soon, what was
# answered is not asked again, and what comes meanwhile waits for no more than what is in flight.
BATCH_STREAMS, BATCH_TOKENS = 256, 4096
PIECE_TOKENS = 512  # of one stream; one that is further behind comes after all that are not
CALLS_MAX = 4  # in flight at one tokenizer; the rest waits here, where it can still be batched
LONG_CHARS = 50_000  # an encode this long keeps a tokenizer busy for a noticeable time
CHARS_PER_NS = 100_000 / 1e9  # a slow tokenizer's speed, for deadlines only
BLAME_NS = 50_000_000
RETRY_NS = 2_000_000_000  # a tokenizer that is silent for this long is asked no more for this job
# A stream waits for a decode, so another one is asked sooner. Each that is late doubles the patience with all,
# up to the above, else a loaded machine's answers would all be too late; each that is not wears it down.
DECODE_RETRY_NS = 300_000_000
PATIENCE_TOKENS = 6000  # as much again for each so many tokens before it or in it: 50 us each, more than any takes
# Blame that a job may gather before the job is what is wrong. Any text comes from outside; ids are
# checked and go in batches, whose other streams are not to blame.
ENCODE_BLAME_MAX, DECODE_BLAME_MAX = 32, 32
ENCODE_BLAME = 8  # of a death: four tokenizers may die over one text
# Of an answer that does not come in time: perhaps a message got lost, perhaps the thread that encodes
# hangs over this text. Decodes have no such thread: a tokenizer that hangs over one dies of it.
ENCODE_BLAME_LATE = 1


@dataclass(eq=False)
class EncodeJob:
    key: int  # the caller's
    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    spans: tuple[Span, ...] | None = None
    blame: int = 0

    @property
    def chars(self) -> int:
        if self.prompt is not None:
            return len(self.prompt)
        chat = sum(len(message.content) for message in self.messages or ())
        return chat + sum(len(span.text) for span in self.spans or ())


@dataclass(frozen=True, slots=True)
class Asked:
    """Tokens of a stream that are on their way through a tokenizer."""

    stream: Stream
    telling: int
    count: int
    flush: bool

    @property
    def stale(self) -> bool:
        """The stream's text was begun anew meanwhile, with Decodes of its own."""
        return self.stream.telling != self.telling


@dataclass(eq=False)
class DecodeJob:
    asked: list[Asked]

    @property
    def num_tokens(self) -> int:
        return sum(one.count for one in self.asked)


@dataclass(slots=True)
class Given:
    """A job that some tokenizer has."""

    job: EncodeJob | DecodeJob
    at_ns: int
    due_ns: int


@dataclass(eq=False)
class Tokenizer:
    peer: bytes
    name: str
    incarnation: int
    calls: dict[int, Given] = field(default_factory=dict)
    encoding: int = 0  # characters in flight
    decoding: int = 0  # tokens in flight
    # Tokens that others were asked meanwhile, by call. It works on them all the same, before what comes after.
    late: dict[int, int] = field(default_factory=dict)
    # It did not answer in time: until then, or its next answer, others come first.
    late_until_ns: int = 0

    @property
    def busy(self) -> float:
        # A token to text costs about as much as ten characters to tokens.
        return self.encoding + 10 * self.decoding

    def answered(self, call: int) -> None:
        """It has worked off this Decode, and with it all before: they are answered in order."""
        for late in [late for late in self.late if late <= call]:
            self.decoding -= self.late.pop(late)

    def rested(self, now_ns: int) -> None:
        """Asked nothing and silent for long: what is late got lost."""
        if not self.calls and now_ns >= self.late_until_ns:
            self.decoding -= sum(self.late.values())
            self.late.clear()


class Texts:
    """The pool. `dispatch` once a turn, after all events."""

    def __init__(self, send: Callable[[bytes, Encode | Decode], None], first_call: int) -> None:
        self._send = send
        self._pool: dict[str, Tokenizer] = {}  # by process name
        self._encodes: deque[EncodeJob] = deque()
        # Streams with tokens to decode: those that keep up, and those that are far behind.
        self._dirty: dict[int, Stream] = {}
        self._behind: dict[int, Stream] = {}
        self._last_call = first_call
        self.num_stale = (
            0  # answers to what the last gateway asked, or what others were asked meanwhile
        )
        self._patience_ns = DECODE_RETRY_NS
        self.failed: list[EncodeJob | Stream] = []  # jobs that too many tokenizers died over

    def hello(self, peer: bytes, name: str, incarnation: int, now_ns: int) -> None:
        known = self._pool.get(name)
        if known is not None and incarnation < known.incarnation:
            return  # a late word of a dead one
        if known is None or incarnation > known.incarnation:
            self.lost(known.peer if known else b"", now_ns)
            self._pool[name] = Tokenizer(peer, name, incarnation)

    def lost(self, peer: bytes, now_ns: int) -> None:
        """This tokenizer is gone; its jobs go to others."""
        for name, tokenizer in list(self._pool.items()):
            if tokenizer.peer == peer:
                del self._pool[name]
                for call in list(tokenizer.calls):
                    # What it hardly saw, it did not die over.
                    saw = now_ns - tokenizer.calls[call].at_ns >= BLAME_NS
                    self._again(tokenizer, call, ENCODE_BLAME * saw, int(saw))

    def busy_peers(self) -> list[bytes]:
        return [tokenizer.peer for tokenizer in self._pool.values() if tokenizer.calls]

    def knows(self, peer: bytes) -> bool:
        return any(tokenizer.peer == peer for tokenizer in self._pool.values())

    def encode(self, job: EncodeJob) -> None:
        self._encodes.append(job)

    def decode(self, stream: Stream) -> None:
        """The stream may have something to decode."""
        if stream.wants_decode:
            behind = len(stream.tokens) - len(stream.shown) > PIECE_TOKENS
            mine, other = (self._behind, self._dirty) if behind else (self._dirty, self._behind)
            other.pop(stream.number, None)
            mine[stream.number] = stream

    def on_encoded(self, peer: bytes, message: Encoded | EncodeFailed) -> EncodeJob | None:
        """The job that this answers; None for a stale answer."""
        job = self._done(peer, message.call, EncodeJob)
        return job if isinstance(job, EncodeJob) else None

    def on_decoded(
        self, peer: bytes, message: Decoded
    ) -> Iterator[tuple[Stream, DecodedItem, bool]]:
        """The streams that this answers, with what to `show` them."""
        job = self._done(peer, message.call, DecodeJob)
        if not isinstance(job, DecodeJob):
            return
        items = {item.stream: item for item in message.items}
        for one in job.asked:
            if one.stale:
                continue
            stream = one.stream
            stream.decoding = False
            item = items.get(stream.number)
            if item is None or len(item.pieces) != one.count:
                self._retry(stream)  # an answer that does not fit its question answers nothing
                continue
            stream.decode_tries = 0
            yield stream, item, one.flush

    def dispatch(self, now_ns: int) -> None:
        self._dispatch_encodes(now_ns)
        while self._dirty and (tokenizer := self._least_busy(self._pool.values(), now_ns)):
            self._send_batch(tokenizer, self._dirty, now_ns)
        while self._behind and (tokenizer := self._least_busy(self._for_behind(), now_ns)):
            self._send_batch(tokenizer, self._behind, now_ns)

    def tick(self, now_ns: int) -> None:
        """Give jobs that a tokenizer does not answer to another one."""
        for tokenizer in self._pool.values():
            tokenizer.rested(now_ns)
            late = [call for call, given in tokenizer.calls.items() if given.due_ns <= now_ns]
            if any(isinstance(tokenizer.calls[call].job, DecodeJob) for call in late):
                self._patience_ns = min(2 * self._patience_ns, RETRY_NS)
            if late:
                tokenizer.late_until_ns = now_ns + RETRY_NS
            for call in late:
                job = tokenizer.calls[call].job
                self._again(tokenizer, call, ENCODE_BLAME_LATE, 0)
                if isinstance(job, DecodeJob):
                    tokenizer.late[call] = job.num_tokens
                    tokenizer.decoding += job.num_tokens

    def _dispatch_encodes(self, now_ns: int) -> None:
        held: list[EncodeJob] = []
        while self._encodes:
            job = self._encodes.popleft()
            tokenizer = self._least_busy(self._for_encode(job), now_ns)
            if tokenizer is None:
                held.append(job)
                if job.chars < LONG_CHARS:
                    break
                continue  # shorter ones behind it need not wait
            tokenizer.encoding += job.chars
            due_ns = now_ns + RETRY_NS + int(10 * job.chars / CHARS_PER_NS)
            call = self._call(tokenizer, Given(job, now_ns, due_ns))
            message = Encode(call, job.prompt, job.messages, job.spans)
            self._send(tokenizer.peer, message)
        self._encodes.extendleft(reversed(held))

    def _for_encode(self, job: EncodeJob) -> list[Tokenizer]:
        pool = sorted(self._pool.values(), key=lambda tokenizer: tokenizer.name)
        if job.chars >= LONG_CHARS and len(pool) > 1:
            return pool[1:]
        return pool

    def _for_behind(self) -> Iterator[Tokenizer]:
        """Those that have no more than one of their pieces: while that is answered the next one waits there."""
        return (one for one in self._pool.values() if one.decoding <= BATCH_TOKENS)

    def _send_batch(self, tokenizer: Tokenizer, waiting: dict[int, Stream], now_ns: int) -> None:
        asked: list[Asked] = []
        items = []
        room = BATCH_TOKENS
        for number in list(islice(waiting, BATCH_STREAMS)):
            if not room:
                break
            stream = waiting.pop(number)
            if not stream.wants_decode:
                continue
            item = stream.decode_item(min(room, PIECE_TOKENS))
            room -= len(item.token_ids)
            stream.decoding = True
            asked.append(Asked(stream, stream.telling, len(item.token_ids), item.flush))
            items.append(item)
        if items:
            job = DecodeJob(asked)
            tokenizer.decoding += job.num_tokens
            patience_ns = self._patience_ns * (PATIENCE_TOKENS + tokenizer.decoding)
            due_ns = now_ns + patience_ns // PATIENCE_TOKENS
            call = self._call(tokenizer, Given(job, now_ns, due_ns))
            self._send(tokenizer.peer, Decode(call, tuple(items)))

    def _least_busy(self, pool: Iterable[Tokenizer], now_ns: int) -> Tokenizer | None:
        free = [tokenizer for tokenizer in pool if len(tokenizer.calls) < CALLS_MAX]
        return min(free, key=lambda one: (one.late_until_ns > now_ns, one.busy), default=None)

    def _call(self, tokenizer: Tokenizer, given: Given) -> int:
        self._last_call += 1
        tokenizer.calls[self._last_call] = given
        return self._last_call

    def _done(self, peer: bytes, call: int, kind: type) -> EncodeJob | DecodeJob | None:
        for tokenizer in self._pool.values():
            if tokenizer.peer == peer:
                tokenizer.late_until_ns = 0
                if kind is DecodeJob:
                    tokenizer.answered(call)
                given = tokenizer.calls.get(call)
                if given is not None and isinstance(given.job, kind):
                    if kind is DecodeJob:
                        worn_ns = self._patience_ns - self._patience_ns // 64
                        self._patience_ns = max(DECODE_RETRY_NS, worn_ns)
                    return self._forget(tokenizer, call)
        self.num_stale += 1
        return None

    def _forget(self, tokenizer: Tokenizer, call: int) -> EncodeJob | DecodeJob:
        job = tokenizer.calls.pop(call).job
        if isinstance(job, EncodeJob):
            tokenizer.encoding -= job.chars
        else:
            tokenizer.decoding -= job.num_tokens
        return job

    def _again(self, tokenizer: Tokenizer, call: int, encode_blame: int, decode_blame: int) -> None:
        job = self._forget(tokenizer, call)
        if isinstance(job, EncodeJob):
            job.blame += encode_blame
            if job.blame < ENCODE_BLAME_MAX:
                self._encodes.appendleft(job)
            else:
                self.failed.append(job)
            return
        for one in job.asked:
            if not one.stale:
                one.stream.decoding = False
                self._retry(one.stream, decode_blame)

    def _retry(self, stream: Stream, blame: int = 1) -> None:
        stream.decode_tries += blame
        if stream.decode_tries < DECODE_BLAME_MAX:
            self.decode(stream)
        elif stream.final is None:
            self.failed.append(stream)
