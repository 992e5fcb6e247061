"""How many connections a process takes. libzmq aborts a process that has no descriptor left for one more at a Unix
socket, so no more are taken well before that."""

import contextlib
import errno
import os
import resource

_FILES_MIN = 512  # with fewer nothing can be kept back


def raise_limit() -> None:
    """Allow this process, and those that it starts, as many open files as it may ask for: the 1,024 of most shells are
    for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def full() -> bool:
    """Whether three quarters of the descriptors are in use. Costs three system calls, however many there are: the
    kernel gives the lowest that is free."""
    limit = _limit()
    if limit < _FILES_MIN:
        return False
    try:
        lowest = os.dup(0)
    except OSError as error:
        return error.errno == errno.EMFILE  # not for want of a standard input
    os.close(lowest)
    return lowest >= limit - limit // 4


def eased() -> bool:
    """Whether so many of them are free again that more may come, and not only one or two."""
    limit = _limit()
    return len(os.listdir("/proc/self/fd")) < limit // 8 * 5


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
