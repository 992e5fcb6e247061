"""Exit codes, refusal codes and the exceptions that cross module borders."""

from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """What a process tells its parent, or the command line tells a script, by ending."""

    OK = 0
    BAD_INPUT = 2  # the command line, the configuration or the input is wrong: do not restart
    NO_NODE = 3  # no node is running in this run directory
    UNHEALTHY = 4  # the node is unhealthy or refused
    TIME_LIMIT = 5
    GAVE_UP = 6  # a process of the node kept dying; the supervisor stopped the node
    PARENT_DIED = 7  # the death pipe to the supervisor closed
    LOST = 8  # the supervisor declared this rank lost; it must not touch shared state again
    NO_ROOM = 9  # shared memory or a GPU is full: started again until there is room
    INTERNAL = 70


class Code(StrEnum):
    """Why a call was refused or a request ended badly. Stable: clients branch on it."""

    BAD_REQUEST = "bad_request"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"  # try again after `retry_after_ms`
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_REQUEST = "unknown_request"
    NOT_READY = "not_ready"
    SHUTDOWN = "shutdown"
    SLOW_CLIENT = "slow_client"
    ALL_BLOCKED = "all_blocked"  # masks and bans left no token to choose
    NAN_LOGITS = "nan_logits"
    KV_PRESSURE = "kv_pressure"
    STREAM_CHANGED = "stream_changed"  # what the client has is not the beginning of this stream
    TIME_LIMIT = "time_limit"  # of a change of the node: it is as it was before
    INTERNAL = "internal"


class PhalanxError(Exception):
    """Base of every error with a message meant for people."""


class ConfigError(PhalanxError):
    """The configuration or the command line is wrong; the message lists every mistake."""


class DecodeError(PhalanxError):
    """Bytes from a peer that are not a valid message."""


class ArenaError(PhalanxError):
    """Shared memory that cannot be created, attached or trusted."""


class NoRoom(ArenaError):
    """Shared memory is full, or a GPU's. The message has the numbers, and what to do."""


class StaleHandle(ArenaError):
    """A handle whose region was freed, reused or whose owner is gone."""


class RingFull(PhalanxError):
    """The reader of a ring is too far behind; the message says by how much."""


class EpochChanged(PhalanxError):
    """The epoch word moved while a step waited: abandon the step."""


class Refused(PhalanxError):
    """A request that is not served. `code` is for programs, the text for people."""

    def __init__(self, code: Code, text: str, retry_after_ms: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.retry_after_ms = retry_after_ms
