"""A checkpoint with every dimension of the full model and one layer of each kind, and a run of it.

As a program, `python full_dims.py DIR`, it loads DIR, computes a prompt, a decode row and a draft, and
prints what it saw as JSON: in a process of its own, whose peak memory is the run's alone.
"""

import json
import math
import os
import resource
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, models
from torch import Tensor

from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import LocalExperts
from phalanx.worker_svc.model.shards import INDEX_NAME
from phalanx.worker_svc.model.tensors import TensorSpec, tensor_specs

TABLE_FILE: Final = "engram-table.safetensors"
# Nine prompt tokens and one to decode.
TOKENS: Final = (0, 70001, 5, 129279, 99091, 99092, 41234, 128803, 17, 88888)
_FULL_CONFIG: Final = Path(__file__).with_name("full_config.json")
_COMPRESSED_IDS: Final = 99092
_SHAPE: Final[dict[str, Any]] = {
    "num_hidden_layers": 6,
    # A window alone; an owner of pairs with Engram, and its reader; the candidate source, a layer
    # that chooses again, and a reader of its choice. Then one draft stage.
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [384006168],
    "dspark_target_layer_ids": [3, 4, 5],
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 8,
    "dspark_n_routed_experts": 4,
}

# A window alone; an owner of pairs with Engram; the candidate source; a layer that chooses again. All experts.
FOUR_LAYERS: Final[dict[str, Any]] = _SHAPE | {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 1, 1, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "dspark_target_layer_ids": [1, 2, 3],
    "n_routed_experts": 384,
}

# --- writing ----------------------------------------------------------------------------------------

_POOL: Final = (1 << 22) + 12289  # values drawn once and repeated; no multiple of any row
_GAINS: Final = {"wq_b": 2.5, "wo_b": 0.08, "w2": 0.06, "wgate": 40.0}
_NORMS: Final = {"attn_norm": 0.025, "ffn_norm": 0.5, "kv_norm": 0.4, "k_norm": 0.5}
_E4M3_STD: Final = 64.0  # of the codes drawn; scales bring it to the wanted size
_E2M1_RMS: Final = 2.93  # of uniformly drawn codes


def config_json(shape: dict[str, Any] = _SHAPE) -> dict[str, Any]:
    """The full model's config.json, cut to one layer of each kind, without the vision tower."""
    config: dict[str, Any] = json.loads(_FULL_CONFIG.read_text())
    del config["vision_config"]
    config["text_config"] |= shape
    return config


def write(directory: Path, seed: int, shape: dict[str, Any] = _SHAPE) -> None:
    """Write the checkpoint: about 5 GB, and an Engram table of 101 GB that takes no room.

    Only the table's rows that TOKENS reach are not zero.
    """
    config = ModelConfig.parse(config_json(shape))
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config_json(shape)))
    _tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))
    source = _Source(seed)
    files: dict[str, list[TensorSpec]] = {}
    for spec in tensor_specs(config).values():
        table = spec.part == "engram_table"
        part = ".".join(spec.name.split(".")[:2]) if spec.name[0] in "lm" else "rest"
        files.setdefault(TABLE_FILE if table else f"{part}.safetensors", []).append(spec)
    weight_map: dict[str, str] = {}
    for file, specs in files.items():
        # Large elements first, so that every tensor is aligned.
        specs.sort(key=lambda spec: ("F32", "BF16", "F8_E4M3", "I8", "F8_E8M0").index(spec.dtype))
        weight_map |= {spec.name: file for spec in specs}
        with (directory / file).open("wb") as out:
            offsets = _write_header(out, specs)
            if file == TABLE_FILE:
                _write_table(out.fileno(), config, offsets, source)
            else:
                for spec in specs:
                    for piece in source.pieces(spec):
                        out.write(piece)
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Words; those past the compressed ids differ from earlier ones by case alone."""
    words = [
        f"t{i}" if i < _COMPRESSED_IDS else f"T{i - _COMPRESSED_IDS}" for i in range(vocab_size)
    ]
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="t2"))


def _write_header(out: Any, specs: Iterable[TensorSpec]) -> dict[str, int]:
    """Write a safetensors header; where in the file each tensor's bytes start."""
    header, at = {}, 0
    for spec in specs:
        end = at + spec.num_bytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)
    out.write(struct.pack("<Q", len(text)) + text)
    return {name: 8 + len(text) + entry["data_offsets"][0] for name, entry in header.items()}


class _Source:
    """Bytes of any tensor: one pool of normal values, read from a place that the name decides."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._normal = rng.standard_normal(_POOL, dtype=np.float32)
        self._fp4 = rng.integers(0, 256, _POOL, dtype=np.uint8)
        codes = torch.from_numpy(self._normal * _E4M3_STD).clamp(-448, 448)
        self.fp8 = codes.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def pieces(self, spec: TensorSpec) -> Iterable[memoryview]:
        """The tensor's bytes, in pieces."""
        count = math.prod(spec.shape)
        start = zlib.crc32(spec.name.encode()) % _POOL
        while count:
            stop = min(start + count, _POOL)
            yield memoryview(np.ascontiguousarray(self._values(spec, start, stop))).cast("B")
            count, start = count - (stop - start), 0

    def _values(self, spec: TensorSpec, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements of the tensor as they are stored, from a stretch of the pool."""
        leaf = spec.name.removesuffix(".weight").removesuffix(".scale").rsplit(".", 1)[-1]
        gain = _GAINS.get(leaf, 1.5)
        if spec.dtype == "F8_E4M3":
            return self.fp8[start:stop]
        if spec.dtype == "I8":
            return self._fp4[start:stop]
        if spec.dtype == "F8_E8M0":
            size = _E2M1_RMS if ".experts." in spec.name else _E4M3_STD
            exponent = round(math.log2(gain / math.sqrt(spec.shape[-1] * 32) / size))
            return np.full(stop - start, 127 + exponent, np.uint8)
        std = gain / math.sqrt(spec.shape[-1])
        values = self._plain(spec.name, leaf, std, self._normal[start:stop])
        if spec.dtype == "F32":
            return values
        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy()

    def _plain(
        self, name: str, leaf: str, std: float, drawn: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        if leaf.endswith("_scale"):
            return np.full(drawn.shape, 0.5, np.float32)
        if "norm" in leaf or name == "norm.weight":
            return np.float32(_NORMS.get(leaf, 1.0)) * (1 + np.float32(0.1) * drawn)
        if leaf in ("attn_sink", "q_weight", "k_weight") or leaf.endswith("_base"):
            return drawn
        if name == "embed.weight":
            std = 0.12
        return drawn * np.float32(0.1 if leaf.startswith("bias") else std)


def table_rows(config: ModelConfig, tokens: Iterable[int]) -> npt.NDArray[np.int64]:
    """The Engram rows that a sequence reads, int64 [T, 24], from their definition (model.md C.3)."""
    units = [token if token < _COMPRESSED_IDS else token - _COMPRESSED_IDS for token in tokens]
    (multipliers,) = config.engram_multipliers.tolist()
    primes, offsets = config.engram_primes[0], config.engram_offsets[0]
    rows = np.empty((len(units), config.engram_columns), np.int64)
    for at in range(len(units)):
        mixed = units[at] * multipliers[0]
        for back in (1, 2, 3):
            mixed ^= (units[at - back] if back <= at else 2) * multipliers[back]
            for head in range(8):
                column = (back - 1) * 8 + head
                rows[at, column] = mixed % int(primes[back - 1, head]) + offsets[column]
    return rows


def _write_table(
    descriptor: int, config: ModelConfig, offsets: dict[str, int], source: _Source
) -> None:
    codes, scales = (offsets[f"layers.1.engram.embed.{name}"] for name in ("weight", "scale"))
    rows, dim = config.engram_num_embeddings[0], config.engram_head_dim
    os.ftruncate(descriptor, scales + rows * dim // 32)
    for row in np.unique(table_rows(config, TOKENS)).tolist():
        at = row % (_POOL - dim)
        os.pwrite(descriptor, source.fp8[at : at + dim].tobytes(), codes + row * dim)
        os.pwrite(descriptor, bytes([127 - 10] * (dim // 32)), scales + row * dim // 32)


# --- running ----------------------------------------------------------------------------------------


class _Watcher:
    """Collects what the test asks about, by name and layer."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def __call__(self, name: str, layer: int, value: Tensor) -> None:
        if name in ("engram_ids", "engram_gate", "topk", "candidates", "router_experts", "h_out"):
            self.seen[f"{name}.{layer}"] = value.clone()


def run(directory: Path) -> dict[str, Any]:
    """A prompt, a decode row and a draft; and the same tokens in one step, which must agree."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        seconds[name] = round(time.perf_counter() - started, 2)
        return result

    weights = timed("load", lambda: load_checkpoint(directory))
    pools = CachePools(CacheLayout(weights.config), num_blocks=3, num_slots=2)
    experts = LocalExperts(weights)
    model: Model = timed("build", lambda: Model(weights, pools, experts, experts))
    prompt, token = TOKENS[:-1], TOKENS[-1:]
    watcher = _Watcher()

    def step(rows: SequenceRows, observer: _Watcher | None = None) -> Tensor:
        pending = model.forward(StepBatch.of([rows]), observer)
        pending.commit([len(rows.token_ids)])
        return pending.logits

    first = timed("prompt", lambda: step(SequenceRows(0, 0, prompt, [1], True), watcher))
    last = timed("decode", lambda: step(SequenceRows(0, 9, token, [1], True)))
    whole = timed("whole", lambda: step(SequenceRows(1, 0, TOKENS, [2], [8, 9])))
    assert model.drafter is not None
    drafter, best = model.drafter, last.argmax(dim=1).numpy()
    slot, at = np.array([0]), np.array([10])
    drafts = timed(
        "draft",
        lambda: drafter.propose(slot, at, best, slot, lambda _, logits: logits.argmax(dim=1)),
    )
    seen = watcher.seen
    return {
        "seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "logits": list(last.shape),
        "spread": float(last.std()),
        "same_as_one_step": torch.equal(torch.cat((first, last)), whole),
        "drafts": drafts.tokens[0].tolist(),
        "drafts_finite": bool(
            drafts.logits.isfinite().all() and drafts.confidences.isfinite().all()
        ),
        "engram_ids": seen["engram_ids.1"][:9].tolist(),
        "engram_gates": seen["engram_gate.1"][:9].flatten().tolist(),
        "chosen": {layer: seen[f"topk.{layer}"][8, :10].tolist() for layer in (1, 3, 4)},
        "candidates": int(seen["candidates.3"][8].sum()),
        "experts_used": [seen[f"router_experts.{i}"][:9].unique().numel() for i in range(6)],
        "stream_rms": [float(seen[f"h_out.{i}"][:9].square().mean().sqrt()) for i in range(6)],
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
