"""Bytes to checked messages and back. A bad peer yields DecodeError, never a wrong type deep inside."""

from typing import Any, Generic, TypeVar

import msgspec

from phalanx.protocol.errors import DecodeError
from phalanx.protocol.limits import BUS_MESSAGE_BYTES_MAX
from phalanx.protocol.messages import Message

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one union of messages, as a socket expects it."""

    def __init__(self, union: Any, max_bytes: int = BUS_MESSAGE_BYTES_MAX) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes) -> T:
        """Raises DecodeError: too large, not MessagePack, unknown type, a field missing or wrong."""
        if len(frame) > self._max_bytes:
            raise DecodeError(f"a message of {len(frame)} bytes, the limit is {self._max_bytes}")
        try:
            return self._decoder.decode(frame)  # type: ignore[no-any-return]
        except (msgspec.ValidationError, msgspec.DecodeError, RecursionError, ValueError) as error:
            raise DecodeError(f"not a valid message: {error}") from error


def call_of(frame: bytes) -> int:
    """The `call` of a frame that failed to decode, so that its error can be addressed; 0 if unknown."""
    try:
        loose = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return 0
    call = loose.get("call", 0) if isinstance(loose, dict) else 0
    return call if isinstance(call, int) and 0 <= call < 2**63 else 0
