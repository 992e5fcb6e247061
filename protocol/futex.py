"""Sleep on a 32-bit word of shared memory until another process changes it (Linux futex).

A round trip costs about 10 us, against 50 to 150 us for a ZeroMQ hop, so the step loop uses this.
Words are aligned and written whole; x86-64 and AArch64 both make such stores atomic.
"""

import ctypes
import errno
import platform

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 0x7FFFFFFF
_SYSCALLS = {"x86_64": 202, "aarch64": 98}
try:
    _SYS_FUTEX = _SYSCALLS[platform.machine()]
except KeyError as unknown:
    raise ImportError(f"no futex system call number known for {platform.machine()}") from unknown

_libc = ctypes.CDLL(None, use_errno=True)


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Word:
    """One aligned uint32 in a shared mapping. The mapping must outlive it."""

    def __init__(self, buffer: memoryview, offset: int) -> None:
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
