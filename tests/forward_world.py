"""A small world for forward-pass tests: models of several shapes, and sequences stepped in any way."""

import atexit
import json
import os
import random
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig, engram_table_rows
from phalanx.worker_svc.model.model import Model, PendingStep
from phalanx.worker_svc.model.moe import Experts, LocalExperts
from phalanx.worker_svc.model.random_weights import RandomWeights
from phalanx.worker_svc.model.truncation import OFF, Truncation
from phalanx.worker_svc.model.writer import write_checkpoint

TINY = Path(__file__).parent / "golden" / "tiny-a"
# The same tests run on a GPU: PHALANX_TEST_DEVICE=cuda.
DEVICE = torch.device(os.environ.get("PHALANX_TEST_DEVICE", "cpu"))

# Changes to tiny-a's text_config. Together they have odd and even counts of everything that is
# summed over, windows and choices shorter and longer than a tile, and a clamp that bites.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny-a": {},
    "wide": {
        "hidden_size": 160,
        "num_attention_heads": 8,
        "head_dim": 96,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 96,
        "o_groups": 4,
        "sliding_window": 40,
        "index_n_heads": 3,
        "index_topk": 24,
        "candidate_topk_blocks": 5,
        "candidate_block_size": 8,
        "n_routed_experts": 10,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 96,
        "swiglu_limit": 0.5,
        "max_position_embeddings": 1024,
    },
    "short": {
        "num_attention_heads": 3,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 3,
        "index_head_dim": 32,
        "index_n_heads": 1,
        "index_topk": 5,
        "sliding_window": 5,
        "hc_mult": 3,
        "num_hidden_layers": 6,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 2,
        "engram_layer_ids": [0, 1],
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [3, 4, 5],
    },
}
if DEVICE.type == "cuda":  # the kernels are made for models of one kind: `worker_svc/gpu_shapes.py`
    SHAPES = {"tiny-a": SHAPES["tiny-a"]}


@cache
def weights_of(shape: str) -> Weights:
    """The weights of a shape: tiny-a's own, or random ones made for the run."""
    if not SHAPES[shape]:
        return load_checkpoint(TINY, device=DEVICE)
    config = json.loads((TINY / "config.json").read_text())
    text = config["text_config"] | SHAPES[shape]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    text["engram_num_embeddings"] = engram_table_rows(
        text["engram_vocab_size"], layers=len(text["engram_layer_ids"]), columns=columns
    )
    config["text_config"] = text
    random_weights = RandomWeights(ModelConfig.parse(config), 7, [True] * text["vocab_size"])
    scratch = mkdtemp(prefix="phalanx-test-")  # mapped by the weights until the run ends
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    directory = Path(scratch) / shape
    write_checkpoint(
        directory,
        config,
        lambda name: torch.from_numpy(random_weights(name)),
        TINY / "tokenizer.json",
    )
    return load_checkpoint(directory, device=DEVICE)


class World:
    """A model with caches, and block tables that are shuffled so that no two runs look alike."""

    def __init__(
        self,
        shape: str,
        *,
        num_slots: int = 6,
        seed: int = 0,
        experts: Experts | None = None,
        draft_experts: Experts | None = None,
        truncation: Truncation = OFF,
        max_len: int = 256,
    ) -> None:
        weights = weights_of(shape)
        self.random = random.Random(seed)
        per_slot = -(-max_len // BLOCK_TOKENS)
        num_blocks = 1 + num_slots * per_slot
        self.pools = CachePools(CacheLayout(weights.config), num_blocks, num_slots, device=DEVICE)
        # Whatever a fresh slot or block holds must not matter; the null block is all zeros.
        generator = torch.Generator().manual_seed(seed)
        for pool in (self.pools.blocks[1:], self.pools.slots):
            pool.copy_(torch.randint(0, 120, pool.shape, generator=generator, dtype=torch.uint8))
        self.model = Model(
            weights, self.pools, experts or LocalExperts(weights), draft_experts, truncation
        )
        self.config = weights.config
        ids = list(range(1, num_blocks))
        self.random.shuffle(ids)
        self.blocks = [ids[slot * per_slot : (slot + 1) * per_slot] for slot in range(num_slots)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.config.vocab_size) for _ in range(count)]

    def rows(self, slot: int, start: int, ids: Sequence[int]) -> SequenceRows:
        """Rows with logits everywhere."""
        return SequenceRows(slot, start, ids, self.blocks[slot], range(len(ids)), slot)

    def forward(self, *sequences: SequenceRows) -> PendingStep:
        return self.model.forward(StepBatch.of(sequences))

    def run(self, slot: int, start: int, ids: Sequence[int]) -> Tensor:
        """One step of one sequence, kept whole; the logits of its rows."""
        pending = self.forward(self.rows(slot, start, ids))
        pending.commit([len(ids)])
        return pending.logits


def alone(shape: str, ids: Sequence[int]) -> Tensor:
    """Logits at all positions of a fresh sequence, computed in one step with nothing beside it."""
    return World(shape, num_slots=1, seed=99).run(0, 0, ids)
