"""A copy of the weights in shared memory is the checkpoint, bit for bit, or it is not taken."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.protocol.arena import HEADER_BYTES, SHM, arena_name
from phalanx.protocol.errors import ArenaError
from phalanx.worker_svc import host_weights
from phalanx.worker_svc.host_weights import HostWeights, NoRoom, fill
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.weights_hash import weights_hash

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"


@pytest.fixture
def node() -> Iterator[str]:
    name = f"hw{os.getpid()}"
    yield name
    (SHM / arena_name(name, "weights", 0)).unlink(missing_ok=True)


def create(node: str) -> int:
    path = SHM / arena_name(node, "weights", 0)
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)


def held(node: str, model: Path = TINY) -> HostWeights:
    fd = create(node)
    taken = fill(fd, model)
    assert taken == os.fstat(fd).st_size
    os.close(fd)
    found = HostWeights.find(node, model)
    assert found is not None
    return found


def assert_equal(one: Weights, other: Weights) -> None:
    assert one.names() == other.names()
    for name in one.names():
        assert torch.equal(one[name], other[name]), name
    for layer in range(one.config.num_hidden_layers):
        for mine, theirs in zip(one.expert_stack(layer), other.expert_stack(layer), strict=True):
            assert torch.equal(mine, theirs), layer


def test_a_rank_loads_the_same_from_it_without_the_files(node: str, tmp_path: Path) -> None:
    found = held(node)
    assert found.weights == weights_hash(TINY)
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        shutil.copy(TINY / name, tmp_path)
    assert_equal(load_checkpoint(TINY), load_checkpoint(tmp_path, held=found.shards))


def test_a_survivor_reads_missing_experts_from_it(node: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(TINY, tmp_path / "model"))
    weights, whole = load_checkpoint(model), load_checkpoint(TINY)
    weights.adopt(held(node, model).shards)
    for shard in model.glob("*.safetensors"):
        shard.write_bytes(b"")  # a mapped file that is cut would be a SIGBUS
    for mine, theirs in zip(weights.load_expert(3, 1) or (), whole.expert(3, 1), strict=True):
        assert torch.equal(mine, theirs)


def test_whoever_writes_to_it_writes_to_a_copy_of_his_own(node: str) -> None:
    mine, theirs = held(node), HostWeights.find(node, TINY)
    assert theirs is not None
    (name, *_) = mine.shards
    before = bytes(theirs.shards[name][:64])
    mine.shards[name][:64] = bytes(64)
    assert bytes(theirs.shards[name][:64]) == before != bytes(64)


def test_one_that_was_cut_short_is_not_taken(node: str) -> None:
    """Whatever was written, without the header it is nothing; the header is written last."""
    held(node)
    path = SHM / arena_name(node, "weights", 0)
    with path.open("r+b") as file:
        file.write(bytes(4))  # no magic yet
    assert HostWeights.find(node, TINY) is None
    path.write_bytes(b"")
    assert HostWeights.find(node, TINY) is None
    path.unlink()
    assert HostWeights.find(node, TINY) is None


def test_a_filler_that_is_killed_leaves_nothing_that_counts(node: str) -> None:
    """At the worst moment: everything is copied, and not yet compared."""
    program = (
        "import os, time; from pathlib import Path; from phalanx.worker_svc import host_weights as h\n"
        "h._copy = lambda path, into, right=h._copy: (right(path, into), print(flush=True),"
        " time.sleep(60))\n"
        f"h.fill({{}}, Path({str(TINY)!r}))"
    )
    fd = create(node)
    command = [sys.executable, "-P", "-c", program.format(fd)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(fd,))
    assert child.stdout is not None and child.stdout.readline() == b"\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert os.fstat(fd).st_size > HEADER_BYTES
    assert HostWeights.find(node, TINY) is None
    os.close(fd)


def test_a_wrong_copy_is_not_committed(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rotten(data: bytes | memoryview = b"") -> object:
        """What is read back is not what was written."""
        return right(bytes(data)[:-1] + b"?") if data else right()

    right = hashlib.sha256
    monkeypatch.setattr(host_weights, "hashlib", SimpleNamespace(sha256=rotten))
    fd = create(node)
    with pytest.raises(ArenaError, match="is not what was read"):
        fill(fd, TINY)
    monkeypatch.undo()
    os.close(fd)
    assert HostWeights.find(node, TINY) is None


def test_another_checkpoint_is_not_taken(node: str, tmp_path: Path) -> None:
    held(node)
    other = Path(shutil.copytree(TINY, tmp_path / "other"))
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    assert HostWeights.find(node, other) is None


def test_what_does_not_fit_is_refused_with_the_numbers(
    node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_weights, "available_bytes", lambda: 1 << 20)
    fd = create(node)
    with pytest.raises(NoRoom, match=r"needs .* MiB, 1.0 MiB are free"):
        fill(fd, TINY)
    assert os.fstat(fd).st_size == 0
    os.close(fd)
    assert HostWeights.find(node, TINY) is None


def test_hash_is_the_same_from_files_and_from_memory(node: str, tmp_path: Path) -> None:
    large = Path(shutil.copytree(TINY, tmp_path / "large"))
    shards = held(node).shards
    assert weights_hash(large) == weights_hash(large, shards)


def test_hash_of_samples_is_the_same_too(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.worker_svc.model.weights_hash._WHOLE_BYTES", 0)
    assert weights_hash(TINY) == weights_hash(TINY, held(node).shards)
