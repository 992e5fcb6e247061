"""A checkpoint loads exactly, by slot; a defective one is refused with every defect named."""

import json
import resource
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.kernels.reference import quant
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.config import engram_table_rows
from phalanx.worker_svc.model.fields import ConfigError
from phalanx.worker_svc.model.shards import INDEX_NAME, CheckpointError
from phalanx.worker_svc.model.writer import write_checkpoint

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"


def stored() -> dict[str, Tensor]:
    """All tensors as the safetensors library reads them: an independent reader."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(TINY.glob("model-*.safetensors")):
        tensors |= load_file(file)
    return tensors


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_checkpoint(TINY)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy to damage."""
    for file in TINY.iterdir():
        if file.name != "expected.safetensors":
            shutil.copy(file, tmp_path)
    return tmp_path


def test_every_tensor_is_what_the_file_holds(weights: Weights) -> None:
    raw = stored()
    for name, tensor in raw.items():
        stem = name.removesuffix(".weight")
        if ".experts." in name or ".engram.embed" in name or name.endswith(".scale"):
            continue
        if tensor.dtype == quant.E4M3:
            expected = quant.dequant_fp8_block(tensor, raw[f"{stem}.scale"])
            assert weights.is_quantized(stem)
        else:
            expected = tensor
            assert not weights.is_quantized(stem)
        assert torch.equal(weights[stem], expected) and weights[stem].dtype == expected.dtype, name


def test_experts_sit_in_the_slots_they_were_asked_into() -> None:
    slots = [[3, 0, 3]] * 10 + [[2], []]
    loaded = load_checkpoint(TINY, slots)
    raw = stored()
    for layer, prefix, slot, expert in (
        (4, "layers.4", 1, 0),
        (4, "layers.4", 2, 3),
        (10, "mtp.0", 0, 2),
    ):
        w1, w3, w2 = loaded.expert(layer, slot)
        for name, matrix in (("w1", w1), ("w3", w3), ("w2", w2)):
            at = f"{prefix}.ffn.experts.{expert}.{name}"
            assert torch.equal(matrix, quant.dequant_fp4(raw[f"{at}.weight"], raw[f"{at}.scale"]))
    assert loaded.slots(4) == (3, 0, 3) and loaded.slots(11) == ()
    assert loaded.expert_stack(4)[0].shape == (3, 64, 128)


def test_an_expert_can_be_read_later_and_put_into_a_slot(weights: Weights) -> None:
    loaded = load_checkpoint(TINY, [[0]] * 12)
    loaded.put_expert(5, 0, 7, loaded.load_expert(5, 7))
    assert loaded.slots(5) == (7,)
    for mine, full in zip(loaded.expert(5, 0), weights.expert(5, 7), strict=True):
        assert torch.equal(mine, full)


def test_engram_rows_are_read_by_id(weights: Weights) -> None:
    raw = stored()
    at = "layers.4.engram.embed"
    table = quant.dequant_engram_rows(raw[f"{at}.weight"], raw[f"{at}.scale"])
    ids = torch.tensor([[0, 863, 5], [863, 1, 0]])
    rows = weights.engram_rows(4, ids)
    assert rows.dtype == torch.bfloat16 and torch.equal(rows, table[ids])


def test_the_token_map_is_the_references(weights: Weights) -> None:
    with safe_open(TINY / "expected.safetensors", "pt") as arrays:
        assert torch.equal(weights.token_map, arrays.get_tensor("engram.token_map"))


def test_without_dequantizing_quantized_tensors_stay_packed() -> None:
    loaded = load_checkpoint(TINY, dequantize=False, memory_limit_bytes=0)
    assert "layers.3.attn.wq_a" not in loaded and "layers.3.attn_norm" in loaded
    codes, scales = loaded.packed("layers.3.attn.wq_a")
    assert codes.dtype == quant.E4M3 and codes.shape == (64, 128)
    assert scales.dtype == torch.uint8 and scales.shape == (2, 4)


def test_progress_ends_at_the_total() -> None:
    calls: list[tuple[int, int]] = []
    load_checkpoint(TINY, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len({total for _, total in calls}) == 1


def test_too_little_memory_is_refused_before_loading() -> None:
    with pytest.raises(
        CheckpointError, match=r"needs 1\d\.\d MiB .* 8 experts .* 1\.0 MiB are available"
    ):
        load_checkpoint(TINY, memory_limit_bytes=1 << 20)


def test_slots_outside_the_model_are_refused() -> None:
    with pytest.raises(CheckpointError, match="slots for 3 layers; the model has 12"):
        load_checkpoint(TINY, [[0]] * 3)
    with pytest.raises(CheckpointError, match=r"mtp.0 has experts 0\.\.3; slots ask for \[4\]"):
        load_checkpoint(TINY, [[4]] * 12)


def edit_shard(directory: Path, number: int, change: Any) -> None:
    file = directory / f"model-0000{number}-of-00002.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_all_defects_are_named_at_once(copied: Path) -> None:
    index = json.loads((copied / INDEX_NAME).read_text())
    for name in ("norm.weight", "layers.0.attn.wq_a.scale"):
        del index["weight_map"][name]
    (copied / INDEX_NAME).write_text(json.dumps(index))

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["extra"] = torch.zeros(1)
        tensors["layers.0.attn.attn_sink"] = torch.zeros(5)
        tensors["layers.1.attn_norm.weight"] = torch.zeros(128)
        del tensors["layers.2.ffn_norm.weight"]

    edit_shard(copied, 1, change)
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(copied)
    message = str(refusal.value)
    assert "2 missing tensors (layers.0.attn.wq_a.scale, norm.weight)" in message
    assert "1 unexpected tensor (extra)" in message
    assert "layers.2.ffn_norm.weight" in message
    assert "layers.0.attn.attn_sink is F32 [5], expected F32 [4]" in message
    assert "layers.1.attn_norm.weight is F32 [128], expected BF16 [128]" in message


def test_many_defects_are_counted_not_all_listed(copied: Path) -> None:
    index = json.loads((copied / INDEX_NAME).read_text())
    index["weight_map"] = {"norm.weight": "model-00002-of-00002.safetensors"}
    (copied / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="935 missing tensors .* and 927 more"):
        load_checkpoint(copied)


def test_a_lost_or_cut_shard_is_refused(copied: Path) -> None:
    shard = copied / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    for cut in (content[:-1], content[:1000], b"", b"not safetensors at all"):
        shard.write_bytes(cut)
        with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors"):
            load_checkpoint(copied)
    shard.unlink()
    with pytest.raises(CheckpointError, match="lacks 1 shard file"):
        load_checkpoint(copied)


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": {"norm.weight": "../x"}}', "{"])
def test_a_broken_index_is_refused(copied: Path, index: str) -> None:
    (copied / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        load_checkpoint(copied)


def test_a_tokenizer_of_another_model_is_refused(copied: Path) -> None:
    file = copied / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {f"word{token}": token for token in ids.values()}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="gives 512 Engram ids; .* 206"):
        load_checkpoint(copied)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot read .*tokenizer.json"):
        load_checkpoint(copied)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot read"):
        load_checkpoint(tmp_path)


def test_what_is_written_is_read_back_exactly(weights: Weights, tmp_path: Path) -> None:
    def source(name: str) -> Tensor:
        if ".experts." in name:
            return quant.dequant_fp4(*weights.packed(name))
        if name.endswith("engram.embed"):
            codes, scales = weights.packed(name)
            return quant.dequant_engram_rows(codes, scales).float()
        return weights[name].float()

    config = json.loads((TINY / "config.json").read_text())
    target = tmp_path / "copy"
    write_checkpoint(target, config, source, TINY / "tokenizer.json", shard_bytes=1 << 20)
    assert len(list(target.glob("model-*-of-00004.safetensors"))) == 4
    written = load_checkpoint(target)
    for name in weights.names():
        assert torch.equal(written[name], weights[name]), name
    for layer in range(12):
        for mine, theirs in zip(
            written.expert_stack(layer), weights.expert_stack(layer), strict=True
        ):
            assert torch.equal(mine, theirs)
    ids = torch.arange(660)
    assert torch.equal(written.engram_rows(1, ids), weights.engram_rows(1, ids))


def test_a_writer_never_writes_over_files_or_wrong_shapes(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())
    tokenizer = TINY / "tokenizer.json"
    with pytest.raises(CheckpointError, match="embed.weight came out as"):
        write_checkpoint(tmp_path / "new", config, lambda name: torch.zeros(32, 32), tokenizer)
    with pytest.raises(CheckpointError, match="is not empty"):
        write_checkpoint(tmp_path / "new", config, lambda name: torch.zeros(1), tokenizer)


def test_one_file_without_an_index_is_a_checkpoint_too(copied: Path, weights: Weights) -> None:
    for file in list(copied.glob("model*")):
        file.unlink()
    save_file(stored(), copied / "model.safetensors")
    assert torch.equal(load_checkpoint(copied)["head"], weights["head"])


def test_a_table_larger_than_memory_is_only_read_by_row(copied: Path) -> None:
    """Both Engram tables become sparse files of 400 GB each; a row costs a page or two."""
    config = json.loads((copied / "config.json").read_text())
    vocab = 2_000_000_000
    rows = engram_table_rows(vocab, layers=2, columns=6)
    config["text_config"] |= {"engram_vocab_size": vocab, "engram_num_embeddings": rows}
    (copied / "config.json").write_text(json.dumps(config))
    tables = [f"layers.{layer}.engram.embed" for layer in (1, 4)]

    def drop_tables(tensors: dict[str, Tensor]) -> None:
        for table in tables:
            tensors.pop(f"{table}.weight", None)
            tensors.pop(f"{table}.scale", None)

    for number, table in enumerate(tables):
        edit_shard(copied, number + 1, drop_tables)
        append_sparse(copied, f"table-{number}.safetensors", table, rows[number])
    before = resident_bytes()
    loaded = load_checkpoint(copied)
    last = torch.tensor([0, rows[1] - 1])
    assert loaded.engram_rows(4, last).tolist() == [[0.0] * 32] * 2
    assert resident_bytes() - before < 100 << 20


def append_sparse(directory: Path, file: str, at: str, rows: int) -> None:
    """A shard with one Engram table of zeros that takes no room on disk."""
    header = json.dumps(
        {
            f"{at}.weight": {"dtype": "F8_E4M3", "shape": [rows, 32], "data_offsets": [0, rows * 32]},
            f"{at}.scale": {
                "dtype": "F8_E8M0", "shape": [rows, 1], "data_offsets": [rows * 32, rows * 33],
            },
        }
    ).encode()  # fmt: skip
    with (directory / file).open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + rows * 33)
    index = json.loads((directory / INDEX_NAME).read_text())
    index["weight_map"] |= {f"{at}.weight": file, f"{at}.scale": file}
    (directory / INDEX_NAME).write_text(json.dumps(index))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
