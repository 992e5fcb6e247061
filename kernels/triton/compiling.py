"""Compiles kernels before they are needed, several at a time; and tells when one is compiled all the same.

Which variants of a kernel a rank needs follows from what its launches look like: the types and the
alignment of tensors, and the constants. So the code that launches them is run once with nothing
launched, and what it asks for is compiled.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

_LOOK_S = 0.25


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


@contextmanager
def compiling_ahead(
    alive: Callable[[], None], on_progress: Callable[[int, int], None]
) -> Iterator[Callable[[], int]]:
    """Within it kernels are not launched: their variants are compiled, by all CPUs, and are ready at its end.

    Yields what tells how many there are so far.

    What a kernel would have written stays what it was, and new tensors are zeros: whoever uses a
    result must do with those. A compilation that fails raises at the end.

    One process of a machine at a time: others wait, and find what it made in Triton's cache.

    Args:
        alive: called several times a second while waiting.
        on_progress: called with (variants compiled, variants), several times a second at the end.
    """
    launch = JITFunction.run
    seen: set[Any] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        # At least as fine as Triton's own key, and quicker to compute: most launches repeat one before.
        looks = (
            value if parameter.is_constexpr else _looks(value)
            for parameter, value in zip(self.params, args, strict=False)
        )
        key = (self, *looks, *kwargs.items())
        if key not in seen:
            seen.add(key)
            launch(self, *args, grid=grid, warmup=True, **kwargs)

    with _alone(alive), _Compilers() as pool, triton.AsyncCompileMode(pool):
        JITFunction.run = run
        try:
            with _Zeros():
                yield lambda: len(pool.futures)
        finally:
            JITFunction.run = launch
        unfinished: set[Future[Any]] = set(pool.futures)
        while unfinished:
            on_progress(len(pool.futures) - len(unfinished), len(pool.futures))
            _, unfinished = wait(unfinished, _LOOK_S)


@contextmanager
def _alone(alive: Callable[[], None]) -> Iterator[None]:
    """Among the processes that share Triton's cache."""
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "phalanx.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                alive()
                time.sleep(_LOOK_S)
        yield  # closing the file lets go of it


class _Compilers(ThreadPoolExecutor):
    """Threads suffice: most of a compilation runs outside the interpreter's lock."""

    def __init__(self) -> None:
        threads = len(os.sched_getaffinity(0))
        if torch.cuda.is_available():  # not so where a test counts variants
            device = torch.cuda.current_device()
            super().__init__(threads, "compile", torch.cuda.set_device, (device,))
        else:
            super().__init__(threads, "compile")
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*args, **kwargs)
            _ = kernel.run  # what launches it is made by a C compiler, when it is first asked for
            return kernel

        self.futures.append(super().submit(compile_and_load))
        return self.futures[-1]


class _Zeros(TorchFunctionMode):
    """What no kernel fills is zero: indices stay within bounds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like, torch.Tensor.new_empty):
            made.zero_()
        return made


def _looks(value: Any) -> Any:
    """As much of an argument as a variant may depend on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value)
