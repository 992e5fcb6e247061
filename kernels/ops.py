"""The operations of the forward pass, as the model calls them: each runs where its first argument lies.

On a CPU these are the functions of `kernels.reference`, unchanged. On a GPU the registry chooses.
What is not here is used as it stands in `kernels.reference`, on any device.
"""

from typing import Protocol

import torch
from torch import Tensor

from phalanx.kernels.reference import (
    compressor,
    engram,
    experts,
    hyper,
    indexer,
    paged,
    quant,
    rope,
    router,
    rows,
    stores,
)
from phalanx.kernels.reference import linear as products
from phalanx.kernels.reference import sample as sampler
from phalanx.kernels.reference import swiglu as activation
from phalanx.kernels.registry import DEEP_GEMM, FLASH_MLA, Operation


class ExpertPool(Protocol):
    """The expert slots of one layer, as `run_experts` reads them."""

    @property
    def is_cuda(self) -> bool: ...

    @property
    def num_slots(self) -> int: ...

    def put(
        self, slot: int, w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor, w2: Tensor, s2: Tensor
    ) -> None:
        """Fill a slot: codes int8 [out, in/2] and ue8m0 uint8 [out, in/32] of gate, up and down."""

    def holds(self, slot: int, part: int, codes: Tensor, scales: Tensor) -> bool:
        """Whether gate, up or down (part 0, 1 or 2) of a slot is, bit for bit, what `put` makes of these."""

    def flip_bit(self, slot: int) -> None:
        """Make one bit of a slot wrong: for faults on purpose."""

    def widen(self, num_slots: int) -> None:
        """Make room for more experts."""


matmul_rows = Operation("matmul", rows.matmul_rows, "linear:matmul_rows")
linear = Operation("FP8 linear", products.linear, "linear:linear", (DEEP_GEMM,))
grouped_linear = Operation("grouped linear", products.grouped_linear, "linear:grouped_linear")
run_experts: Operation[..., Tensor] = Operation(  # each takes a pool of its own kind
    "FP4 experts", experts.run_experts, "experts:run_experts", (DEEP_GEMM,)
)

sparse_attention = Operation(
    "sparse attention", paged.sparse_attention, "attention:sparse_attention", (FLASH_MLA,)
)
block_attention = Operation("draft attention", paged.block_attention, "attention:block_attention")
paged_scores = Operation("index scores", paged.paged_scores, "indexer:paged_scores", (DEEP_GEMM,))
select_top = Operation("index top-k", indexer.select_top, "topk:select_top")
candidate_blocks = Operation(
    "candidate blocks", indexer.candidate_blocks, "indexer:candidate_blocks"
)
candidate_scores = Operation(
    "index scores of candidates", paged.candidate_scores, "indexer:candidate_scores"
)
pool_pairs = Operation("compressor", compressor.pool_pairs, "compressor:pool_pairs")

mix = Operation("mHC mix", hyper.mix, "hyper:mix")
collapse = Operation("mHC collapse", hyper.collapse, "hyper:collapse")
expand = Operation("mHC expand", hyper.expand, "hyper:expand")
mean_copies = Operation("tap", hyper.mean_copies, "hyper:mean_copies")
collapse_norm = Operation(
    "mHC collapse and RMSNorm", hyper.collapse_norm, "sublayers:collapse_norm"
)
expand_collapse_norm = Operation(
    "mHC expand, collapse and RMSNorm", hyper.expand_collapse_norm, "sublayers:expand_collapse_norm"
)
rms_norm = Operation("RMSNorm", rows.rms_norm, "rows:rms_norm")
rotate = Operation("RoPE", rope.rotate, "rows:rotate")
swiglu = Operation("SwiGLU", activation.swiglu, "rows:swiglu")
swiglu_q8 = Operation("SwiGLU and Q8", activation.swiglu_q8, "rows:swiglu_q8")
add_picks = Operation("sum of experts", experts.add_picks, "rows:add_picks")
route = Operation("gate", router.route, "router:route")
gather = Operation("Engram gather", engram.gather, "engram:gather", place=2)
gate_add_value = Operation("Engram gate and value", engram.gate_add_value, "engram:gate_add_value")
hash_rows = Operation("Engram hash", engram.hash_rows, "engram:hash_rows")

latent_and_window = Operation(
    "latent and window record", stores.latent_and_window, "stores:latent_and_window"
)
window_records = Operation("window records", stores.window_records, "stores:window_records")
store_compressed = Operation("stored entries", stores.store_compressed, "stores:store_compressed")
store_index_keys = Operation(
    "stored index keys", stores.store_index_keys, "stores:store_index_keys"
)
store_window = Operation("kept windows", stores.store_window, "stores:store_window", place=1)
store_pairs = Operation("kept pairs", stores.store_pairs, "stores:store_pairs", place=1)

q8_roundtrip = Operation("Q8", quant.q8_roundtrip, "quant:q8_roundtrip")
qf4_idx_roundtrip = Operation(
    "QF4 of index queries", quant.qf4_idx_roundtrip, "quant:qf4_idx_roundtrip"
)
decode_window = Operation("window vector", quant.decode_window, "quant:decode_window")
decode_compressed = Operation("entry vector", quant.decode_compressed, "quant:decode_compressed")
decode_index_key = Operation("index key", quant.decode_index_key, "quant:decode_index_key")

sample = Operation("sampler", sampler.sample, "sample:sample")


def expert_pool(num_slots: int, hidden: int, inter: int, device: torch.device) -> ExpertPool:
    """Slots for the experts of one layer on a GPU, in the form that `run_experts` reads there."""
    if run_experts.has_kernel():
        from phalanx.kernels.triton.expert_pool import ExpertPool as PackedPool

        return PackedPool.empty(num_slots, hidden, inter, device)
    return experts.ExpertPool.empty(num_slots, hidden, inter, device)
