"""The random-tiny model is the same wherever it is built, is built once, and uses all its parts."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.worker_svc.model import random_tiny
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import LocalExperts
from phalanx.worker_svc.model.random_tiny import ensure_random_tiny, resolve_model
from phalanx.worker_svc.model.shards import INDEX_NAME, CheckpointError


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "random-tiny"
    random_tiny.build_random_tiny(directory)
    return directory


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "phalanx"


def digests(directory: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()
    }


def test_two_builds_are_the_same_bytes(built: Path, tmp_path: Path) -> None:
    random_tiny.build_random_tiny(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(built)


def test_it_has_room_and_the_packaged_vocabulary(built: Path) -> None:
    config = ModelConfig.load(built)
    special = json.loads((random_tiny.TOKENIZER_DIR / "special_ids.json").read_bytes())
    assert config.max_positions >= 4096
    assert config.vocab_size == special["vocab_size"]
    assert config.dspark_noise_token_id == special["dspark_noise_token_id"]
    packaged = (random_tiny.TOKENIZER_DIR / "tokenizer.json").read_bytes()
    assert (built / "tokenizer.json").read_bytes() == packaged


def test_it_is_built_once_and_found_again(own_cache: Path) -> None:
    first = ensure_random_tiny()
    stamp = (first / INDEX_NAME).stat().st_mtime_ns
    assert resolve_model("tiny") == resolve_model("random-tiny") == first
    assert (first / INDEX_NAME).stat().st_mtime_ns == stamp
    assert [item for item in own_cache.iterdir() if item.name.startswith(".")] == []


def test_half_a_model_in_the_cache_is_replaced(own_cache: Path) -> None:
    first = ensure_random_tiny()
    (first / INDEX_NAME).unlink()
    assert ensure_random_tiny() == first
    load_checkpoint(first)


def test_builders_at_the_same_time_agree(own_cache: Path) -> None:
    command = [sys.executable, "-P", "-m", "phalanx.worker_svc.model.random_tiny"]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {builder.communicate(timeout=120)[0].strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0]
    [directory] = found
    load_checkpoint(Path(directory))
    assert [item for item in own_cache.iterdir() if item.name.startswith(".")] == []


def test_finding_it_needs_no_torch(own_cache: Path) -> None:
    ensure_random_tiny()
    code = (
        "import sys; from phalanx.worker_svc.model.random_tiny import resolve_model;"
        "print(resolve_model('tiny')); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert Path(done.stdout.strip()).parent == own_cache


def test_a_directory_is_itself_and_anything_else_is_refused(built: Path, tmp_path: Path) -> None:
    assert resolve_model(str(built)) == built.resolve()
    with pytest.raises(
        CheckpointError, match=r"'gpt': .*give a checkpoint directory, or one of tiny"
    ):
        resolve_model("gpt")
    with pytest.raises(CheckpointError, match="no .*config.json"):
        resolve_model(str(tmp_path))


def test_the_command_prints_the_directory(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["random_tiny", str(built)])
    random_tiny.main()
    assert capsys.readouterr().out == f"{built.resolve()}\n"
    monkeypatch.setattr("sys.argv", ["random_tiny", "--out", str(built)])
    with pytest.raises(SystemExit) as end:
        random_tiny.main()
    assert end.value.code == 2 and "is not empty" in capsys.readouterr().err


def test_it_says_varied_things_and_no_part_is_dead(built: Path) -> None:
    torch.set_num_threads(1)
    weights = load_checkpoint(built)
    config = weights.config
    pools = CachePools(CacheLayout(config), num_blocks=4, num_slots=1, history_len=256)
    model = Model(weights, pools, LocalExperts(weights))
    seen: dict[tuple[str, int], list[torch.Tensor]] = {}

    def observe(name: str, layer: int, value: torch.Tensor) -> None:
        seen.setdefault((name, layer), []).append(value[: len(pending)])  # without padding rows

    prompt = torch.randint(3, 4000, (120,), generator=torch.Generator().manual_seed(0)).tolist()
    said, position, pending = [], 0, prompt
    for _ in range(48):
        rows = SequenceRows(0, position, pending, [1, 2], logits=True)
        step = model.forward(StepBatch.of([rows]), observe)
        step.commit([len(pending)])
        position += len(pending)
        pending = [int(step.logits.argmax())]
        said += pending
    assert len(set(said)) > 36  # measured 45
    assert not set(said) & set(range(4066, 4096))  # no special token
    for layer in range(config.num_hidden_layers):
        picks = torch.cat([value.flatten() for value in seen["router_experts", layer]])
        share = torch.bincount(picks, minlength=8) / len(picks)
        assert share.min() > 0.02 and share.max() < 0.4, layer
    for layer in config.engram_layer_ids:
        gates = torch.cat(seen["engram_gate", layer])
        assert gates.min() < 0.2 and gates.max() > 0.8
    for layer in config.index_source_layer_ids:
        chosen = seen["topk", layer][0][119]
        assert chosen.min() >= 0 and (chosen.diff() > 1).any()  # not just one run of neighbours
