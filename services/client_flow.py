"""What a client asks for and what it gets: requests, their streams as far as received, results."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import cast

from phalanx.protocol.codec import encode
from phalanx.protocol.digests import RunningDigest
from phalanx.protocol.errors import Code, PhalanxError, Refused
from phalanx.protocol.limits import MESSAGE_BYTES_MAX
from phalanx.protocol.messages import (
    ChatMessage,
    ClientMessage,
    Delta,
    Final,
    FinishReason,
    Generate,
    PromptLogprob,
    Sampling,
    Span,
    TokenLogprobs,
    Usage,
)

MS = 1_000_000
REPEAT_NS_MIN = 5_000 * MS  # of unanswered and of quiet requests, at first


class RequestTimeout(PhalanxError):
    """The request did not end in time; it was aborted."""


class GatewaySilent(PhalanxError):
    """Nothing was heard from the gateway for too long."""


class NoNode(PhalanxError):
    """No node is running in this run directory."""


Prompt = str | Sequence[int] | Sequence[ChatMessage] | Sequence[Span]


@dataclass(frozen=True)
class Spec:
    """One request: a text, token ids, chat messages or a rendered prompt, and how to go on from there."""

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    stream: bool = True
    model: str = ""
    key: str = ""  # drawn when empty

    def message(self, key: str) -> Generate:
        """Without a call yet. Raises TypeError when the prompt is none of the four."""
        text, ids, chat, spans = None, None, None, None
        if isinstance(self.prompt, str):
            text = self.prompt
        elif any(isinstance(part, ChatMessage) for part in self.prompt):
            chat = cast(tuple[ChatMessage, ...], tuple(self.prompt))
        elif any(isinstance(part, Span) for part in self.prompt):
            spans = cast(tuple[Span, ...], tuple(self.prompt))
        else:
            ids = tuple(index(cast(int, token)) for token in self.prompt)
        return Generate(
            0,
            text,
            ids,
            chat,
            spans,
            sampling=self.sampling,
            n=self.n,
            stream=self.stream,
            model=self.model,
            key=key,
        )


@dataclass(frozen=True)
class Result:
    """A finished sequence, or a request that was refused (`request_id` is empty then)."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    ttft_ms: float | None  # from the call to the first token; None without one
    logprobs: tuple[TokenLogprobs, ...] = ()
    code: Code | None = None
    error: str = ""
    retry_after_ms: int = 0
    prompt_logprobs: tuple[PromptLogprob | None, ...] = ()  # of the request: at index 0 alone


@dataclass(eq=False)
class Received:
    """One sequence of a flow, as far as received."""

    base: int = 0  # the offset of its first token here: above 0 after an Attach further on
    # Of all its tokens from offset 0; None: those before `base` are not known here.
    running: RunningDigest | None = None
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_ns: int | None = None
    final: Final | None = None

    @property
    def offset(self) -> int:
        return self.base + len(self.token_ids)

    @property
    def digest(self) -> bytes:
        """Of the tokens before `offset`; empty when nobody here can know it."""
        return b"" if self.running is None or self.offset == 0 else self.running.digest()

    def take(self, delta: Delta) -> None:
        self.token_ids.extend(delta.token_ids)
        if self.running is not None:
            self.running.update(delta.token_ids)
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)


@dataclass(frozen=True)
class Begun:
    """What the caller of `attach` has of one sequence already."""

    offset: int = 0
    token_ids: Sequence[int] | None = None  # all of them, if it still has them

    def received(self, index: int) -> Received:
        if self.token_ids is None:
            known = self.offset == 0
            return Received(self.offset, RunningDigest(index) if known else None)
        return Received(len(self.token_ids), RunningDigest(index, self.token_ids))


@dataclass(eq=False)
class Flow:
    """One request on its way."""

    generate: Generate | None  # None: attached to a request that somebody else started
    started_ns: int
    deadline_ns: int | None
    wait_overloaded: bool
    n: int
    request_id: str = ""
    begun: tuple[Begun, ...] = ()  # where an attached flow begins
    prompt_logprobs: list[PromptLogprob | None] = field(default_factory=list)
    seed: int = 0
    prompt_tokens: int = 0
    scored: bool = False  # log-probabilities of the prompt come, before any token
    accepted: bool = False
    aborting: bool = False
    sequences: list[Received] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # indices of finished sequences, as they end
    keep_events: bool = True
    events: deque[Delta | Final] = field(default_factory=deque)
    error: PhalanxError | None = None
    calls: list[int] = field(default_factory=list)
    repeat_at_ns: int = 0
    repeat_ns: int = REPEAT_NS_MIN
    attach_at_ns: int = 0  # a gap is asked for not before
    proving: int = 0  # call of the Attach before whose answer nothing is taken; 0: none
    on_event: Callable[[], None] = lambda: None

    @property
    def done(self) -> bool:
        if self.error is not None:
            return True
        return bool(self.sequences) and all(s.final is not None for s in self.sequences)

    @property
    def began(self) -> bool:
        """Some tokens are here."""
        return any(s.offset > 0 for s in self.sequences)

    @property
    def lacks_prompt(self) -> bool:
        """Log-probabilities of the prompt were asked for, by whomever, and are not all here."""
        return self.scored and len(self.prompt_logprobs) < self.prompt_tokens

    def forgotten(self, why: str) -> str:
        """For who reads a request that somebody else has sent, so it cannot be sent again here."""
        got = sum(s.offset for s in self.sequences)
        return (
            f"{why}, or the node's journal was lost: nothing comes after the {got} tokens that did; who has its prompt"
            f" can send it again, with the seed {self.seed} for the same stream"
        )

    @property
    def where_it_stands(self) -> str:
        """For who gets no more of it, as nobody answers."""
        if not self.request_id:
            return (
                "the request was not accepted: send it again when `phalanx status` shows a gateway"
            )
        got = sum(len(s.token_ids) for s in self.sequences)
        return (
            f"request {self.request_id} was accepted and {got} tokens came: it goes on when its node does"
            " (`phalanx status`, else `phalanx up` there), and can be read by its id, or sent again with the seed"
            f" {self.seed} for the same tokens"
        )

    def results(self) -> list[Result]:
        """The sequences that have ended."""
        return [self.result(index) for index in sorted(self.ended)]

    def result(self, index: int) -> Result:
        """How a sequence ended; of one that has not, as the request has failed, what came of it."""
        s, error = self.sequences[index], self.error
        refused = error if isinstance(error, Refused) else None
        final = s.final or Final(
            self.request_id,
            index,
            s.offset,
            "error",
            Usage(self.prompt_tokens, s.offset),
            code=refused.code if refused else None,
            error=str(error),
        )
        return Result(
            self.request_id,
            index,
            "".join(s.texts) + final.text,
            tuple(s.token_ids),
            final.finish_reason,
            final.usage,
            self.seed,
            None if s.first_ns is None else (s.first_ns - self.started_ns) / MS,
            tuple(s.logprobs),
            final.code,
            final.error,
            refused.retry_after_ms if refused and s.final is None else 0,
            tuple(self.prompt_logprobs) if index == 0 else (),
        )


def frame_of(message: ClientMessage) -> bytes:
    """Raises Refused when it cannot be sent."""
    try:
        frame = encode(message)
    except UnicodeEncodeError as error:
        character = error.object[error.start]
        raise Refused(
            Code.BAD_REQUEST,
            f"a text is not valid Unicode: {character!r} at character {error.start} is half of a"
            " surrogate pair",
        ) from error
    except (OverflowError, TypeError) as error:
        raise Refused(Code.BAD_REQUEST, f"the request cannot be sent: {error}") from error
    if len(frame) > MESSAGE_BYTES_MAX:
        raise Refused(
            Code.TOO_LARGE,
            f"the request takes {len(frame)} bytes, a message at most {MESSAGE_BYTES_MAX}",
        )
    return frame


def node_ended(where: str) -> str:
    """For who has sent a request that no gateway has accepted."""
    return (
        f"shutdown: the node of {where} ended before it accepted the request: start it with `phalanx up`, and send"
        " the request again"
    )
