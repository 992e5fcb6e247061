"""The backbone: one ragged forward for prompt chunks, decode rows and verification rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.reference.hyper import collapse, mean_copies
from phalanx.kernels.reference.rope import GrowingRope, frequencies, stretch
from phalanx.kernels.reference.rows import rms_norm
from phalanx.worker_svc.model.attention import attention
from phalanx.worker_svc.model.batch import StepBatch, step_rows
from phalanx.worker_svc.model.caches import CachePools
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.draft import Drafter
from phalanx.worker_svc.model.engram import Engram
from phalanx.worker_svc.model.head import OutputHead
from phalanx.worker_svc.model.layers import layer_weights
from phalanx.worker_svc.model.moe import Experts
from phalanx.worker_svc.model.step import Observer, Ropes, Step
from phalanx.worker_svc.model.sublayers import run_layer

_POSITION_PRIME = 1_000_003  # spreads the positions of one sequence over an expert's copies


@dataclass(frozen=True)
class PendingStep:
    """A computed step that has not changed any slot yet. Dropping it abandons the step.

    Attributes:
        logits: float32 [L, vocab], in the order of the batch's logit_rows.
        expert_picks: int64 [R, k] by layer, logical experts, for load statistics.
    """

    logits: Tensor
    expert_picks: dict[int, Tensor]
    _step: Step

    def commit(self, num_accepted: Sequence[int]) -> None:
        """Keep the first num_accepted rows of each sequence; 0 leaves a sequence as it was."""
        self._step.commit(torch.tensor(num_accepted, dtype=torch.int64))


class Model:
    """Weights, caches and experts of one rank, ready to step.

    Args:
        weights: dequantized weights.
        pools: this rank's caches.
        experts: where routed experts run.
        draft_experts: where those of the draft stages run; None to do without drafts.

    Attributes:
        drafter: proposes tokens, if there are draft stages and experts for them.
    """

    def __init__(
        self,
        weights: Weights,
        pools: CachePools,
        experts: Experts,
        draft_experts: Experts | None = None,
    ) -> None:
        config = weights.config
        self.config = config
        self.pools = pools
        self.experts = experts
        self.embedding = weights["embed"]
        self.head = OutputHead(weights["head"])
        self.final_norm = weights.take("norm")
        self.layers = [layer_weights(weights, i) for i in range(config.num_hidden_layers)]
        self.engram = Engram(weights)
        self._max_len = pools.history.shape[1]
        self._plain_rope, self._yarn_rope = rope_tables(config)
        self.drafter: Drafter | None = None
        if draft_experts is not None and config.draft_stages > 0:
            self.drafter = Drafter(weights, pools, self._plain_rope, draft_experts, self.head)

    def begin(self, batch: StepBatch, observer: Observer | None = None) -> Step:
        """Check a batch, note its tokens in the history, and set up the step.

        Raises:
            ValueError: the batch cannot be computed; nothing was changed.
        """
        batch.check(self.config, self._max_len)
        rows = step_rows(batch, self.config, self.pools.layout.ring_size)
        real = slice(0, rows.num_rows)
        # By position: doing the step again writes the same ids.
        history = self.pools.history
        history[rows.slots[real], rows.positions[real]] = rows.token_ids[real].to(torch.int32)
        yarn = self._yarn_rope
        ropes = Ropes(self._plain_rope.at(rows.positions), yarn.at(rows.positions), yarn)
        keys = torch.from_numpy(batch.copy_keys)[rows.seqs] + rows.positions * _POSITION_PRIME
        return Step(
            config=self.config,
            num_rows=rows.num_rows,
            copy_keys=keys,
            observer=observer,
            rows=rows,
            pools=self.pools,
            ropes=ropes,
        )

    def forward(self, batch: StepBatch, observer: Observer | None = None) -> PendingStep:
        """Compute one step.

        Writes block records and token history, both by position; window rings and waiting tokens
        change only in `PendingStep.commit`.
        """
        step = self.begin(batch, observer)
        config, rows = self.config, step.rows
        h, pre = self.embed(rows.token_ids)
        units = self.engram.units(step)
        taps = []
        for layer in range(config.num_hidden_layers):
            weights = self.layers[layer]
            if weights.engram is not None:
                h = self.engram.apply(step, weights.engram, layer, units, h)
            if layer in config.dspark_target_layer_ids:
                taps.append(mean_copies(h))
                step.note("tap", layer, taps[-1])
            h, pre = run_layer(step, attention, weights, self.experts, layer, h, pre)
        final = collapse(h, pre)
        step.note("final_hidden", config.num_hidden_layers, final)
        logits = self.logits(final[torch.from_numpy(batch.logit_rows)])
        if self.drafter is not None:
            step.window_records |= self.drafter.context_records(
                torch.cat(taps, dim=-1), step.ropes.plain
            )
        return PendingStep(logits, step.expert_picks, step)

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Equal copies of the embeddings [P, n, D], and the first layer's weights [P, n]."""
        h = self.embedding[token_ids].float().unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(h.shape[:2])
        pre[:, 0] = 1
        return h, pre

    def logits(self, collapsed: Tensor) -> Tensor:
        """[L, D] -> float32 [L, vocab]."""
        normed = rms_norm(collapsed, self.final_norm, self.config.rms_norm_eps)
        return self.head(normed)


def rope_tables(config: ModelConfig) -> tuple[GrowingRope, GrowingRope]:
    """Tables of the layers without and with compressed entries (model.md C.0)."""
    dim, yarn = config.qk_rope_head_dim, config.rope_scaling
    low, high = config.yarn_range
    stretched = stretch(
        frequencies(dim, config.compress_rope_theta), factor=yarn.factor, low=low, high=high
    )
    return GrowingRope(frequencies(dim, config.rope_theta)), GrowingRope(stretched)
