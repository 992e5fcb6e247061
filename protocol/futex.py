"""Sleep on a 32-bit word of shared memory until another process changes it (Linux futex).

A round trip costs about 10 us, against 50 to 150 us for a ZeroMQ hop, so the step loop uses this.
Words are aligned and written whole. Whoever shares memory here stores data, then the word that tells of it, and
reads them the other way round, without barriers: x86-64 keeps both orders, other processors do not. So this is
for x86-64 alone.
"""

import ctypes
import errno
import platform

from phalanx.protocol.errors import ConfigError

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 0x7FFFFFFF
PROCESSOR = "x86_64"
_SYS_FUTEX = 202  # its number there
_libc = ctypes.CDLL(None, use_errno=True)


def check_processor() -> None:
    """Raises ConfigError where shared memory does not work as everything here relies on."""
    if (machine := platform.machine()) != PROCESSOR:
        raise ConfigError(
            f"this is a {machine} processor, and Phalanx runs on {PROCESSOR} alone: what one process stores"
            " elsewhere may be seen by another in a different order"
        )


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Word:
    """One aligned uint32 in a shared mapping. The mapping must outlive it."""

    def __init__(self, buffer: memoryview, offset: int) -> None:
        """Raises ConfigError on another processor."""
        check_processor()
        assert offset % 4 == 0
        self._value = ctypes.c_uint32.from_buffer(buffer, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._value))

    @property
    def value(self) -> int:
        return self._value.value

    @value.setter
    def value(self, new: int) -> None:
        self._value.value = new

    def wait(self, expected: int, timeout_ms: float) -> None:
        """Return at once if the word is not `expected`; else sleep until woken or out of time.

        May wake early for no reason: the caller looks at its condition again.
        """
        nanoseconds = int(timeout_ms * 1e6)
        timeout = _TimeSpec(*divmod(nanoseconds, 1_000_000_000))
        result = _libc.syscall(
            _SYS_FUTEX,
            self._address,
            _FUTEX_WAIT,
            ctypes.c_uint32(expected),
            ctypes.byref(timeout),
            None,
            0,
        )
        if result < 0 and (code := ctypes.get_errno()) not in (
            errno.EAGAIN,
            errno.ETIMEDOUT,
            errno.EINTR,
        ):
            raise OSError(code, "futex wait failed")

    def wake(self) -> None:
        _libc.syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, _ALL, None, None, 0)

    def ring(self) -> None:
        """Change the word and wake its sleepers: a doorbell. Lost updates between two ringers are
        harmless, since a sleeper compares with the value it read before it looked for work."""
        self._value.value = (self._value.value + 1) & 0xFFFFFFFF
        self.wake()
