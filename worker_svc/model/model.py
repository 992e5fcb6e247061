"""The backbone: one ragged forward for prompt chunks, decode rows and verification rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx.kernels.ops import collapse, mean_copies, rms_norm
from phalanx.kernels.reference.rope import GrowingRope, frequencies, stretch
from phalanx.kernels.reference.rows import pad_rows
from phalanx.protocol import faults
from phalanx.worker_svc.model.attention import attention, store_entries
from phalanx.worker_svc.model.batch import Room, StepBatch, step_rows
from phalanx.worker_svc.model.caches import CPU, CachePools
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.draft import Drafter
from phalanx.worker_svc.model.engram import Engram
from phalanx.worker_svc.model.head import OutputHead
from phalanx.worker_svc.model.layers import LayerWeights, layer_weights
from phalanx.worker_svc.model.moe import Experts, visit
from phalanx.worker_svc.model.moving import moved
from phalanx.worker_svc.model.noise import nudge
from phalanx.worker_svc.model.step import Inputs, Observer, Ropes, Step
from phalanx.worker_svc.model.sublayers import attention_input, first_weights, run_layer
from phalanx.worker_svc.model.truncation import OFF, Tail, Truncation

_POSITION_PRIME = 1_000_003  # spreads the positions of one sequence over an expert's copies


@dataclass
class Stream:
    """What flows from layer to layer.

    Attributes:
        h: bf16 values [P, copies, D].
        pre: float32 [P, copies], the weights with which the next layer reads it.
        taps: bf16 values [P, D] each, what the draft model reads.
    """

    h: Tensor
    pre: Tensor
    taps: list[Tensor]


class Recorded(Protocol):
    """Steps that were recorded (`recorded.py`)."""

    def run(self, batch: StepBatch) -> "PendingStep | None":
        """What `Model.forward` returns, to the same bits; None if no record suits the batch.

        It is good until the next step begins.
        """


@dataclass(frozen=True)
class PendingStep:
    """A computed step that has not changed any slot yet. Dropping it abandons the step.

    Attributes:
        logits: float32 [L, vocab], in the order of the batch's logit_rows.
        expert_picks: int64 [R, k] by layer, logical experts, for load statistics; fewer rows in
            layers that truncated prompts leave out.
    """

    logits: Tensor
    expert_picks: dict[int, Tensor]
    _final: Tensor  # [P, D]
    _model: "Model"
    _step: Step
    _decoder: Step  # the same step, unless prompts are truncated

    def logits_of(self, rows: slice) -> Tensor:
        """float32 [n, vocab] of further rows, for those who take many of them in portions.

        The step's rows are counted; none may have been left out of the later layers.
        """
        assert self._step.tail is None or self._decoder.num_rows == self._step.num_rows
        return self._model.logits(self._final[rows])

    def commit(self, num_accepted: Sequence[int]) -> None:
        """Keep the first num_accepted rows of each sequence; 0 leaves a sequence as it was."""
        accepted = torch.tensor(num_accepted, dtype=torch.int64)
        self._step.commit(accepted)
        if self._step.tail is not None:
            self._decoder.commit(self._step.tail.accepted(accepted))


@dataclass(frozen=True)
class DenseParts:
    """What a model holds beside experts and caches: weights, and tables that follow from its numbers.

    Attributes:
        plain_rope, yarn_rope: of the layers without and with compressed entries.
    """

    embedding: Tensor
    head: OutputHead
    final_norm: Tensor
    layers: list[LayerWeights]
    engram: Engram
    plain_rope: GrowingRope
    yarn_rope: GrowingRope

    @classmethod
    def of(cls, weights: Weights) -> "DenseParts":
        layers = range(weights.config.num_hidden_layers)
        return cls(
            weights["embed"],
            OutputHead(weights["head"]),
            weights.take("norm"),
            [layer_weights(weights, layer) for layer in layers],
            Engram(weights),
            *rope_tables(weights.config, weights.device),
        )


class Model:
    """Weights, caches and experts of one rank, ready to step.

    Args:
        weights: dequantized weights.
        pools: this rank's caches.
        experts: where routed experts run.
        draft_experts: where those of the draft stages run; None to do without drafts.
        truncation: which rows of a prompt the later layers leave out; none by default.
        parts: of these weights, where they were needed before the caches.

    Attributes:
        drafter: proposes tokens, if there are draft stages and experts for them.
        recorded: computes small steps quicker, if it was set up.
    """

    def __init__(
        self,
        weights: Weights,
        pools: CachePools,
        experts: Experts,
        draft_experts: Experts | None = None,
        truncation: Truncation = OFF,
        parts: DenseParts | None = None,
    ) -> None:
        config = weights.config
        truncation.check(config)
        self.config = config
        self.truncation = truncation
        self.pools = pools
        self.experts = experts
        parts = parts or DenseParts.of(weights)
        self.embedding, self.head, self.final_norm = parts.embedding, parts.head, parts.final_norm
        self.layers, self.engram = parts.layers, parts.engram
        self._plain_rope, self._yarn_rope = parts.plain_rope, parts.yarn_rope
        self._max_len = pools.history.shape[1]
        self._device = weights.device
        self.recorded: Recorded | None = None
        self.drafter: Drafter | None = None
        if draft_experts is not None and config.draft_stages > 0:
            self.drafter = Drafter(weights, pools, self._plain_rope, draft_experts, self.head)

    def begin(self, batch: StepBatch, observer: Observer | None = None) -> Step:
        """Check a batch, note its tokens in the history, and set up the step.

        Raises:
            ValueError: the batch cannot be computed; nothing was changed.
        """
        batch.check(self.config, self._max_len)
        tail = self.truncation.tail(batch)
        return self._step(batch, self.inputs(batch), tail, observer)

    def inputs(self, batch: StepBatch, room: Room | None = None) -> Inputs:
        """What the step's computation reads of a checked batch, on the CPU. Notes its tokens in the history."""
        rows = step_rows(batch, self.config, room)
        real = slice(0, rows.num_rows)
        # By position: doing the step again writes the same ids.
        history = self.pools.history
        history[rows.slots[real], rows.positions[real]] = rows.token_ids[real].to(torch.int32)
        return Inputs(rows, self.engram.units(rows, history))

    def _step(
        self, batch: StepBatch, host: Inputs, tail: Tail | None, observer: Observer | None
    ) -> Step:
        there = host if self._device == CPU else moved(host, self._device)
        self.reach(host.rows.positions)
        keys = torch.from_numpy(batch.copy_keys)[host.rows.seqs]
        return Step(
            config=self.config,
            num_rows=batch.num_rows,
            copy_keys=keys + host.rows.positions * _POSITION_PRIME,
            observer=observer,
            batch=batch,
            rows=there.rows,
            host=host.rows,
            pools=self.pools,
            ropes=self.ropes(there.rows.positions),
            units=(host.units, there.units),
            tail=tail,
        )

    def reach(self, positions: Tensor) -> None:
        """Make the rotary tables long enough for these positions, int64 [P] on the CPU."""
        self._plain_rope.reach(positions)
        self._yarn_rope.reach(positions)

    def ropes(self, positions: Tensor) -> Ropes:
        """Rotary tables of rows at positions that were reached, int64 [P] where they are computed."""
        plain, yarn = self._plain_rope.known(positions), self._yarn_rope.known(positions)
        return Ropes(plain, yarn, self._yarn_rope)

    def forward(self, batch: StepBatch, observer: Observer | None = None) -> PendingStep:
        """Compute one step.

        Writes block records and token history, both by position; window rings and waiting tokens
        change only in `PendingStep.commit`.
        """
        nudged = faults.active is not None and faults.active.ulp()
        if self.recorded is not None and observer is None and not nudged:
            pending = self.recorded.run(batch)
            if pending is not None:
                return pending
        step = self.begin(batch, observer)
        final, logits, decoder = self.compute(step, nudged)
        picks = step.expert_picks | decoder.expert_picks
        return PendingStep(logits, picks, final, self, step, decoder)

    def compute(self, step: Step, nudged: bool = False) -> tuple[Tensor, Tensor, Step]:
        """All layers of a step that has begun.

        Args:
            nudged: whether its numbers shall be a little wrong.

        Returns:
            The collapsed stream [P, D] before the last norm, logits [L, vocab], and the step of the
            decoder half, which is another one where prompts are truncated.
        """
        decoder = step
        h, pre = self.embed(step.rows.token_ids)
        stream = Stream(nudge(h) if nudged else h, pre, [])
        start, depth = self.config.decoder_start, self.config.num_hidden_layers
        self._run(step, stream, range(start if step.tail else depth))
        if step.tail is not None:
            batch = step.tail.batch
            decoder = self._step(batch, self.inputs(batch), None, step.observer)
            decoder.entries_stored = True
            self._cross(step, step.tail.rows.to(self._device), stream)
            self._run(decoder, stream, range(start, depth))
        final = collapse(stream.h, stream.pre)
        step.note("final_hidden", depth, final)
        logits = self.logits(final[decoder.rows.logit_rows])
        if self.drafter is not None and decoder.num_rows > 0:
            decoder.window_records |= self.drafter.context_records(
                torch.cat(stream.taps, dim=-1), decoder.ropes.plain
            )
        return final, logits, decoder

    def _run(self, step: Step, stream: Stream, layers: range) -> None:
        if step.num_rows == 0:
            for layer in layers:
                visit(self.experts, self.config, layer)
            return
        for layer in layers:
            weights = self.layers[layer]
            if weights.engram is not None:
                stream.h = self.engram.apply(step, weights.engram, layer, stream.h)
            if layer in self.config.dspark_target_layer_ids:
                stream.taps.append(mean_copies(stream.h))
                step.note("tap", layer, stream.taps[-1])
            stream.h, stream.pre = run_layer(
                step, attention, weights, self.experts, layer, stream.h, stream.pre
            )

    def _cross(self, step: Step, rows: Tensor, stream: Stream) -> None:
        """Store the decoder half's entries for all rows of the step, and leave `rows` to go on."""
        layer = self.config.decoder_start
        weights, h = self.layers[layer], stream.h
        if weights.engram is not None:
            h = self.engram.apply(step, weights.engram, layer, h)
        x = attention_input(self.config, weights, h, stream.pre)
        store_entries(step, weights.attention, layer, x)
        stream.h, stream.pre = pad_rows(stream.h[rows]), pad_rows(stream.pre[rows])
        stream.taps = [pad_rows(tap[rows]) for tap in stream.taps]

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Equal copies of the embeddings [P, n, D], and the first layer's weights [P, n]."""
        h = self.embedding[token_ids].float().unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        return h, first_weights(h)

    def logits(self, collapsed: Tensor) -> Tensor:
        """[L, D] -> float32 [L, vocab]."""
        normed = rms_norm(collapsed, self.final_norm, self.config.rms_norm_eps)
        return self.head(normed)


def rope_tables(config: ModelConfig, device: torch.device = CPU) -> tuple[GrowingRope, GrowingRope]:
    """Tables of the layers without and with compressed entries (model.md C.0); on a GPU of all positions."""
    dim, yarn = config.qk_rope_head_dim, config.rope_scaling
    low, high = config.yarn_range
    stretched = stretch(
        frequencies(dim, config.compress_rope_theta), factor=yarn.factor, low=low, high=high
    )
    plain = frequencies(dim, config.rope_theta)
    reach = 0 if device == CPU else config.max_positions
    return GrowingRope(plain, device, reach), GrowingRope(stretched, device, reach)
