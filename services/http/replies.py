"""What a reply is, whichever API asked: prompts that become streams, and their tokens as that API's messages. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.protocol.messages import Delta, Final, PromptLogprob
from phalanx.services.client_flow import Spec
from phalanx.services.http.errors import HttpError, of_code

LOGPROB_MIN = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class SSE:
    """One server-sent event."""

    data: bytes
    name: str = ""

    def encode(self) -> bytes:
        head = f"event: {self.name}\n".encode() if self.name else b""
        return head + b"data: " + self.data + b"\n\n"


@dataclass(frozen=True)
class Started:
    """What the node said when it accepted one prompt."""

    request_id: str
    prompt_tokens: int


class Reply(Protocol):
    """The state of one reply. `prompt` counts the request's prompts from 0."""

    def begin(self, started: Sequence[Started]) -> list[SSE]: ...

    def scored(self, prompt: int, entries: Sequence[PromptLogprob | None]) -> list[SSE]:
        """Log-probabilities of a prompt's tokens, where they were asked for; before its first event."""

    def take(self, prompt: int, event: Delta | Final) -> list[SSE]:
        """Raises HttpError when the sequence ended badly."""

    def end(self) -> list[SSE]:
        """After the last final."""

    def fail(self, error: HttpError) -> list[SSE]:
        """The last words of a stream that has begun and cannot go on."""

    def document(self) -> dict[str, Any]:
        """The whole reply, for a request that does not stream."""


@dataclass(frozen=True)
class Asked:
    """A request understood: what to generate, and how to say it."""

    specs: list[Spec]
    stream: bool
    reply: Callable[[], Reply]


def check_end(final: Final) -> None:
    """Raises HttpError unless the sequence came to an end of its own."""
    if final.finish_reason in ("stop", "length") and final.code is None:
        return
    if final.code is not None:
        raise of_code(final.code, final.error or final.finish_reason)
    raise HttpError(
        500, "internal", final.error or f"the sequence ended with {final.finish_reason}"
    )


def joined(events: Sequence[Delta | Final]) -> list[Delta | Final]:
    """The same tokens in fewer deltas: those of one sequence that follow each other become one."""
    found: list[Delta | Final] = []
    at: dict[int, int] = {}  # index -> where its delta stands that may still grow
    for event in events:
        place = at.get(event.index)
        if isinstance(event, Final):
            at.pop(event.index, None)
            found.append(event)
        elif place is None:
            at[event.index] = len(found)
            found.append(event)
        else:
            before = found[place]
            assert isinstance(before, Delta)
            found[place] = Delta(
                before.request_id,
                before.index,
                before.offset,
                before.token_ids + event.token_ids,
                before.text + event.text,
                before.logprobs + event.logprobs,
            )
    return found
