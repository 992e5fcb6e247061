"""Requests on their way in, and who counts against which bound. Pure.

A request is pending until the journal has it. Asked again (same key, or same call of the same client)
it is the same request.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Generate, Sampling
from phalanx.protocol.prompt_logprobs import record_bytes
from phalanx.services.gateway.entries import Entry
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.validate import check, resolve
from phalanx.services.model_limits import ModelLimits

OPEN_BYTES_MAX = 1 << 30  # prompts of open requests and their logprobs; beyond: `overloaded`
RETRY_AFTER_MS = 1_000  # what an overloaded node tells clients


@dataclass(frozen=True)
class Settings:
    model: ModelLimits
    incarnation: int
    life: int  # no other gateway of this run directory had it, whichever node it was of: clients know it by that
    max_open_requests: int  # counted in sequences: a request with n counts n times
    default_max_tokens: int
    keep_undelivered_s: int  # as the journal
    seat_capacity: int  # sequences given to one rank at a time; the rest waits here
    draw: Callable[[int], int]  # random bits
    history_requests: int = 1024  # ended ones that can be run again and compared
    history_bytes: int = 64 << 20
    history_ttl_s: int = 3600
    scrub_every_s: float = 0.0  # 0: never
    poison: Mapping[str, str] = field(default_factory=dict[str, str])  # to be given up, and why
    logged: bool = False  # tokens could not be made again the same: they are journalled before told


@dataclass(eq=False)
class Pending:
    """A request that is not accepted yet."""

    number: int  # of its first stream
    client: bytes
    message: Generate
    digest: bytes
    nbytes: int  # of its prompt and what is told of it, as it counts against OPEN_BYTES_MAX
    entry: Entry | None = None  # once it is on its way to the journal


class Admission:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.pending: dict[int, Pending] = {}
        self._by_key: dict[str, Pending | Request] = {}
        self._by_call: dict[tuple[bytes, int], Pending] = {}
        self._next_number = 1
        self.sequences = 0  # open ones, pending ones included
        self.nbytes = 0  # of their prompts, with log-probabilities
        self.draining = False

    # --- in ---

    def known(self, client: bytes, message: Generate, digest: bytes) -> Pending | Request | None:
        """What this message asks for again. Raises Refused when its key is another request's."""
        known = self._by_key.get(message.key) if message.key else None
        if known is None:
            known = self._by_call.get((client, message.call))
            return known if known is not None and known.digest == digest else None
        if digest != (known.entry.digest if isinstance(known, Request) else known.digest):
            raise Refused(
                Code.BAD_REQUEST,
                f"the key {message.key!r} was already used for a different request; choose another"
                " one",
            )
        return known

    def asked_again(self, pending: Pending, client: bytes, message: Generate) -> None:
        """The answer goes to whoever asked last."""
        self._forget_call(pending)
        pending.client, pending.message = client, message
        self._by_call[client, message.call] = pending

    def enter(self, client: bytes, message: Generate, digest: bytes) -> Pending:
        """Raises Refused: what can be judged before tokenizing is wrong, or there is no room."""
        with _one_alone():
            check(message, self._settings.model)
            nbytes = _prompt_bytes(message)
        self._check_room(message, nbytes)
        pending = Pending(self.number(message.n), client, message, digest, nbytes)
        self.pending[pending.number] = pending
        self._by_call[client, message.call] = pending
        if message.key:
            self._by_key[message.key] = pending
        self.sequences += message.n
        self.nbytes += nbytes
        return pending

    def resolve(
        self,
        pending: Pending,
        prompt_ids: Sequence[int],
        pool_tokens: int | None,
        fingerprint: str,
    ) -> Entry:
        """The prompt's ids are known: judge the rest. Raises Refused."""
        message, settings = pending.message, self._settings
        with _one_alone():
            sampling = resolve(
                message.sampling,
                prompt_ids,
                settings.model,
                pool_tokens=pool_tokens,
                default_max_tokens=settings.default_max_tokens,
                seed=settings.draw(53),
            )
        pending.entry = Entry(
            request_id=f"{settings.draw(128):032x}",
            prompt=array("i", prompt_ids).tobytes(),
            sampling=sampling,
            n=message.n,
            stream=message.stream,
            key=message.key,
            digest=pending.digest,
            model=settings.model.name,
            fingerprint=fingerprint,
        )
        return pending.entry

    def accept(self, pending: Pending) -> Request:
        """The journal has it."""
        assert pending.entry is not None
        self._leave(pending)
        request = Request(pending.entry, pending.number)
        self.nbytes += _entry_bytes(request.entry) - pending.nbytes
        if request.entry.key:
            self._by_key[request.entry.key] = request
        return request

    def refuse(self, pending: Pending) -> None:
        self._leave(pending)
        self.sequences -= pending.message.n
        self.nbytes -= pending.nbytes
        if self._by_key.get(pending.message.key) is pending:
            del self._by_key[pending.message.key]

    def recover(self, entry: Entry) -> Request:
        """A request of the last gateway, all of whose sequences count as open until told otherwise."""
        request = Request(entry, self.number(entry.n))
        self.sequences += entry.n
        self.nbytes += _entry_bytes(entry)
        if entry.key:
            self._by_key[entry.key] = request
        return request

    # --- out ---

    def sequence_ended(self) -> None:
        self.sequences -= 1

    def request_ended(self, request: Request) -> None:
        self.nbytes -= _entry_bytes(request.entry)

    def forget(self, request: Request) -> None:
        if self._by_key.get(request.entry.key) is request:
            del self._by_key[request.entry.key]

    # --- inside ---

    def number(self, n: int) -> int:
        """The first of `n` numbers for streams that nobody had before."""
        number = self._next_number
        self._next_number += n
        return number

    def _leave(self, pending: Pending) -> None:
        del self.pending[pending.number]
        self._forget_call(pending)

    def _forget_call(self, pending: Pending) -> None:
        call = pending.client, pending.message.call
        if self._by_call.get(call) is pending:
            del self._by_call[call]

    def _check_room(self, message: Generate, nbytes: int) -> None:
        if self.draining:
            raise Refused(Code.SHUTDOWN, "the node is shutting down and takes no new requests")
        most = self._settings.max_open_requests
        again = f"try again in {RETRY_AFTER_MS} ms"
        if self.sequences + message.n > most:
            raise Refused(
                Code.OVERLOADED,
                f"{self.sequences} sequences are open and this request adds {message.n}, the limit is"
                f" {most}; {again}",
                RETRY_AFTER_MS,
            )
        if self.nbytes + nbytes > OPEN_BYTES_MAX:
            raise Refused(
                Code.OVERLOADED,
                f"the prompts of open requests, with their log-probabilities, take {self.nbytes} bytes and this one {nbytes}, the"
                f" limit is {OPEN_BYTES_MAX}; {again}",
                RETRY_AFTER_MS,
            )


def digest_of(message: Generate) -> bytes:
    """Of what is asked for, without who asks and when."""
    body: tuple[object, ...] = (
        message.prompt,
        message.prompt_token_ids,
        message.messages,
        message.spans,
        message.sampling,
        message.n,
        message.stream,
        message.model,
    )
    return blake2b(msgspec.msgpack.encode(body), digest_size=16).digest()


@contextmanager
def _one_alone() -> Iterator[None]:
    """A bug that one request meets refuses that one. Were it raised, every gateway that its client asks again would
    fall over it, and the node with the ninth."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # a bug; nothing has changed yet
        raise Refused(Code.INTERNAL, f"the gateway cannot take it: {error!r}") from error


def _prompt_bytes(message: Generate) -> int:
    """What the prompt and its log-probabilities take; of a text, an estimate of what its ids will take."""
    if message.prompt_token_ids is not None:
        count = len(message.prompt_token_ids)
    elif message.prompt is not None:
        count = len(message.prompt)
    else:
        count = sum(len(part.content) for part in message.messages or ())
        count += sum(len(span.text) for span in message.spans or ())
    return count * _token_bytes(message.sampling)


def _entry_bytes(entry: Entry) -> int:
    return entry.prompt_tokens * _token_bytes(entry.sampling)


def _token_bytes(sampling: Sampling) -> int:
    """What a prompt token takes while its request is open."""
    num_top = sampling.prompt_logprobs
    return 4 if num_top is None else 4 + record_bytes(num_top)
