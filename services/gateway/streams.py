"""A request's token streams: from the scheduler's tokens to what a client may read. Pure.

A stream keeps its tokens and, for each token, the text that this token released. So delivery can
begin again at any token offset and says exactly the same.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct

import msgspec

from phalanx.protocol.digests import tokens_digest
from phalanx.protocol.errors import Code
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import (
    DecodedItem,
    DecodeItem,
    Delta,
    Final,
    FinishReason,
    PromptLogprob,
    PromptLogprobs,
    Sampling,
    TokenLogprobs,
    TokensItem,
    Usage,
)
from phalanx.protocol.prompt_logprobs import entries, record_bytes
from phalanx.protocol.seeds import derive_seed
from phalanx.services.early_ends import is_own
from phalanx.services.gateway.entries import Entry, Fell, Note, Placed, Produced, Scored
from phalanx.services.gateway.stops import StopScanner

_ID = Struct("=i").pack
_ID_BYTES = 4
_LOGPROBS = msgspec.msgpack.Decoder(list[TokenLogprobs])
PROMPT_LOGPROBS_MAX = 1024  # prompt tokens of one message, 300 bytes each with 20 alternatives
NOTED_TOKENS_MAX = 1024  # of one stream in one note of a new token log
SUSPECT_FALLS = 3  # see `suspects.py`


@dataclass(frozen=True, slots=True)
class End:
    """Why the scheduler produces no more."""

    reason: FinishReason
    code: Code | None = None
    error: str = ""


@dataclass(slots=True)
class Place:
    """Where a stream runs, and how sure we are of it. Kept by `attempts.py`."""

    seat: int
    incarnation: int  # of the scheduler
    attempt: int
    call: int  # of the Submit
    acknowledged: bool
    repeat_at_ns: int  # when to repeat the Submit or to ask after a quiet stream
    quiet: int = 0  # how often it was asked after without hearing of it
    resend_at_ns: int = 0  # a gap is asked for again not before
    handle: int = 0  # its name in this scheduler's TokenRows; 0: not told yet
    bound_for: int = (
        -1
    )  # the seat with room for it, because of which it is asked back; -1: it is not
    stays_until_ns: int = 0  # it is not asked back before
    asked_at_report: int = -1  # how many reports of its seat were heard when it was asked back last


class Stream:
    """One sequence of a request."""

    def __init__(self, entry: Entry, index: int, number: int) -> None:
        seed = entry.sampling.seed
        assert seed is not None and entry.sampling.max_tokens is not None
        self.entry = entry
        self.index = index
        self.number = number  # unique within this gateway; names the stream to tokenizers
        self.sampling: Sampling = msgspec.structs.replace(
            entry.sampling,
            seed=derive_seed(seed, index),
            # They belong to the request: its first sequence computes and carries them.
            prompt_logprobs=entry.sampling.prompt_logprobs if index == 0 else None,
        )
        self.attempt = 0
        self.place: Place | None = None
        self.priority = 0
        self.resumed = False  # a scheduler had it before, or may have had it
        self.pin: int | None = None  # the only seat that it may be placed at
        self.silent = False  # its text is for nobody (`replays.py`)
        self.afresh = False  # computed without the KV store: it is run to check what was computed
        self.copies_as = ""  # the request whose copies of experts compute it; empty: its own
        self.seat = -1  # where it was placed last
        self.tries = 0  # refusals in a row that did not say "later"
        self.falls = 0  # of the seats it was at, in a row, without a new token
        self.tokens_at_fall = 0
        self.others_fell = 0  # how often seats had, with no suspect, when it was none either
        self.handed_back = 0  # how often a seat gave it back that had no room
        self.sent = 0  # tokens that some client has got
        # Where tokens could not be made again the same, they are journalled before they are told:
        # how many are on disk (None: not such a node), how many on their way there, and the end.
        # The same for the log-probabilities of the prompt.
        self.logged: int | None = None
        self.scores_logged = 0
        self.end_logged = False
        self.placed: Placed | None = None  # who was given it last, maybe by an earlier gateway
        self.final: Final | None = None
        self.recorded: Final | None = None  # ended in an earlier life: run again only up to it
        self.telling = 0  # how often its text was begun; what was asked for an earlier one is stale
        self.clear()

    def clear(self) -> None:
        """Forget everything produced; it can be produced again."""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.scores = bytearray()  # records of prompt log-probabilities
        self.noted = self.scores_noted = 0  # of these, what was given to a log
        self.unshow()

    def unshow(self) -> None:
        """Forget the text of its tokens, and that it ended."""
        self.telling += 1
        self.end: End | None = None
        self.cached_tokens = 0
        self.shown: list[str] = []  # text each token released, as far as decoded
        self.carry = b""
        self.decoding = False  # a Decode is in flight
        self.decode_tries = 0
        self.scanner = StopScanner(self.sampling.stop, min_tokens=self.sampling.min_tokens)

    def falls_in_vain(self) -> int:
        """Count one more fall of its seat. Returns how many in a row brought no new token."""
        self.falls = 1 if len(self.tokens) > self.tokens_at_fall else self.falls + 1
        self.tokens_at_fall = len(self.tokens)
        return self.falls

    def fell(self) -> Fell:
        """For the journal."""
        return Fell(self.request_id, self.index, self.falls, self.tokens_at_fall)

    def fell_before(self, fell: Fell) -> None:
        """What the last gateway saw."""
        self.falls, self.tokens_at_fall = fell.falls, fell.tokens

    @property
    def gets_on(self) -> bool:
        """Its ranks do not fall over it, as far as anyone can know: it had tokens before its last fall."""
        return self.falls <= 1 and bool(self.tokens)

    @property
    def suspect(self) -> bool:
        """Its ranks fall again and again, perhaps over it."""
        return self.falls >= SUSPECT_FALLS and len(self.tokens) <= self.tokens_at_fall

    @property
    def request_id(self) -> str:
        return self.entry.request_id

    @property
    def num_tokens_max(self) -> int:
        """Tokens that a KV pool must have room for; the last output is never fed back."""
        assert self.sampling.max_tokens is not None
        return self.entry.prompt_tokens + self.sampling.max_tokens - 1

    @property
    def num_blocks(self) -> int:
        """KV blocks of the tokens it has, which a rank must have free to begin with it."""
        return -(-(self.entry.prompt_tokens + len(self.tokens)) // BLOCK_SIZE)

    @property
    def num_blocks_max(self) -> int:
        """Those that it may need in the end."""
        return max(self.num_blocks, -(-self.num_tokens_max // BLOCK_SIZE))

    @property
    def num_prompt_blocks(self) -> int:
        """Those of its blocks that sequences of one request can share: all but the last token of the prompt fills
        them."""
        return (self.entry.prompt_tokens - 1) // BLOCK_SIZE

    @property
    def hollow(self) -> bool:
        """Ended, but what it said is not in memory (any more)."""
        if self.final is None:
            return False
        whole = self.final.finish_reason in ("stop", "length")
        return len(self.shown) < self.final.offset or (whole and not self.scored)

    @property
    def end_told(self) -> bool:
        """Its end may be told, if it has one."""
        return self.logged is None or self.end_logged

    @property
    def num_scores(self) -> int:
        num_top = self.sampling.prompt_logprobs
        return 0 if num_top is None else len(self.scores) // record_bytes(num_top)

    @property
    def scored(self) -> bool:
        """No prompt log-probability is missing. Before that no token is taken."""
        wanted = self.sampling.prompt_logprobs is not None
        return not wanted or self.num_scores == self.entry.prompt_tokens - 1

    def sampling_left(self) -> Sampling:
        """What a scheduler is asked for that begins with it now. The log-probabilities of its prompt, once they are
        known, would keep it from loading what the KV store has."""
        wanted = self.sampling.prompt_logprobs is not None and self.sampling.max_tokens
        if wanted and self.scored:
            return msgspec.structs.replace(self.sampling, prompt_logprobs=None)
        return self.sampling

    def continues(self, count: int, digest: bytes) -> bool | None:
        """Whether the `count` tokens with this digest are its beginning; None: not known yet."""
        final = self.final
        if final is not None and is_own(final) and final.offset < count:
            return False
        if len(self.tokens) >= count:
            return self.digest(count) == digest
        if final is None:
            return None
        # The tokens are not at hand and will not come; nor will anything after them.
        return final.offset != count or final.digest in (b"", digest)

    # --- from the scheduler ---

    def extend(self, offset: int, token_ids: Sequence[int]) -> bool:
        """Add what is new of these tokens. False when something before them is missing."""
        have = len(self.tokens)
        if offset > have or not self.scored:
            return False
        self.tokens.extend(token_ids[have - offset :])
        return True

    def take(self, item: TokensItem) -> bool:
        """Add what is new in `item`. False when something before it is missing."""
        have = len(self.tokens)
        scores = item.prompt_logprobs
        if scores and not self._take_records(item.prompt_offset, scores):
            return False
        if not item.token_ids and item.finish_reason not in ("stop", "length"):
            if item.offset > have:
                return False
        elif not self.extend(item.offset, item.token_ids):
            return False
        if self.sampling.logprobs is not None:
            self.logprobs.extend(item.logprobs[have - item.offset :])
        self.cached_tokens = max(self.cached_tokens, item.cached_tokens)
        if item.finish_reason is not None and item.offset + len(item.token_ids) >= have:
            self.end = End(item.finish_reason, item.code, item.error)
        return True

    def _take_records(self, first: int, records: bytes) -> bool:
        """Prompt log-probabilities from record `first` on; False when something before is missing."""
        num_top, have = self.sampling.prompt_logprobs, self.num_scores
        if num_top is None or first > have:
            return False
        self.scores += records[(have - first) * record_bytes(num_top) :]
        return True

    def lacks_logprobs(self, item: TokensItem) -> bool:
        """Whether it brings new tokens without the log-probabilities that were asked for."""
        new = item.offset + len(item.token_ids) > len(self.tokens)
        wanted = self.sampling.logprobs is not None
        return wanted and new and len(item.logprobs) != len(item.token_ids)

    def implied_end(self, eos_token_id: int) -> End | None:
        """The end that the tokens themselves tell, if the scheduler's word on it is lost: by its rule
        (`scheduler_svc/stops.py`)."""
        s, count = self.sampling, len(self.tokens)
        assert s.max_tokens is not None
        if count >= s.min_tokens:
            last = self.tokens[-1]
            if (last == eos_token_id and not s.ignore_eos) or last in s.stop_token_ids:
                return End("stop")
        return End("length") if count >= s.max_tokens else None

    # --- to and from the log ---

    def note(self) -> list[Produced | Scored]:
        """What is not on its way to the log yet. Scores come first: tokens are not told without them."""
        fresh: list[Produced | Scored] = []
        if self.sampling.prompt_logprobs is not None:
            first, self.scores_noted = self.scores_noted, self.num_scores
            if first < self.scores_noted:
                fresh.append(self._scores_noted(first, self.scores_noted))
        start, self.noted = self.noted, len(self.tokens)
        if start < self.noted:
            fresh.append(self._tokens_noted(start, self.noted))
        return fresh

    def note_all(self) -> Iterator[Note]:
        """All that a log should have of it, in pieces. What is noted between two of them is in a later one as well."""
        if self.placed is not None:
            yield self.placed
        first = start = 0
        while first < (have := self.num_scores):
            end = min(first + PROMPT_LOGPROBS_MAX, have)
            yield self._scores_noted(first, end)
            first = end
        while start < (have := len(self.tokens)):
            end = min(start + NOTED_TOKENS_MAX, have)
            yield self._tokens_noted(start, end)
            start = end

    def _scores_noted(self, first: int, end: int) -> Scored:
        assert self.sampling.prompt_logprobs is not None
        size = record_bytes(self.sampling.prompt_logprobs)
        return Scored(self.request_id, first, bytes(self.scores[first * size : end * size]))

    def _tokens_noted(self, start: int, end: int) -> Produced:
        logprobs = b""
        if self.sampling.logprobs is not None:
            logprobs = msgspec.msgpack.encode(self.logprobs[start:end])
        one = start + 1 == end  # each token of each stream comes by here
        ids = _ID(self.tokens[start]) if one else array("i", self.tokens[start:end]).tobytes()
        return Produced(self.entry.request_id, self.index, start, ids, logprobs)

    def recover(self, produced: Sequence[Produced], scored: Sequence[Scored] = ()) -> None:
        """Take what the journal has of it."""
        for scores in scored:
            self._take_records(scores.first, scores.records)
        self.scores_logged = self.scores_noted = self.num_scores
        self._take_pieces(produced)
        self.logged = self.noted

    def recall(self, produced: Sequence[Produced], scored: Sequence[Scored] = ()) -> None:
        """Take what the token log has of it; the rest is made again."""
        for scores in scored:
            self._take_records(scores.first, scores.records)
        self.scores_noted = self.num_scores
        if self.scored:
            self._take_pieces(produced)

    def _take_pieces(self, produced: Sequence[Produced]) -> None:
        for piece in produced:
            if piece.index == self.index and piece.offset <= len(self.tokens):
                new = len(self.tokens) - piece.offset
                self.tokens += memoryview(piece.token_ids).cast("i").tolist()[new:]
                if piece.logprobs:
                    self.logprobs += _LOGPROBS.decode(piece.logprobs)[new:]
        self.noted = len(self.tokens)

    def fits(self, outputs: bytes) -> bool:
        """Whether a scheduler that has these outputs continues what the log has."""
        return outputs.startswith(self.outputs())

    def go_on(self, outputs: bytes) -> None:
        """Take what a scheduler has beyond it."""
        have = len(self.tokens)
        self.extend(have, ids_of(outputs[_ID_BYTES * have :]))

    def outputs(self) -> bytes:
        return array("i", self.tokens).tobytes()

    # --- through the tokenizer ---

    @property
    def wants_decode(self) -> bool:
        if self.decoding or self.silent or self.final is not None:
            return False
        return len(self.shown) < len(self.tokens) or self.end is not None

    def decode_item(self, most: int) -> DecodeItem:
        """Of what it has to decode `most` tokens; the rest is for later, also what the last one still owes."""
        at = len(self.shown)
        flush = self.end is not None and len(self.tokens) - at <= most
        return DecodeItem(self.number, tuple(self.tokens[at : at + most]), self.carry, flush)

    def show(self, item: DecodedItem, flush: bool) -> None:
        """Take the text of the tokens that were sent to be decoded; may set `final`."""
        self.carry = item.carry
        if not self.sampling.stop:
            self.shown.extend(item.pieces)
            self.scanner.num_tokens += len(item.pieces)
        else:
            for piece in item.pieces:
                self.shown.append(self.scanner.feed((piece,)).text)
                if self.scanner.stop is not None:
                    break
        if self.recorded is not None and len(self.shown) >= self.recorded.offset:
            self._come_to(self.recorded)
        elif self.scanner.stop is not None:
            self.finish(End("stop"), len(self.shown))
        elif flush and self.end is not None:
            tail = self.scanner.finish(item.tail)
            # One that was ended early says so: its last token still owed text, and more would have come.
            by_itself = self.end.code is None
            end = End("stop") if tail.stop is not None and by_itself else self.end
            self.finish(end, len(self.shown), tail.text)

    def finish(self, end: End, offset: int, text: str = "") -> None:
        self.final = self.final_of(end, offset, text)

    def final_of(self, end: End, offset: int, text: str = "") -> Final:
        prompt = self.entry.prompt_tokens
        cached = min(self.cached_tokens, prompt)
        return Final(
            self.request_id,
            self.index,
            offset,
            end.reason,
            Usage(prompt, offset, cached),
            text,
            end.code,
            end.error,
            self.digest(offset) if offset <= len(self.tokens) else b"",
        )

    def digest(self, count: int) -> bytes:
        """Of its first `count` tokens."""
        return tokens_digest(self.index, self.tokens[:count])

    def _come_to(self, recorded: Final) -> None:
        """It was made again as far as it once went: to the same end, if it is the same stream."""
        if recorded.digest in (b"", self.digest(recorded.offset)):
            self.final = recorded
            return
        text = (
            f"made again, the first {recorded.offset} tokens are not those that it ended with before:"
            " they cannot be told again; send the request again"
        )
        self.finish(End("error", Code.STREAM_CHANGED, text), recorded.offset)

    # --- to a client ---

    def prompt_message(self, start: int) -> PromptLogprobs | None:
        """What a client that has the log-probabilities of `start` prompt tokens may read next."""
        num_top = self.sampling.prompt_logprobs
        num_scores = self.num_scores if self.logged is None else self.scores_logged
        whole = num_scores == self.entry.prompt_tokens - 1
        if num_top is None or start > num_scores or not (num_scores or whole):
            return None
        first = max(start - 1, 0)  # the records begin with the second token
        end = min(first + PROMPT_LOGPROBS_MAX, num_scores)
        size = record_bytes(num_top)
        found: tuple[PromptLogprob | None, ...] = entries(
            memoryview(self.scores)[first * size : end * size], num_top
        )
        return PromptLogprobs(
            self.request_id, self.index, start, found if start else (None, *found)
        )

    def delta(self, start: int, most: int) -> Delta | None:
        """What a client that has `start` tokens may read next."""
        end = len(self.shown) if self.final is None else min(len(self.shown), self.final.offset)
        # A delta without tokens would leave its reader where it is, to be told it for ever.
        end = min(end, start + most, len(self.tokens))
        if self.logged is not None:
            end = min(end, self.logged)
        if start >= end:
            return None
        return Delta(
            self.request_id,
            self.index,
            start,
            tuple(self.tokens[start:end]),
            "".join(self.shown[start:end]),
            tuple(self.logprobs[start:end]),
        )


def ids_of(encoded: bytes) -> tuple[int, ...]:
    """int32 ids as the messages carry them."""
    return tuple(memoryview(encoded[: len(encoded) // _ID_BYTES * _ID_BYTES]).cast("i"))
