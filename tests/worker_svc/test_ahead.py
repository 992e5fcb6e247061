"""What is made before a worker's turn comes is what it would make itself, and can be forked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worker_svc.test_host_weights import TINY, assert_equal, held

from phalanx.protocol.arena import SHM, arena_name
from phalanx.protocol.config import NodeConfig, WorkerConfig
from phalanx.supervisor.processes import ProcessSpec
from phalanx.worker_svc import ahead
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint, load_dense

SLOTS = [[5, 2, 7]] * 10 + [[], []]

# Prepares as `worker-next` does, forks, and computes in the fork. Prints what the supervisor would not see.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from phalanx.protocol.standby import check_single
from phalanx.protocol.config import load_config
from phalanx.worker_svc.main import prepare

config = load_config(Path(sys.argv[1]))
ahead = prepare(config).keywords["ahead"]
import torch
check_single()
print(torch.cuda.is_initialized(), ahead.checked, ahead.dense is not None)
sys.stdout.flush()
if (pid := os.fork()) == 0:
    signal.alarm(30)
    from phalanx.worker_svc.model.checkpoint import load_checkpoint
    from phalanx.worker_svc.model.invariance import check_invariance
    from phalanx.worker_svc.model.threads import set_up_thread
    set_up_thread(config.worker.threads)
    check_invariance()
    one, other = torch.randn(2, 256, 512)
    torch.mm(one, other.T)
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / f"ah{os.getpid()}").mkdir()
    return tmp_path / f"ah{os.getpid()}"


def test_experts_are_added_to_what_was_loaded_without(run_dir: Path) -> None:
    config = NodeConfig(run_dir=str(run_dir))
    try:
        dense = load_dense(TINY, held(config.node).shards)
    finally:
        (SHM / arena_name(config.node, "weights", 0)).unlink()
    whole = load_checkpoint(TINY, SLOTS, dense=dense)
    assert whole is dense and [whole.slots(layer) for layer in (0, 9, 10)] == [(5, 2, 7)] * 2 + [()]
    assert_equal(whole, load_checkpoint(TINY, SLOTS))


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_are_rehearsed_before_the_turn_comes(
    run_dir: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed: list[Weights] = []
    monkeypatch.setattr(ahead, "rehearse", rehearsed.append)
    monkeypatch.setattr(ahead, "check_invariance", lambda: None)
    worker = WorkerConfig(threads=threads)
    config = NodeConfig(run_dir=str(run_dir), model_dir=str(TINY), worker=worker)
    held(config.node)
    try:
        made = ahead.make_ahead(config)
    finally:
        (SHM / arena_name(config.node, "weights", 0)).unlink()
    assert made.dense is not None
    assert [weights.slots(0) for weights in rehearsed] == [(0,)] * (threads == 1)


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_what_is_prepared_can_be_forked(run_dir: Path, threads: int) -> None:
    """No thread, no CUDA; and libraries that compute in several threads do so in the fork."""
    worker = WorkerConfig(threads=threads)
    config = NodeConfig(run_dir=str(run_dir), model_dir=str(TINY), worker=worker)
    config.save()
    held(config.node)
    spec = ProcessSpec("worker-next", "worker", "", -1, threads=threads)
    try:
        ran = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, str(run_dir)],
            env={**os.environ, **spec.environment()},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=90,
        )
    finally:
        (SHM / arena_name(config.node, "weights", 0)).unlink()
    assert ran.stdout.splitlines() == [f"False {threads == 1} True", "0"]
