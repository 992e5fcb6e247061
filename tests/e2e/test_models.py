"""A checkpoint that cannot be served is refused at once, with exit code 2 and what is wrong with it."""

import json
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.node import PHALANX
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.tensors import tensor_specs

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

pytestmark = pytest.mark.process


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to damage."""
    directory = tmp_path / "model"
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns("expected*"))
    return directory


def refusal(model: Path) -> str:
    """What `phalanx up` says; it must end with 2, print no document and leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="phe2e") as name:
        run_dir = Path(name)
        command = [*PHALANX, "up", "--ranks", "1", "--model", str(model)]
        command += ["--detach", "--json", "--run-dir", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert list(Path("/dev/shm").glob(f"ph-{run_dir.name}-*")) == []
    return done.stderr


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_header(shard: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = shard.read_bytes()
    end = 8 + int(struct.unpack("<Q", content[:8])[0])
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])


def test_missing_extra_and_misshapen_tensors_are_named(model: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header["extra"] = header["embed.weight"]
        header["layers.0.attn.attn_sink"]["shape"] = [2, 2]

    edit_header(model / SHARD, change)
    edit_json(model / INDEX, lambda index: index["weight_map"].pop("norm.weight"))
    said = refusal(model)
    assert f"{model} does not match its config.json" in said
    assert "1 missing tensor (norm.weight)" in said
    assert "1 unexpected tensor (extra)" in said
    assert "layers.0.attn.attn_sink is F32 [2, 2], expected F32 [4]" in said


def test_a_model_larger_than_memory_is_refused_with_both_numbers(model: Path) -> None:
    """A query projection of 3.5e11 values in each of 12 layers; on disk nothing but a header."""

    def grow(config: dict[str, Any]) -> None:
        config["text_config"] |= {"num_attention_heads": 1 << 14, "q_lora_rank": 327680}

    edit_json(model / "config.json", grow)
    for file in model.glob("model*"):
        file.unlink()
    header, at = {}, 0
    for spec in tensor_specs(ModelConfig.load(model)).values():
        offsets = [at, at + spec.num_bytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        at += spec.num_bytes
    text = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + at)
    said = refusal(model)
    assert f"{model} needs 15.0 TiB of memory as float32 with 8 experts a layer" in said
    assert "GiB are available: use more ranks, or a smaller model" in said


def test_a_configuration_of_another_model_names_its_field(model: Path) -> None:
    edit_json(model / "config.json", lambda c: c["text_config"].update(compress_ratios=[0, 3]))
    said = refusal(model)
    assert (
        f"{model / 'config.json'}: compress_ratios has 2 entries; layers and draft stages are 12"
        in said
    )
