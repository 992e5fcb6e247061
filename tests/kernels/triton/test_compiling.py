"""Kernels are compiled before they are needed: nothing runs meanwhile, each variant is made once, and no other process
is waited for that gets no further."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from phalanx.kernels.triton import compiling
from phalanx.kernels.triton.compiling import compiling_ahead


class Hopper:
    """As much of a driver as it takes to tell variants apart, and to launch what `Compiler` makes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Takes a while, and makes kernels that tell when they run."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.launched = 0
        self.fails = False
        self.held: threading.Event | None = None  # nothing is ready before it is set
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def __call__(self, src: Any, **_: Any) -> SimpleNamespace:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.at_once, self.most_at_once)
        if self.held:
            assert self.held.wait(60)
        time.sleep(0.2)
        with self._lock:
            self.at_once -= 1
            self.made.append(str(src.signature))
        if self.fails:
            raise RuntimeError("ptxas died")
        return SimpleNamespace(
            run=self._run, function=0, packed_metadata=0, launch_metadata=lambda *_: None
        )

    def _run(self, *_: Any) -> None:
        self.launched += 1


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Triton's, of this test alone; and patience that a test can wait for."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(compiling, "_LOOK_S", 0.02)
    monkeypatch.setattr(compiling, "HUNG_S", 0.5)
    return tmp_path


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    before = driver._active
    made = Compiler()
    driver.set_active(Hopper())
    monkeypatch.setattr(triton.compiler, "compile", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield made
    driver._active = before


def fill(x: Any, n: Any, BLOCK: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at, mask=at < n)


def ignored(*_: object) -> None:
    pass


# --- the rules -----------------------------------------------------------------------------------------


def test_nothing_is_launched_and_every_variant_is_there_at_the_end(compiler: Compiler) -> None:
    kernel, x, told = JITFunction(fill), torch.zeros(64, dtype=torch.int32), list[Any]()
    launch = JITFunction.run
    with compiling_ahead(ignored, lambda *done: told.append(done), ignored) as asked_for:
        assert asked_for() == 0
        for n in (17, 18, 33):
            kernel[(1,)](x, n, BLOCK=64)
        assert asked_for() == 1
        kernel[(1,)](x, 32, BLOCK=64)  # a multiple of 16
        kernel[(1,)](x, 17, BLOCK=128)
        kernel[(1,)](x[1:], 17, BLOCK=64)  # not aligned
        kernel[(1,)](x.float(), 17, BLOCK=64)
        assert asked_for() == 5
    assert JITFunction.run is launch
    assert len(compiler.made) == 5 and compiler.launched == 0
    assert told[0][1] == 5 and all(done <= of for done, of in told)
    assert compiler.most_at_once > 1 or len(os.sched_getaffinity(0)) == 1
    kernel[(1,)](x, 48, BLOCK=64)
    assert len(compiler.made) == 5 and compiler.launched == 1


def test_what_a_kernel_would_have_written_is_zero() -> None:
    torch.full((1000,), 7.0)  # memory that is likely to be handed out next
    with compiling_ahead(ignored, ignored, ignored):
        x = torch.ones(3)
        found = [torch.empty(1000), torch.empty_like(x), x.new_empty((2, 2))]
        assert torch.equal(x, torch.ones(3))
    assert not any(bool(tensor.any()) for tensor in found)


def test_a_compilation_that_fails_raises_at_the_end(compiler: Compiler) -> None:
    kernel, x, launch = JITFunction(fill), torch.zeros(64, dtype=torch.int32), JITFunction.run
    compiler.fails = True
    with (
        pytest.raises(RuntimeError, match="ptxas died"),
        compiling_ahead(ignored, ignored, ignored),
    ):
        kernel[(1,)](x, 17, BLOCK=64)
    assert JITFunction.run is launch
    compiler.fails = False
    with compiling_ahead(ignored, ignored, ignored):  # which may be tried again
        kernel[(1,)](x, 17, BLOCK=64)
    kernel[(1,)](x, 17, BLOCK=64)
    assert compiler.launched == 1


def test_an_error_within_leaves_launches_as_they_were(cache: Path) -> None:
    launch = JITFunction.run
    with pytest.raises(KeyError), compiling_ahead(ignored, ignored, ignored):
        raise KeyError
    assert JITFunction.run is launch
    assert not locked(cache)


def test_whoever_gives_up_waits_for_no_compilation(compiler: Compiler) -> None:
    """A group that changes again meanwhile waits a second for an answer, and a kernel takes several."""
    kernel, x, launch = JITFunction(fill), torch.zeros(64, dtype=torch.int32), JITFunction.run
    compiler.held = threading.Event()

    def over(*_: object) -> None:
        raise KeyError("over")

    began = time.monotonic()
    with pytest.raises(KeyError, match="over"), compiling_ahead(ignored, over, ignored):
        for block in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
            kernel[(1,)](x, 17, BLOCK=block)
    assert time.monotonic() - began < 5 and not compiler.made
    assert JITFunction.run is launch
    compiler.held.set()
    with compiling_ahead(ignored, ignored, ignored):  # which may be tried again
        kernel[(1,)](x, 17, BLOCK=64)
    kernel[(1,)](x, 17, BLOCK=64)
    assert compiler.launched == 1 and len(compiler.made) <= 1 + len(os.sched_getaffinity(0))


def test_every_variant_is_a_sign_of_life(compiler: Compiler) -> None:
    kernel, x, signs = JITFunction(fill), torch.zeros(64, dtype=torch.int32), list[None]()
    with compiling_ahead(lambda: signs.append(None), ignored, ignored):
        for block in (64, 128, 256, 64, 128):
            kernel[(1,)](x, 17, BLOCK=block)
    assert len(signs) == 3


# --- other processes -----------------------------------------------------------------------------------


def locked(cache: Path) -> bool:
    with (cache / "phalanx.lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Waiting:
    """A process that wants to compile, in a thread: what it was told while it waited, and when it began."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []
        self.began = threading.Event()
        self._thread = threading.Thread(target=self._compile)
        self._thread.start()

    def _compile(self) -> None:
        with compiling._alone(lambda *told: self.told.append(told)):
            self.began.set()

    def ends(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()


_HOLD = """
import sys, time
from pathlib import Path
import triton
triton.knobs.cache.dir = sys.argv[1]
from phalanx.kernels.triton import compiling
with compiling._alone(print) as tell:
    tell(3, 12)
    print("held", flush=True)
    for done in range(4, 1000):
        time.sleep(0.1)
        tell(done % 12, 12)
"""


@pytest.fixture
def holder(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock and gets on, until it is stopped or killed."""
    command = [sys.executable, "-P", "-c", _HOLD, str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def eventually(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_that_gets_on_is_waited_for_and_a_dead_one_is_not(
    holder: subprocess.Popen[str],
) -> None:
    waiting = Waiting()
    assert not waiting.ends(4 * compiling.HUNG_S)
    what, share = waiting.told[-1]
    assert what == f"wait for process {holder.pid}, which compiles kernels"
    assert 0 <= share < 1 and len({share for _, share in waiting.told}) > 3
    holder.kill()
    assert waiting.ends(30)
    assert all("wait for" in what for what, _ in waiting.told)  # it was given up by nobody


def test_one_that_hangs_is_given_up(holder: subprocess.Popen[str], cache: Path) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    waiting = Waiting()
    eventually(waiting.began.is_set)
    assert waiting.ends(30)
    what, share = waiting.told[-1]
    assert what == f"compile kernels, as process {holder.pid} has got no further with them"
    assert share < 0 and locked(cache)
    # Its line is still its own: the next one who waits is told of it as well.
    assert (cache / "phalanx.lock").read_bytes().split()[0] == b"%d" % holder.pid


def test_one_that_tells_nothing_is_given_up_too(cache: Path) -> None:
    """Of an older version, or before its first word."""
    with (cache / "phalanx.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = Waiting()
        assert waiting.ends(30)
    assert waiting.told[-1][0].startswith("compile kernels")
