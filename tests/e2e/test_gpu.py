"""A node that computes on a GPU: every stream is the same alone and in company, in small and in large
portions, preempted or not, with recorded steps and without, after a process was killed, on one GPU and on
two; and nothing is left.

PHALANX_TEST_DEVICE=cpu runs the same on the CPU, to try the test itself.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from e2e.node import wait_for
from phalanx.protocol.config import node_name
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.messages import Sampling
from phalanx.protocol.queues import read_queues
from phalanx.protocol.rundir import read_plans
from phalanx.services.client import Spec
from phalanx.testing.node import PHALANX, Node, Streams
from worker_svc import full_dims

DEVICE = os.environ.get("PHALANX_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"),
]
_READ_S = 500.0


def specs(lengths: Sequence[int], max_tokens: int, vocab: int) -> list[Spec]:
    """Prompts of these lengths; greedy, sampled, with penalties, and with two sequences."""
    rng = random.Random(3)
    found = []
    for i, length in enumerate(lengths):
        sampling = Sampling(
            seed=i,
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=(0.0, 1.0, 0.7)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            frequency_penalty=0.4 * (i % 4 == 3),
        )
        ids = [rng.randrange(10, vocab) for _ in range(length)]
        found.append(Spec(ids, sampling, n=1 + (i % 7 == 5)))
    return found


def config_file(directory: Path, **scheduler: int | str) -> Path:
    """Of a node with these settings of the scheduler; `num_blocks` and `graphs` are the worker's."""
    blocks, graphs = scheduler.pop("num_blocks", 0), bool(scheduler.pop("graphs", True))
    path = directory / "node.json"
    worker = {"num_blocks": blocks, "host_weights": False, "graphs": graphs}
    document = {"scheduler": scheduler, "worker": worker}
    path.write_text(json.dumps(document))
    return path


def run_alone(node: Node, wanted: list[Spec], count: int) -> Streams:
    """The first `count` requests, one after the other."""
    found: Streams = {}
    for position, spec in enumerate(wanted[:count]):
        for (_, index), stream in node.run([spec], timeout=_READ_S).items():
            found[position, index] = stream
    return found


def check(
    start: Callable[..., Node],
    model: str,
    wanted: list[Spec],
    plenty: dict[str, int | str],
    small: dict[str, int | str],
    alone: int,
) -> None:
    """One node with plenty of everything, then one with little, and without recorded steps: the same streams."""
    options = ("--device", DEVICE, "--model", model)
    with tempfile.TemporaryDirectory() as scratch:
        started = time.monotonic()
        node = start(1, *options, "--config", config_file(Path(scratch), **plenty))
        print(f"ready: {time.monotonic() - started:.1f} s")
        together = timed("together", lambda: node.run(wanted, timeout=_READ_S))
        print(f"step us: {steps(node)}; memory: {read_plans(node.run_dir)}")
        assert len(together) == sum(spec.n for spec in wanted)
        assert {stream[0] for stream in together.values()} == {"length"}
        assert compiled_late(node) == []
        assert DEVICE == "cpu" or (
            logged(node, "steps recorded") and not logged(node, "not all steps recorded")
        )
        for place, stream in timed("alone", lambda: run_alone(node, wanted, alone)).items():
            assert stream == together[place], place
        wait_for(node.whole, 60, "every block and slot back")
        node.stop()
        poor = start(1, *options, "--config", config_file(Path(scratch), **small))
        again = timed("small portions, few blocks", lambda: poor.run(wanted, timeout=_READ_S))
        print(f"step us: {steps(poor)}")
        wait_for(poor.whole, 60, "every block and slot back")
        poor.stop()
    assert again == together


def compiled_late(node: Node, ranks: int = 1) -> list[str]:
    """Kernels that requests had to wait for, as the workers' logs tell."""
    event = "kernel compiled while serving"
    return [record["kernel"] for rank in range(ranks) for record in logged(node, event, rank)]


def logged(node: Node, event: str, rank: int = 0) -> list[dict[str, str]]:
    lines = (node.run_dir / "logs" / f"worker-{rank}.log").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def steps(node: Node) -> tuple[int, int]:
    """Median and 99th percentile of rank 0's last 256 steps, in microseconds."""
    rank, *_ = read_queues(node_name(node.run_dir))["ranks"]
    return rank["step_us_p50"], rank["step_us_p99"]


def timed(name: str, work: Callable[[], Streams]) -> Streams:
    started = time.monotonic()
    found = work()
    print(f"{name}: {time.monotonic() - started:.1f} s, {len(found)} streams")
    return found


def test_streams_of_a_small_model(start_node: Callable[..., Node]) -> None:
    lengths = [1, 2, 9, 17, 130, 300, 40, 129, 500, 33, 5, 64]
    small: dict[str, int | str] = {
        "max_num_batched_tokens": 64,
        "num_blocks": 14,
        "graphs": False,
    }
    check(start_node, "random-tiny", specs(lengths, 40, 500), {}, small, alone=5)


def killed(node: Node, wanted: list[Spec], victim: str, survivor: str = "gateway") -> Streams:
    """The streams when a process is killed while they run; the node is whole again afterwards, and the
    survivor is the process that it was."""
    before = node.pids()
    pid = before[victim]

    def kill() -> None:
        wait_for(lambda: node.running() > len(wanted) // 2, 60, "running sequences")
        os.kill(pid, signal.SIGKILL)

    found = timed(f"{victim} killed", lambda: node.run(wanted, kill, timeout=_READ_S))
    # A worker's kernels lie in the cache on disk, but its process loads CUDA and the weights again.
    node.wait_healthy(120)
    assert node.pids()[victim] != pid
    assert node.pids()[survivor] == before[survivor]
    wait_for(node.whole, 60, "every block and slot back")
    return found


def test_a_killed_process_changes_no_token(start_node: Callable[..., Node]) -> None:
    wanted = specs([1, 130, 300, 9, 500, 64], 300, 500)
    node = start_node(1, "--device", DEVICE, "--model", "random-tiny")
    fault_free = timed("fault-free", lambda: node.run(wanted, timeout=_READ_S))
    assert killed(node, wanted, "worker-0") == fault_free
    assert killed(node, wanted, "scheduler-0") == fault_free
    node.stop()


two_gpus = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"
)


@two_gpus
def test_two_gpus_give_the_tokens_of_one(start_node: Callable[..., Node]) -> None:
    """And one of them goes on, as the same process, when the other's worker is killed."""
    wanted = specs([1, 130, 300, 9, 500, 64], 300, 500)
    options = ("--device", DEVICE, "--model", "random-tiny")
    one = start_node(1, *options)
    expected = timed("one rank", lambda: one.run(wanted, timeout=_READ_S))
    one.stop()
    two = start_node(2, *options)
    assert timed("two ranks", lambda: two.run(wanted, timeout=_READ_S)) == expected
    print(f"step us: {steps(two)}")
    assert killed(two, wanted, "worker-1", survivor="worker-0") == expected
    assert compiled_late(two, ranks=2) == []
    two.stop()


@two_gpus
def test_a_second_gpu_comes_and_goes(start_node: Callable[..., Node]) -> None:
    """Streams that run meanwhile are the same, in one process, and wait for no kernel."""
    wanted = specs([1, 130, 300, 9, 500, 64], 300, 500)
    node = start_node(1, "--device", DEVICE, "--model", "random-tiny")
    expected = timed("one rank", lambda: node.run(wanted, timeout=_READ_S))
    pid = node.pids()["worker-0"]

    def scale(ranks: int) -> Callable[[], None]:
        def change() -> None:
            wait_for(lambda: node.running() > len(wanted) // 2, 60, "running sequences")
            started = time.monotonic()
            node("scale", ranks)
            print(f"scale to {ranks}: {time.monotonic() - started:.1f} s")

        return change

    assert timed("becoming two", lambda: node.run(wanted, scale(2), _READ_S)) == expected
    assert timed("two ranks", lambda: node.run(wanted, timeout=_READ_S)) == expected
    assert compiled_late(node, ranks=2) == []
    assert timed("becoming one", lambda: node.run(wanted, scale(1), _READ_S)) == expected
    assert timed("one rank", lambda: node.run(wanted, timeout=_READ_S)) == expected
    assert node.pids()["worker-0"] == pid and compiled_late(node) == []
    wait_for(node.whole, 60, "every block and slot back")
    node.stop()


# --- memory that is not there ------------------------------------------------------------------------

_HOLD = """
import sys, threading, time, torch

leave, taken, told, ended = int(sys.argv[1]), [], False, threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.is_set():
    free = torch.cuda.mem_get_info()[0] - leave
    if free > 4 << 20:
        try:
            size = min(free - (2 << 20), 1 << 34)
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            continue
        except torch.OutOfMemoryError:
            pass
    if not told:
        print("held", flush=True)
        told = True
    time.sleep(0.02)
"""


@contextmanager
def memory_held(leave: int) -> Iterator[None]:
    """Another process holds all of the GPU's memory but `leave` bytes, and takes what becomes free."""
    command = [sys.executable, "-c", _HOLD, str(leave)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield  # leaving closes its input, and it ends


def refused(directory: Path, code: int, **settings: int) -> str:
    """What `phalanx up` says when it ends with `code`; nothing is left of the node."""
    node = Node(Path(tempfile.mkdtemp(prefix="phe2e")))
    options = ("--device", DEVICE, "--config", config_file(directory, **settings))
    command = [*PHALANX, "up", "--detach", "--json", "--run-dir", node.run_dir, *options]
    try:
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == code, done.stderr
        assert node.names() == []
    finally:
        shutil.rmtree(node.run_dir, ignore_errors=True)
    return done.stderr


on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="about a GPU's memory")


@on_gpu
def test_caches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    said = refused(tmp_path, ExitCode.BAD_INPUT, num_blocks=10**8)
    print(said)
    assert "99999999 KV blocks" in said and "blocks would fit" in said
    with memory_held(leave=3 << 29):
        said = refused(tmp_path, ExitCode.UNHEALTHY, num_blocks=10**5)
    print(said)
    assert "99999 KV blocks" in said and "end the other processes" in said


@on_gpu
def test_memory_that_another_process_takes(start_node: Callable[..., Node]) -> None:
    """Streams run on with what the worker holds. One that is started meanwhile waits, and says so."""
    wanted = specs([1, 130, 300, 9, 500, 64], 300, 500)
    node = start_node(1, "--device", DEVICE, "--model", "random-tiny")
    fault_free = timed("fault-free", lambda: node.run(wanted, timeout=_READ_S))
    with memory_held(leave=8 << 20):
        assert timed("memory taken", lambda: node.run(wanted, timeout=_READ_S)) == fault_free

    def lose_memory() -> None:
        wait_for(lambda: node.running() > len(wanted) // 2, 60, "running sequences")
        with memory_held(leave=8 << 20):
            os.kill(node.pids()["worker-0"], signal.SIGKILL)
            wait_for(lambda: "GPU" in why(node), 120, "a word about memory")
            print(why(node))

    assert timed("killed, no memory", lambda: node.run(wanted, lose_memory, _READ_S)) == fault_free
    node.wait_healthy(120)
    wait_for(node.whole, 60, "every block and slot back")
    node.stop()


def why(node: Node) -> str:
    """Why it is not healthy."""
    return next(p.detail for p in node.look().processes if p.name == "supervisor")


@pytest.fixture(scope="module")
def full_model() -> Iterator[Path]:
    """Four layers with every dimension of the full model: about 30 GB with all experts."""
    scratch = Path(tempfile.mkdtemp(prefix="phalanx-full-"))
    started = time.monotonic()
    try:
        full_dims.write(scratch / "model", seed=1, shape=full_dims.FOUR_LAYERS)
        print(f"written: {time.monotonic() - started:.1f} s")
        yield scratch / "model"
    finally:
        shutil.rmtree(scratch)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cuda", reason="too large for a small machine")
def test_streams_of_four_full_layers(full_model: Path, start_node: Callable[..., Node]) -> None:
    """A prompt of 32k tokens among 64 streams."""
    rng = random.Random(4)
    lengths = [32_768, *(rng.choice((3, 60, 129, 400, 1000)) for _ in range(63))]
    plenty: dict[str, int | str] = {"max_num_batched_tokens": 2048, "num_blocks": 2000}
    small: dict[str, int | str] = {
        "max_num_batched_tokens": 512,
        "num_blocks": 400,
        "graphs": False,
    }
    check(start_node, str(full_model), specs(lengths, 48, 129_000), plenty, small, alone=6)
