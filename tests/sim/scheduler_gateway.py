"""A model of the gateway for the scheduler's simulator: requests, attempts, resends, moves, finals.

It keeps the promises that the real one makes on the bus and no others: commands are repeated until
answered, tokens of a seat or attempt that is over are dropped, a lost seat's sequences are placed
anew with the tokens that arrived.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec
import numpy as np

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import (
    AbortSequence,
    BusFromGateway,
    BusToGateway,
    Done,
    FinalSeen,
    FinishReason,
    HandBack,
    ListSequences,
    Refusal,
    Resend,
    Sampling,
    SeatLoad,
    SequenceList,
    Submit,
    Submitted,
    Tokens,
    TokensItem,
)
from phalanx.protocol.prompt_logprobs import record_bytes
from sim.hash_worker import EOS, MAX_MODEL_LEN, fault_free
from sim.token_rows import Handles

RETRY_NS = 40_000_000
RESEND_NS = 5_000_000
FIRST_ATTEMPT = 1 << 20  # as of the first gateway of a node
Send = Callable[[int, BusFromGateway], None]  # (seat, message)
After = Callable[[int, Callable[[], None]], None]  # (delay_ns, what then)


@dataclass(eq=False)
class Request:
    """One sequence as its client sees it."""

    request_id: str
    index: int
    prompt: list[int]
    sampling: Sampling
    outputs: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # as far as asked for
    scores: bytes = b""  # of the prompt, as far as asked for
    attempt: int = FIRST_ATTEMPT - 1
    seat: int = -1
    placed: bool = False  # Submitted was heard for this attempt
    resumed: bool = False  # some scheduler had it before
    finish: FinishReason | None = None
    code: Code | None = None
    refused: str = ""
    abort: FinishReason | None = None  # asked for, with this reason
    asks: bool = False  # for what is missing, and more went missing meanwhile
    asks_again: bool = False

    @property
    def over(self) -> bool:
        return self.finish is not None or bool(self.refused)

    @property
    def num_scores(self) -> int:
        if self.sampling.prompt_logprobs is None:
            return 0
        return len(self.scores) // record_bytes(self.sampling.prompt_logprobs)

    @property
    def scored(self) -> bool:
        wanted = self.sampling.prompt_logprobs is not None
        return not wanted or self.num_scores == len(self.prompt) - 1

    def expected(self) -> tuple[list[int], FinishReason]:
        """Outputs and end of an undisturbed run."""
        sampling = self.sampling
        assert sampling.max_tokens is not None
        room = min(sampling.max_tokens, MAX_MODEL_LEN - len(self.prompt))
        stream = fault_free(self.prompt, sampling.seed or 0, room, sampling.forced_token_ids)
        for count, token in enumerate(stream, 1):
            ends = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
            if ends and count >= sampling.min_tokens:
                return stream[:count], "stop"
        return stream, "length"


class ModelGateway:
    """Places `requests` on seats whose load says that they accept."""

    def __init__(self, rng: Random, send: Send, after: After) -> None:
        self.rng, self._send, self._after = rng, send, after
        self.requests: dict[tuple[str, int], Request] = {}
        self.loads: dict[int, SeatLoad] = {}
        self._handles: dict[tuple[int, int], Handles] = {}  # by seat and incarnation
        self.incarnation = 1
        self._call = 0
        self._calls: dict[int, tuple[Request, int]] = {}  # and the attempt that the call is about
        self.overloads = 0

    def open(self, request: Request) -> None:
        self.requests[request.request_id, request.index] = request
        self._place(request)

    def restart(self, seats: list[int]) -> None:
        """All but the journal is forgotten; what the schedulers run is asked for and adopted."""
        self.incarnation += 1
        self._calls.clear()
        self._handles.clear()
        for request in self.requests.values():
            if not request.over:
                request.seat, request.placed, request.resumed = -1, False, True
                request.outputs, request.logprobs, request.scores = [], [], b""
        for seat in seats:
            self._ask(seat, self.incarnation, 5)
        self._after(6 * RETRY_NS, self._place_homeless)

    def _ask(self, seat: int, incarnation: int, times: int) -> None:
        if times and incarnation == self.incarnation:
            self._call += 1
            self._send(seat, ListSequences(self._call))
            self._after(RETRY_NS, lambda: self._ask(seat, incarnation, times - 1))

    def _place_homeless(self) -> None:
        for request in list(self.requests.values()):
            if not request.over and request.seat < 0:
                self._place(request)

    def _place(self, request: Request) -> None:
        """A new attempt on some accepting seat; none: later."""
        if request.over:
            return
        request.resumed |= request.placed
        request.attempt, request.placed, request.seat = request.attempt + 1, False, -1
        self._find_seat(request, request.attempt)

    def _find_seat(self, request: Request, attempt: int) -> None:
        if request.over or request.attempt != attempt or request.seat >= 0:
            return
        if request.abort is not None:  # nowhere to abort it: it ends here
            request.finish = request.abort
            return
        accepting = [load.seat for load in self.loads.values() if load.accepting]
        if not accepting:
            self._after(RETRY_NS, lambda: self._find_seat(request, attempt))
            return
        beside = [
            other.seat
            for other in self.requests.values()
            if other.request_id == request.request_id and other.seat in accepting
        ]
        # Sequences of one request mostly go to one seat.
        request.seat = self.rng.choice(beside if beside and self.rng.random() < 0.8 else accepting)
        self._submit(request, attempt)

    def _submit(self, request: Request, attempt: int) -> None:
        if request.over or request.placed or request.attempt != attempt or request.seat < 0:
            return
        self._call += 1
        self._calls[self._call] = (request, request.attempt)
        sampling = request.sampling
        if request.scored and sampling.max_tokens:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        submit = Submit(
            self._call,
            request.request_id,
            request.index,
            attempt,
            np.array(request.prompt, np.int32).tobytes(),
            sampling,
            np.array(request.outputs, np.int32).tobytes(),
            priority=len(request.prompt) % 3 - 1,
            resumed=request.resumed,
            num_scores=request.num_scores,
        )
        self._send(request.seat, submit)
        self._after(RETRY_NS, lambda: self._submit(request, attempt))

    def abort(self, request: Request, reason: FinishReason) -> None:
        if not request.over and request.abort is None:
            request.abort = reason
            self._send_abort(request)

    def _send_abort(self, request: Request) -> None:
        if request.over or request.abort is None:
            return
        if request.seat >= 0:
            self._call += 1
            self._calls[self._call] = (request, request.attempt)
            key = request.request_id, request.index
            self._send(
                request.seat, AbortSequence(self._call, *key, request.attempt, request.abort)
            )
        self._after(RETRY_NS, lambda: self._send_abort(request))

    def ask_back(self, rng: Random) -> None:
        """Of one seat whatever it has, as far as it waits."""
        there = [r for r in self.requests.values() if r.placed and r.seat >= 0 and not r.over]
        if there:
            seat = rng.choice(there).seat
            names = [(r.request_id, r.index, r.attempt) for r in there if r.seat == seat]
            self._send(seat, HandBack(tuple(names)))

    # ------------------------------------------------------------ what schedulers say

    def receive(self, seat: int, message: BusToGateway) -> None:
        match message:
            case SeatLoad():
                self._load(message)
            case Tokens():
                load = self.loads.get(message.seat)
                if load is None or load.incarnation == message.incarnation:
                    named = self._handles.setdefault((seat, message.incarnation), Handles())
                    for item in named.items(message):
                        self._item(message.seat, item)
            case Submitted():
                if (request := self._asked(seat, message.call)) is not None:
                    request.placed = True
            case Refusal():
                self._refused(seat, message)
            case Done():
                if (request := self._asked(seat, message.call)) is not None:
                    request.finish = request.abort
            case SequenceList():
                self._adopt(message)
            case _:
                raise AssertionError(f"not for a gateway: {message}")

    def _asked(self, seat: int, call: int) -> Request | None:
        """The request that this answer is for; None when it has moved or ended since."""
        request, attempt = self._calls.pop(call, (None, 0))
        if request is None or request.over or (request.seat, request.attempt) != (seat, attempt):
            return None
        return request

    def _load(self, load: SeatLoad) -> None:
        before = self.loads.get(load.seat)
        if before is not None and load.incarnation < before.incarnation:
            return
        self.loads[load.seat] = load
        if before is not None and (
            (load.incarnation, load.worker_incarnation)
            != (before.incarnation, before.worker_incarnation)
        ):
            self._move_all(load.seat)

    def _move_all(self, seat: int) -> None:
        for request in list(self.requests.values()):
            if request.seat == seat and not request.over:
                request.resumed = True
                self._place(request)

    def _refused(self, seat: int, refusal: Refusal) -> None:
        request = self._asked(seat, refusal.call)
        if request is None or request.placed:
            return
        if refusal.code == Code.BAD_REQUEST:
            request.refused = refusal.message
            return
        self.overloads += refusal.code == Code.OVERLOADED
        request.seat = -1
        self._after(RETRY_NS, lambda: self._place(request) if request.seat < 0 else None)

    def _item(self, seat: int, item: TokensItem) -> None:
        key = (item.request_id, item.index)
        request = self.requests[key]
        if request.over:
            if item.finish_reason is not None:
                self._send(seat, FinalSeen(((*key, item.attempt),)))
            else:  # nobody waits for these tokens
                self._call += 1
                self._send(seat, AbortSequence(self._call, *key, item.attempt))
            return
        if item.attempt != request.attempt or request.seat != seat:
            return
        have = len(request.outputs)
        if item.prompt_logprobs and item.prompt_offset <= request.num_scores:
            size = record_bytes(request.sampling.prompt_logprobs or 0)
            known = request.scores[item.prompt_offset * size :]
            assert item.prompt_logprobs.startswith(known) or known.startswith(item.prompt_logprobs)
            request.scores += item.prompt_logprobs[len(known) :]
        whole = item.token_ids or item.finish_reason in ("stop", "length")
        gap = item.prompt_offset > request.num_scores or (whole and not request.scored)
        if item.offset > have or (gap and item.finish_reason != "abort"):
            self._ask_for_rest(request)
            return
        fresh = item.token_ids[have - item.offset :]
        twice = item.token_ids[: have - item.offset]
        assert tuple(request.outputs[item.offset : item.offset + len(twice)]) == twice
        request.outputs += fresh
        request.placed = True
        if item.finish_reason is not None and item.offset + len(item.token_ids) == len(
            request.outputs
        ):
            self._send(seat, FinalSeen(((*key, item.attempt),)))
            if item.finish_reason == "abort" and request.abort is None:
                self._place(request)  # it was given back
                return
            given_back = item.finish_reason == "abort" != request.abort
            request.finish = request.abort if given_back else item.finish_reason
            request.code = item.code

    def _ask_for_rest(self, request: Request, again: bool = False) -> None:
        """For what is missing: not once more for each piece of an answer that is on its way."""
        if request.asks and not again:
            request.asks_again = True
            return
        request.asks, request.asks_again = True, False
        have = len(request.outputs), request.num_scores
        name = request.request_id, request.index, request.attempt
        self._send(request.seat, Resend(*name, *have))

        def look() -> None:
            request.asks = False
            here = name == (request.request_id, request.index, request.attempt)
            if request.asks_again and here and not request.over and request.seat >= 0:
                self._ask_for_rest(request, again=True)

        self._after(RESEND_NS, look)

    def _adopt(self, listed: SequenceList) -> None:
        """Of several copies of one sequence, that of the latest attempt."""
        load = self.loads.get(listed.seat)
        if load is not None and load.incarnation != listed.incarnation:
            return
        for info in listed.items:
            request = self.requests[info.request_id, info.index]
            if request.over or request.placed or info.attempt < request.attempt:
                continue
            if request.num_scores < info.first_score:
                continue  # what the last gateway had is told nowhere again
            request.attempt, request.seat, request.placed = info.attempt, listed.seat, True
            if request.scored:
                request.outputs = np.frombuffer(info.outputs, np.int32).tolist()
            if info.finish_reason is not None or not request.scored:
                # How it ended, its final tells in full.
                have = len(request.outputs), request.num_scores
                self._send(listed.seat, Resend(info.request_id, info.index, info.attempt, *have))
