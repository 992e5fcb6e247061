"""Tells when a kernel is compiled. Before a rank is ready that is expected; later it stalls every stream."""

import time
from collections.abc import Callable
from typing import Any

import triton


def watch_compiling(begin: Callable[[str], None], end: Callable[[str, float], None]) -> None:
    """Call `begin(kernel)` before this process compiles a kernel, or reads it from Triton's cache on disk,
    and `end(kernel, seconds)` after it. One watcher a process.
    """
    started_ns = 0

    def before(*, fn: Any, **_: Any) -> bool:
        nonlocal started_ns
        started_ns = time.monotonic_ns()
        begin(fn.name)
        return False  # compile it

    def after(*, fn: Any, **_: Any) -> None:
        end(fn.name, (time.monotonic_ns() - started_ns) / 1e9)

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after
