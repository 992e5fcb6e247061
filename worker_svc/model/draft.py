"""The draft model: a block of tokens proposed in one forward, then corrected one by one (model.md D).

Its stages are ordinary layers whose context is not a stream of their own but one vector per
committed token, made from the backbone's taps and kept in the stages' window rings. The rows of a
block see each other in both directions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.kernels.matrix import matrix_rows
from phalanx.kernels.ops import (
    block_attention,
    collapse,
    decode_window,
    linear,
    matmul_rows,
    q8_roundtrip,
    rms_norm,
    rotate,
    window_records,
)
from phalanx.kernels.reference.attention import sink_attention
from phalanx.kernels.reference.rope import GrowingRope, RopeTable
from phalanx.kernels.reference.rows import pad_rows
from phalanx.kernels.registry import on_gpu
from phalanx.worker_svc.model.attention import output, project
from phalanx.worker_svc.model.caches import CachePools
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.head import OutputHead
from phalanx.worker_svc.model.layers import AttentionWeights, layer_weights
from phalanx.worker_svc.model.moe import Experts
from phalanx.worker_svc.model.step import LayerContext, Observer
from phalanx.worker_svc.model.sublayers import first_weights, run_layer

# (index within the block, logits float32 [S, vocab]) -> chosen token ids int64 [S].
Choose = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Drafts:
    """Proposals for S sequences, block_size b each.

    Attributes:
        tokens: int64 [S, b], for the positions after the anchor's.
        confidences: float32 [S, b], raw: sigmoid gives the chance that a draft passes if those
            before it did.
        logits: float32 [S, b, vocab], from which the tokens were chosen.
        base_logits: float32 [S, b, vocab], before the correction by the token before.
        hidden: bf16 values [S, b, D], the collapsed stream before the final norm.
        expert_picks: int64 [S * b, k] by layer (stage s is layer num_hidden_layers + s).
    """

    tokens: Tensor
    confidences: Tensor
    logits: Tensor
    base_logits: Tensor
    hidden: Tensor
    expert_picks: dict[int, Tensor]


@dataclass(kw_only=True)
class DraftContext(LayerContext):
    """The rows of a draft forward: `block` rows a sequence, one sequence after the other.

    Attributes:
        seqs: int64 [P].
        rope: tables at the rows' positions.
        slot_ids: int64 [S].
        ring_indices: int64 [S, W], the W positions before the block.
        ring_empty: bool [S, W], positions before the sequence's start.
        positions: int64 [P].
    """

    pools: CachePools
    block: int
    seqs: Tensor
    rope: RopeTable
    slot_ids: Tensor
    ring_indices: Tensor
    ring_empty: Tensor
    positions: Tensor


class Drafter:
    """The draft stages of one rank."""

    def __init__(
        self,
        weights: Weights,
        pools: CachePools,
        rope: GrowingRope,
        experts: Experts,
        head: OutputHead,
    ) -> None:
        config = weights.config
        depth, last = config.num_hidden_layers, config.draft_stages - 1
        self.config = config
        self._pools = pools
        self._rope = rope
        self._experts = experts
        self._stages = [layer_weights(weights, depth + s) for s in range(config.draft_stages)]
        self._embedding = weights["embed"]
        self._head = head
        self._main_proj = weights.take_matrix("mtp.0.main_proj")
        self._main_norm = weights.take("mtp.0.main_norm")
        self._norm = weights.take(f"mtp.{last}.norm")
        self._markov_embed = weights[f"mtp.{last}.markov_head.embed"]
        self._markov_head = weights.take_matrix(f"mtp.{last}.markov_head.head")
        self._confidence = weights.take_matrix(f"mtp.{last}.confidence_head.proj")

    def context_records(self, taps: Tensor, rope: RopeTable) -> dict[int, Tensor]:
        """What the stages will see of these rows: window records uint8 [P, record] by ring.

        Args:
            taps: bf16 values [P, taps * D].
            rope: tables at the rows' positions.
        """
        eps, rank = self.config.rms_norm_eps, self.config.q_lora_rank
        x = q8_roundtrip(rms_norm(linear(taps, self._main_proj), self._main_norm, eps))
        records = {}
        for stage, weights in enumerate(self._stages):
            kv = matmul_rows(x, matrix_rows(weights.attention.q_kv, rank), rounded=True)
            records[self.config.num_hidden_layers + stage] = window_records(
                kv, weights.attention.kv_norm, eps, rope
            )
        return records

    def propose(
        self,
        slot_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        anchors: npt.NDArray[np.int64],
        copy_keys: npt.NDArray[np.int64],
        choose: Choose,
        observer: Observer | None = None,
    ) -> Drafts:
        """Draft a block after each anchor. Changes no state.

        Args:
            slot_ids: [S], sequences whose steps are committed up to the anchor.
            positions: [S], the anchor's position: tokens committed so far.
            anchors: [S], the token sampled last.
            copy_keys: [S].
            choose: Picks token i of each sequence's block from corrected logits.
        """
        context = self._context(slot_ids, positions, copy_keys, observer)
        num_seqs, block = len(slot_ids), context.block
        device = self._embedding.device
        ids = torch.full((num_seqs, block), self.config.dspark_noise_token_id, device=device)
        ids[:, 0] = torch.from_numpy(anchors)
        embedded = pad_rows(self._embedding[ids.flatten()].float())
        h = embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre = first_weights(h)
        for stage, weights in enumerate(self._stages):
            layer = self.config.num_hidden_layers + stage
            h, pre = run_layer(context, _attend, weights, self._experts, layer, h, pre)
        hidden = collapse(h, pre)[: num_seqs * block]
        base = self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps))
        base, hidden = base.view(num_seqs, block, -1), hidden.view(num_seqs, block, -1)
        return self._correct(base, hidden, ids[:, 0], choose, context.expert_picks)

    def _correct(
        self,
        base: Tensor,
        hidden: Tensor,
        anchors: Tensor,
        choose: Choose,
        expert_picks: dict[int, Tensor],
    ) -> Drafts:
        """Choose the tokens in order: each one's logits depend on the token before it."""
        tokens, confidences, logits = [], [], []
        before = anchors
        for i in range(base.shape[1]):
            embedded = self._markov_embed[before].float()
            logits.append(base[:, i] + matmul_rows(embedded, self._markov_head))
            both = torch.cat((hidden[:, i], embedded), dim=-1)
            confidences.append(matmul_rows(both, self._confidence).squeeze(1))
            before = choose(i, logits[-1])
            tokens.append(before)
        return Drafts(
            tokens=torch.stack(tokens, dim=1),
            confidences=torch.stack(confidences, dim=1),
            logits=torch.stack(logits, dim=1),
            base_logits=base,
            hidden=hidden,
            expert_picks=expert_picks,
        )

    def _context(
        self,
        slot_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        copy_keys: npt.NDArray[np.int64],
        observer: Observer | None,
    ) -> DraftContext:
        block, window = self.config.dspark_block_size, self.config.sliding_window
        starts = torch.from_numpy(positions)
        seqs = pad_rows(torch.arange(len(slot_ids)).repeat_interleave(block))
        at = starts[seqs] + torch.arange(len(seqs)) % block
        before = starts.unsqueeze(1) + torch.arange(-window, 0)
        device = self._embedding.device
        return DraftContext(
            config=self.config,
            num_rows=len(slot_ids) * block,
            copy_keys=torch.from_numpy(copy_keys)[seqs] + at,
            observer=observer,
            pools=self._pools,
            block=block,
            seqs=seqs.to(device),
            rope=self._rope.at(at),
            slot_ids=torch.from_numpy(slot_ids).to(device),
            ring_indices=(before % self._pools.layout.ring_size).to(device),
            ring_empty=(before < 0).to(device),
            positions=at.to(device),
        )


def _attend(context: DraftContext, weights: AttentionWeights, layer: int, x: Tensor) -> Tensor:
    """The stages' attention: the ring's context, then the block's own rows, in both directions."""
    config, rope = context.config, context.rope
    queries, _, records = project(weights, config, rope, x)
    scale = config.head_dim**-0.5
    if on_gpu(x):
        return output(weights, config, _attend_records(context, weights, layer, queries, records))
    empty = context.ring_empty
    ring = context.pools.rings[context.slot_ids.unsqueeze(1), layer, context.ring_indices]
    # Weighed with zero, but a sequence that is gone may have left a broken vector there.
    ring = ring.masked_fill(empty.unsqueeze(2), 0)
    block = decode_window(records[: context.num_rows]).view(-1, context.block, config.head_dim)
    nothing = torch.zeros((len(x), context.block), dtype=torch.bool)
    parts = [
        (decode_window(ring)[context.seqs], empty[context.seqs]),
        (block[context.seqs], nothing),
    ]
    o = rotate(sink_attention(queries, parts, weights.sink, scale), rope.inverse())
    return output(weights, config, o)


def _attend_records(
    context: DraftContext, weights: AttentionWeights, layer: int, queries: Tensor, records: Tensor
) -> Tensor:
    """On a GPU: read the ring where it lies. The result is turned back; rows that fill a tile are 0."""
    config, rope, count = context.config, context.rope, context.num_rows
    o = torch.zeros_like(queries, dtype=torch.float32)
    seqs = context.seqs[:count]
    o[:count] = block_attention(
        queries[:count].contiguous(),
        records[:count],
        context.pools.rings[:, layer],
        context.slot_ids[seqs],
        context.positions[:count],
        torch.arange(count, device=seqs.device) % context.block,
        context.block,
        config.sliding_window,
        weights.sink,
        config.head_dim**-0.5,
        rope.cos[:count],
        rope.sin[:count],
    )
    return o
