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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime._async_compile import FutureKernel, active_mode
from triton.runtime.jit import JITFunction

_LOOK_S = 0.25
_LINE_BYTES = 64  # in the lock's file: the holder's process id, variants compiled, variants
# A kernel takes seconds to compile; whoever has compiled none for so long is not waited for any more.
HUNG_S = 60.0


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
    alive: Callable[[], None],
    on_progress: Callable[[int, int], None],
    on_wait: Callable[[str, float], None],
) -> Iterator[Callable[[], int]]:
    """Within it kernels are not launched: their variants are compiled, by all CPUs, and are ready at its end.

    Yields what tells how many there are so far.

    What a kernel would have written stays what it was, and new tensors are zeros: whoever uses a
    result must do with those. A compilation that fails raises at the end. Whoever leaves by an exception does not
    wait for what is being compiled, which ends in its own time.

    One process of a machine at a time: others wait, and find what it made in Triton's cache. One that
    gets no further is not waited for.

    Args:
        alive: called for every variant that is asked for.
        on_progress: called with (variants compiled, variants), several times a second at the end.
        on_wait: called several times a second while another process compiles, with what is waited for,
            for people, and the share that is done, -1 if that is not known.
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
            alive()
            tell(0, len(pool.futures))
            launch(self, *args, grid=grid, warmup=True, **kwargs)

    try:
        with _alone(on_wait) as tell, _Compilers() as pool, _compiled_by(pool):
            JITFunction.run = run
            try:
                with _Zeros():
                    yield lambda: len(pool.futures)
            finally:
                JITFunction.run = launch
            unfinished: set[Future[Any]] = set(pool.futures)
            while unfinished:
                done, of = len(pool.futures) - len(unfinished), len(pool.futures)
                on_progress(done, of)
                tell(done, of)
                _, unfinished = wait(unfinished, _LOOK_S)
    finally:
        _forget_failed({kernel for kernel, *_ in seen})


def _forget_failed(kernels: set[Any]) -> None:
    """What was not compiled to its end is not taken for compiled when it is asked for again."""
    for kernel in kernels:
        for cache, *_ in kernel.device_caches.values():
            for key in [key for key, made in cache.items() if isinstance(made, FutureKernel)]:
                del cache[key]


@contextmanager
def _compiled_by(pool: ThreadPoolExecutor) -> Iterator[None]:
    mode = triton.AsyncCompileMode(pool).__enter__()
    try:
        yield
        mode.__exit__(None, None, None)  # it would wait for all of them after an exception, too
    finally:
        active_mode.set(None)  # Triton does not get to it when a compilation fails


@contextmanager
def _alone(on_wait: Callable[[str, float], None]) -> Iterator[Callable[[int, int], None]]:
    """Among the processes that share Triton's cache. Yields what tells the others how far this one is.

    The lock goes with the process that has it. One that lives and gets no further is given up: to
    compile at the same time costs time, and nothing else.
    """
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "phalanx.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        mine = _acquire(lock, on_wait)

        def tell(done: int, of: int) -> None:
            if mine:
                line = b"%d %d %d" % (os.getpid(), done, of)
                os.pwrite(lock, line.ljust(_LINE_BYTES), 0)

        tell(0, 0)
        yield tell
    finally:
        os.close(lock)


def _acquire(lock: int, on_wait: Callable[[str, float], None]) -> bool:
    """Whether the lock is had: False when its holder got no further for too long."""
    told, since = b"", time.monotonic()
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        now, line = time.monotonic(), os.pread(lock, _LINE_BYTES, 0)
        if line != told:
            told, since = line, now
        pid, done, of = map(int, line.split() or (0, 0, 0))
        if now - since > HUNG_S:
            on_wait(f"compile kernels, as process {pid} has got no further with them", -1.0)
            return False
        on_wait(f"wait for process {pid}, which compiles kernels", done / of if of else -1.0)
        time.sleep(_LOOK_S)


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
        self._given_up = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._given_up = kind is not None
        self.shutdown(wait=kind is None, cancel_futures=kind is not None)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*args, **kwargs)
            if not self._given_up:
                _ = (
                    kernel.run
                )  # what launches it is made by a C compiler, when it is first asked for
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
