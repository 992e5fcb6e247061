"""What the journal remembers of a request, and the changes to it. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.protocol.messages import Final, Sampling


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An accepted request: all of it, because its stream is a function of this."""

    request_id: str
    prompt: bytes  # int32 ids
    sampling: Sampling  # resolved: seed and max_tokens are filled in
    n: int
    stream: bool
    key: str  # the client's, "" if it gave none
    digest: bytes  # of what the client asked for: one key never stands for two requests
    model: str
    fingerprint: str  # of the numerics and the tokenizer; "" when accepted before they were known

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


class Accept(msgspec.Struct, frozen=True):
    entry: Entry


class Again(msgspec.Struct, frozen=True):
    """Accepted before, in a file that is lost: nobody waits for it, so it is tried until it is written."""

    entry: Entry


class Finish(msgspec.Struct, frozen=True):
    """Sequence `final.index` ended; after a restart it stays ended."""

    final: Final


class Produced(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Tokens `offset ...` of a sequence: for the journal of nodes where they could not be made again the
    same, and elsewhere for the token log."""

    request_id: str
    index: int
    offset: int
    token_ids: bytes  # int32
    logprobs: bytes = b""  # msgpack of one TokenLogprobs a token; empty: not asked for


class Scored(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Log-probabilities of the prompt, records `first ...`, likewise."""

    request_id: str
    first: int
    records: bytes  # as `protocol/prompt_logprobs.py` has them


class Fell(msgspec.Struct, frozen=True):
    """How often in a row its ranks fell before a token came after its first `tokens`."""

    request_id: str
    index: int
    falls: int
    tokens: int


class Placed(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The scheduler, and the worker of it, that a sequence is given to: as long as both live they have it.

    For the token log alone. Seat -1: nobody has it.
    """

    request_id: str
    index: int
    seat: int
    scheduler: int  # incarnations; 0: not known
    worker: int


class Forget(msgspec.Struct, frozen=True):
    request_id: str


class Stamp(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The fingerprint became known: it is that of every entry accepted without one."""

    fingerprint: str


class Alive(msgspec.Struct, frozen=True):
    """Whatever has not ended is not abandoned: a gateway still works on it."""


Op = Accept | Again | Produced | Scored | Finish | Fell | Forget | Stamp | Alive
Note = Produced | Scored | Placed | Stamp  # for the token log


@dataclass(frozen=True)
class Recovered:
    """A request as the journal has it at start."""

    entry: Entry
    finals: dict[int, Final] = field(default_factory=dict)
    produced: tuple[Produced, ...] = ()  # by index, then offset; the same token may come twice
    scored: tuple[Scored, ...] = ()  # by first record, likewise
    falls: tuple[Fell, ...] = ()
    placed: dict[int, Placed] | None = None  # None: there is no token log


def taken_over(recovered: Sequence[Recovered]) -> str:
    """For the history. Those that have ended are kept for readers who come late."""
    if not recovered:
        return ""
    is_open = sum(len(request.finals) < request.entry.n for request in recovered)
    ended = len(recovered) - is_open
    requests = f"{is_open} request{'' if is_open == 1 else 's'}"
    return f"{requests} taken over from the journal" + (
        f", {ended} that had ended" if ended else ""
    )
