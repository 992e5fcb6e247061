"""Schedulers and tokenizers as the gateway sees them, and the streams they ought to give.

The next token is a hash of the request's seed, its prompt and the position, so every stream has one
right answer. Some tokens show their text only with the next one, so a lost carry shows.
"""

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import (
    AbortSequence,
    BusFromGateway,
    BusToGateway,
    Decode,
    Decoded,
    DecodedItem,
    DecodeItem,
    Done,
    Encode,
    Encoded,
    FinalSeen,
    FinishReason,
    HandBack,
    ListSequences,
    PromptLogprob,
    Refusal,
    Resend,
    Sampling,
    SeatLoad,
    SequenceInfo,
    SequenceList,
    Submit,
    Submitted,
    TokenLogprobs,
    TokenRows,
    Tokens,
    TokensItem,
)
from phalanx.services.gateway.admission import Pending
from phalanx.services.gateway.core import Core

VOCAB = 64
EOS = 1


def token_at(seed: int, prompt: bytes, position: int) -> int:
    word = blake2b(b"%d:%d:%s" % (seed, position, prompt), digest_size=4).digest()
    return int.from_bytes(word, "little") % VOCAB


def logprob_at(seed: int, prompt: bytes, position: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token_at(seed, prompt, position) + position))


def score_at(prompt: bytes, position: int, num_top: int) -> PromptLogprob:
    token = token_at(0, prompt, position)
    best = tuple(token_at(at + 1, prompt, position) for at in range(num_top))
    return PromptLogprob(-float(token), token + 1, best, tuple(-float(t) for t in best))


def score_records(submit: Submit, first: int, end: int) -> bytes:
    """As a worker makes them; record i is of prompt token i + 1."""
    k = submit.sampling.prompt_logprobs or 0
    found = [score_at(submit.prompt, at + 1, k) for at in range(first, end)]
    layout = struct.Struct(f"<fi{k}i{k}f")
    return b"".join(layout.pack(s.logprob, s.rank, *s.top_ids, *s.top_logprobs) for s in found)


def piece(token: int) -> str:
    """The text of one token; those divisible by 5 show it only with the next token."""
    return "." if token == 2 else chr(ord("A") + token % 26) + str(token)


def encode_text(text: str, vocab: int = VOCAB) -> "array[int]":
    return array("i", [ord(char) % vocab for char in text])


def held(token: int) -> bool:
    return token % 5 == 0


def pieces(tokens: Sequence[int], carry: str) -> tuple[list[str], str]:
    """What each token shows, and what the last one still owes."""
    shown = []
    for token in tokens:
        text = carry + piece(token)
        shown.append("" if held(token) else text)
        carry = text if held(token) else ""
    return shown, carry


@dataclass(frozen=True)
class Expected:
    tokens: tuple[int, ...]
    text: str
    reason: FinishReason


def expected(sampling: Sampling, prompt: bytes) -> Expected:
    """The whole stream of a request to these fakes."""
    seed = sampling.seed
    assert seed is not None
    return cut_at_its_end(sampling, lambda at: token_at(seed, prompt, at))


def cut_at_its_end(sampling: Sampling, token_at: Callable[[int], int]) -> Expected:
    """The stream of these tokens from its definition: the whole text is searched after each token."""
    assert sampling.max_tokens is not None
    tokens: list[int] = []
    if sampling.max_tokens == 0:
        return Expected((), "", "length")
    while True:
        tokens.append(token_at(len(tokens)))
        may_stop = len(tokens) >= sampling.min_tokens
        ends = (tokens[-1] == EOS and not sampling.ignore_eos) or tokens[
            -1
        ] in sampling.stop_token_ids
        ends = ends and may_stop
        done = ends or len(tokens) == sampling.max_tokens
        shown, owed = pieces(tokens, "")
        texts = [*shown, owed] if done else shown
        text, fresh = "".join(texts), len("".join(shown[:-1]))
        for end in range(fresh + 1, len(text) + 1):
            hits = [stop for stop in sampling.stop if text[:end].endswith(stop)]
            if hits and may_stop:
                return Expected(tuple(tokens), text[: end - max(map(len, hits))], "stop")
        if done:
            return Expected(tuple(tokens), text, "stop" if ends else "length")


class FakeTokenizer:
    """Stateless, as the real one."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self._vocab = vocab

    def on(self, message: BusFromGateway) -> list[BusToGateway]:
        if isinstance(message, Encode):
            text = message.prompt
            if text is None:
                text = "".join(f"{m.role}:{m.content}\n" for m in message.messages or ())
            return [Encoded(message.call, encode_text(text, self._vocab).tobytes())]
        if isinstance(message, Decode):
            return [Decoded(message.call, tuple(map(self._decode, message.items)))]
        return []

    def _decode(self, item: DecodeItem) -> DecodedItem:
        shown, carry = pieces(item.token_ids, item.carry.decode())
        tail, carry = (carry, "") if item.flush else ("", carry)
        return DecodedItem(item.stream, tuple(shown), tail, carry.encode())


@dataclass
class Running:
    submit: Submit
    outputs: list[int]
    finish: FinishReason | None = None
    code: Code | None = None
    cached: int = 0
    handle: int = 0
    told: bool = False  # its handle was
    scored: int = (
        0  # prompt tokens after the first, of those with prompt_logprobs; the gateway's, too
    )

    @property
    def to_score(self) -> int:
        wanted = self.submit.sampling.prompt_logprobs is not None
        return len(self.submit.prompt) // 4 - 1 - self.scored if wanted else 0


class FakeScheduler:
    """The gateway's side of a scheduler: it keeps what is not acknowledged, and answers everything."""

    def __init__(
        self,
        seat: int,
        incarnation: int,
        *,
        slots: int = 4,
        blocks: int = 1000,
        queue: int = 100,
        inexact: bool = False,
    ) -> None:
        """`inexact`: the tokens depend on where a sequence was taken up, and by whom. Arrivals are refused
        when `queue` sequences wait."""
        self.seat, self.incarnation, self.inexact = seat, incarnation, inexact
        self.sequences: dict[tuple[str, int], Running] = {}
        self.over: dict[tuple[str, int], int] = {}
        self.worker = 0  # incarnation; 0: none
        self.member = False
        self.seq = self.handles = 0
        self.slots, self.blocks, self.queue = slots, blocks, queue
        self.most = 0  # live sequences at once, ever
        self.listed, self.list_call = 2, 0  # in one message, and when it was asked last
        self.lists = self.submits = self.aborts = (
            0  # messages: of lists, with another sequence, to end one
        )

    def load(self) -> SeatLoad:
        accepting = self.worker > 0 and self.member
        running = self._in_turn()
        return SeatLoad(
            self.seat,
            self.incarnation,
            accepting,
            waiting=len(running[self.slots :]),
            running=len(running[: self.slots]),
            total_blocks=self.blocks,
            worker_incarnation=self.worker,
            room_blocks=self.blocks,
            room_sequences=max(0, self.slots - len(running)),
            stuck=tuple(
                (one.submit.request_id, one.submit.index, one.submit.attempt)
                for one in running[self.slots :]
            ),
        )

    def _in_turn(self) -> list[Running]:
        """Live sequences; the first `slots` run, the others wait."""
        running = [s for s in self.sequences.values() if s.finish is None]
        return sorted(running, key=lambda s: (not s.submit.resumed, -s.submit.priority))

    def lose_worker(self) -> None:
        self.worker = 0
        self.sequences = {k: s for k, s in self.sequences.items() if s.finish is not None}

    def on(self, message: BusFromGateway) -> list[BusToGateway]:
        match message:
            case Submit():
                return self._submit(message)
            case AbortSequence():
                return self._abort(message)
            case Resend():
                known = self.sequences.get((message.request_id, message.index))
                if known is not None and known.submit.attempt == message.attempt:
                    first = max(message.prompt_offset, known.submit.num_scores)
                    return [
                        self._tokens([self._scores(known, first, known.scored)]),
                        self._tokens([self._item(known, message.offset)]),
                    ]
            case FinalSeen():
                for request_id, index, attempt in message.sequences:
                    known = self.sequences.get((request_id, index))
                    if known and known.finish and known.submit.attempt == attempt:
                        self._forget((request_id, index))
            case HandBack():
                return self._hand_back(message)
            case ListSequences():
                if message.call > self.list_call:  # one that comes twice has one answer
                    self.list_call = message.call
                    return list(self._list(message))
        return []

    def _list(self, asked: ListSequences) -> Iterator[SequenceList]:
        infos = []
        for key, one in self.sequences.items():
            outputs = array("i", one.outputs).tobytes() if asked.outputs else b""
            submit = one.submit
            infos.append(SequenceInfo(*key, submit.attempt, outputs, one.finish, submit.num_scores))
        for number, at in enumerate(range(0, max(1, len(infos)), self.listed)):
            items, last = tuple(infos[at : at + self.listed]), at + self.listed >= len(infos)
            self.lists += 1
            yield SequenceList(asked.call, self.seat, self.incarnation, items, number, last)

    def step(self) -> list[BusToGateway]:
        """One token for each of the first `slots` sequences."""
        if not (self.worker and self.member):
            return []
        items, rows = [], []
        for one in self._in_turn()[: self.slots]:
            before = len(one.outputs)
            if one.to_score:
                first, one.scored = one.scored, one.scored + min(2, one.to_score)
                items.append(self._scores(one, first, one.scored))
                continue
            self._advance(one)
            if one.told and one.finish is None and one.submit.sampling.logprobs is None:
                rows.append((one.handle, before, one.outputs[-1]))
            else:
                items.append(self._item(one, before))
        return [self._tokens(items, rows)] if items or rows else []

    def repeat_finals(self) -> list[BusToGateway]:
        items = [
            self._item(s, len(s.outputs)) for s in self.sequences.values() if s.finish is not None
        ]
        return [self._tokens(items)] if items else []

    def _submit(self, submit: Submit) -> list[BusToGateway]:
        key = (submit.request_id, submit.index)
        known = self.sequences.get(key)
        if known is not None and known.submit.attempt == submit.attempt:
            return [Submitted(submit.call, self.seat, self.incarnation)]
        newest = max(known.submit.attempt if known else -1, self.over.get(key, -1))
        if submit.attempt <= newest:
            return [Refusal(submit.call, Code.UNKNOWN_REQUEST, "over")]
        if not (self.worker and self.member):
            return [Refusal(submit.call, Code.NOT_READY, "no worker")]
        outputs = list(memoryview(submit.outputs).cast("i"))
        assert submit.resumed or not outputs, "it has run before, and comes as an arrival"
        live = sum(one.finish is None for one in self.sequences.values())
        if not submit.resumed and live >= self.slots + self.queue:
            return [Refusal(submit.call, Code.OVERLOADED, "the queue is full")]
        self.handles += 1
        running = Running(submit, outputs, handle=self.handles, scored=submit.num_scores)
        self.sequences[key] = running
        self.submits += 1
        self.most = max(self.most, live + 1)
        replies: list[BusToGateway] = [Submitted(submit.call, self.seat, self.incarnation)]
        if running.outputs and self._ended(running):
            replies.append(self._tokens([self._item(running, len(running.outputs))]))
        return replies

    def _abort(self, abort: AbortSequence) -> list[BusToGateway]:
        key = (abort.request_id, abort.index)
        self.aborts += 1
        known = self.sequences.get(key)
        replies: list[BusToGateway] = []
        if known is not None and known.submit.attempt == abort.attempt:
            if known.finish is None:
                known.finish = abort.reason
                replies.append(self._tokens([self._item(known, len(known.outputs))]))
        elif known is None or known.submit.attempt < abort.attempt:
            if known is not None:
                self._forget(key)
            self.over[key] = max(abort.attempt, self.over.get(key, -1))
        return [*replies, Done(abort.call)]

    def _hand_back(self, asked: HandBack) -> list[BusToGateway]:
        ended: list[TokensItem] = []
        for one in self._in_turn()[self.slots :]:
            submit = one.submit
            if (submit.request_id, submit.index, submit.attempt) in asked.sequences:
                one.finish = "abort"
                ended.append(self._item(one, len(one.outputs)))
        return [self._tokens(ended)] if ended else []

    def _forget(self, key: tuple[str, int]) -> None:
        known = self.sequences.pop(key)
        self.over[key] = max(known.submit.attempt, self.over.get(key, -1))

    def _advance(self, one: Running) -> None:
        seed = one.submit.sampling.seed
        assert seed is not None
        if one.submit.sampling.max_tokens == 0:
            one.finish = "length"
            return
        salt = b"%d.%d" % (one.submit.attempt, self.seat) if self.inexact else b""
        one.outputs.append(token_at(seed, one.submit.prompt + salt, len(one.outputs)))
        self._ended(one)

    def _ended(self, one: Running) -> bool:
        s = one.submit.sampling
        last = one.outputs[-1]
        if (last == EOS and not s.ignore_eos) or last in s.stop_token_ids:
            one.finish = "stop"
        elif len(one.outputs) == s.max_tokens:
            one.finish = "length"
        return one.finish is not None

    def _scores(self, one: Running, first: int, end: int) -> TokensItem:
        submit, end = one.submit, max(first, end)
        records = score_records(submit, first, end)
        return TokensItem(
            submit.request_id,
            submit.index,
            submit.attempt,
            len(one.outputs),
            (),
            prompt_offset=first,
            prompt_logprobs=records,
        )

    def _item(self, one: Running, offset: int) -> TokensItem:
        submit = one.submit
        seed = submit.sampling.seed
        assert seed is not None
        logprobs: tuple[TokenLogprobs, ...] = ()
        if submit.sampling.logprobs is not None:
            positions = range(offset, len(one.outputs))
            logprobs = tuple(logprob_at(seed, submit.prompt, at) for at in positions)
        one.told = True
        return TokensItem(
            submit.request_id,
            submit.index,
            submit.attempt,
            offset,
            tuple(one.outputs[offset:]),
            one.finish,
            one.code,
            cached_tokens=one.cached,
            logprobs=logprobs,
            handle=one.handle,
        )

    def _tokens(self, items: list[TokensItem], rows: Sequence[tuple[int, int, int]] = ()) -> Tokens:
        self.seq += 1
        columns = TokenRows(
            array("q", [row[0] for row in rows]).tobytes(),
            array("i", [row[1] for row in rows]).tobytes(),
            bytes([1] * len(rows)),
            array("i", [row[2] for row in rows]).tobytes(),
        )
        return Tokens(self.seat, self.incarnation, self.seq, tuple(items), columns)


def accept_what_is_not_durable(core: Core) -> None:
    """A bug to plant: a client hears that its request is accepted before the journal has it."""
    waiting = core._logs._ledger._waiters
    for number, waiter in list(waiting):
        if isinstance(waiter, Pending):
            waiting.remove((number, waiter))
            request = core._admission.accept(waiter)
            core._lives.accept(request, waiter.client, waiter.message.call, core._tick_at_ns)
