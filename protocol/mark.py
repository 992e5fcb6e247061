"""A lock in shared memory that tells of its holder's death: the kernel writes so into it when the holder's main
thread ends, however it ends, before it takes the process apart (Linux robust futex).

A death pipe closes after that, when all memory is gone: tens of milliseconds later for a process with a model.
"""

import ctypes
import threading

MARK_BYTES = 64  # room for a pthread_mutex_t: it takes 40 bytes
_OWNER_DIED = 0x40000000
_HOLDER = 0x3FFFFFFF  # the thread id of who holds it
_PTHREAD_PROCESS_SHARED = _PTHREAD_MUTEX_ROBUST = 1
_libc = ctypes.CDLL(None)


class Mark:
    """One in a shared mapping of zeros, which must outlive it."""

    def __init__(self, buffer: memoryview, offset: int) -> None:
        assert offset % 8 == 0
        self._word = ctypes.c_uint32.from_buffer(buffer, offset)
        self._mutex = ctypes.c_void_p(ctypes.addressof(self._word))

    def hold(self) -> bool:
        """Take it until this process ends; call it in the main thread.

        Returns whether its end will show: not with a libc whose mutexes look otherwise.
        """
        attributes = ctypes.create_string_buffer(MARK_BYTES)
        failed = (
            _libc.pthread_mutexattr_init(attributes)
            or _libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED)
            or _libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST)
            or _libc.pthread_mutex_init(self._mutex, attributes)
            or _libc.pthread_mutex_lock(self._mutex)
        )
        return not failed and self._word.value & _HOLDER == threading.get_native_id()

    @property
    def holder_died(self) -> bool:
        return bool(self._word.value & _OWNER_DIED)
