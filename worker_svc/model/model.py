"""The backbone: one ragged forward for prompt chunks, decode rows and verification rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.kernels.ops import collapse, mean_copies, rms_norm
from phalanx.kernels.reference.rope import GrowingRope, frequencies, stretch
from phalanx.kernels.reference.rows import pad_rows
from phalanx.protocol import faults
from phalanx.worker_svc.model.attention import attention, store_entries
from phalanx.worker_svc.model.batch import StepBatch, step_rows
from phalanx.worker_svc.model.caches import CPU, CachePools
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.draft import Drafter
from phalanx.worker_svc.model.engram import Engram
from phalanx.worker_svc.model.head import OutputHead
from phalanx.worker_svc.model.layers import layer_weights
from phalanx.worker_svc.model.moe import Experts, visit
from phalanx.worker_svc.model.moving import moved
from phalanx.worker_svc.model.noise import nudge
from phalanx.worker_svc.model.step import Observer, Ropes, Step
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


class Model:
    """Weights, caches and experts of one rank, ready to step.

    Args:
        weights: dequantized weights.
        pools: this rank's caches.
        experts: where routed experts run.
        draft_experts: where those of the draft stages run; None to do without drafts.
        truncation: which rows of a prompt the later layers leave out; none by default.

    Attributes:
        drafter: proposes tokens, if there are draft stages and experts for them.
    """

    def __init__(
        self,
        weights: Weights,
        pools: CachePools,
        experts: Experts,
        draft_experts: Experts | None = None,
        truncation: Truncation = OFF,
    ) -> None:
        config = weights.config
        truncation.check(config)
        self.config = config
        self.truncation = truncation
        self.pools = pools
        self.experts = experts
        self.embedding = weights["embed"]
        self.head = OutputHead(weights["head"])
        self.final_norm = weights.take("norm")
        self.layers = [layer_weights(weights, i) for i in range(config.num_hidden_layers)]
        self.engram = Engram(weights)
        self._max_len = pools.history.shape[1]
        self._device = weights.device
        self._plain_rope, self._yarn_rope = rope_tables(config, weights.device)
        self.drafter: Drafter | None = None
        if draft_experts is not None and config.draft_stages > 0:
            self.drafter = Drafter(weights, pools, self._plain_rope, draft_experts, self.head)

    def begin(self, batch: StepBatch, observer: Observer | None = None) -> Step:
        """Check a batch, note its tokens in the history, and set up the step.

        Raises:
            ValueError: the batch cannot be computed; nothing was changed.
        """
        batch.check(self.config, self._max_len)
        step = self._step(batch, self.truncation.tail(batch), observer)
        rows = step.host
        real = slice(0, rows.num_rows)
        # By position: doing the step again writes the same ids.
        history = self.pools.history
        history[rows.slots[real], rows.positions[real]] = rows.token_ids[real].to(torch.int32)
        return step

    def _step(self, batch: StepBatch, tail: Tail | None, observer: Observer | None) -> Step:
        host = step_rows(batch, self.config)
        rows = host if self._device == CPU else moved(host, self._device)
        at, yarn = (host.positions, rows.positions), self._yarn_rope
        ropes = Ropes(self._plain_rope.at(*at), yarn.at(*at), yarn)
        keys = torch.from_numpy(batch.copy_keys)[host.seqs] + host.positions * _POSITION_PRIME
        return Step(
            config=self.config,
            num_rows=host.num_rows,
            copy_keys=keys,
            observer=observer,
            batch=batch,
            rows=rows,
            host=host,
            pools=self.pools,
            ropes=ropes,
            tail=tail,
        )

    def forward(self, batch: StepBatch, observer: Observer | None = None) -> PendingStep:
        """Compute one step.

        Writes block records and token history, both by position; window rings and waiting tokens
        change only in `PendingStep.commit`.
        """
        step = decoder = self.begin(batch, observer)
        h, pre = self.embed(step.rows.token_ids)
        if faults.active is not None and faults.active.ulp():
            h = nudge(h)
        stream = Stream(h, pre, [])
        start, depth = self.config.decoder_start, self.config.num_hidden_layers
        self._run(step, stream, range(start if step.tail else depth))
        if step.tail is not None:
            decoder = self._step(step.tail.batch, None, observer)
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
        picks = step.expert_picks | decoder.expert_picks
        return PendingStep(logits, picks, final, self, step, decoder)

    def _run(self, step: Step, stream: Stream, layers: range) -> None:
        if step.num_rows == 0:
            for layer in layers:
                visit(self.experts, self.config, layer)
            return
        units = self.engram.units(step)
        for layer in layers:
            weights = self.layers[layer]
            if weights.engram is not None:
                stream.h = self.engram.apply(step, weights.engram, layer, units, stream.h)
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
            h = self.engram.apply(step, weights.engram, layer, self.engram.units(step), h)
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
    """Tables of the layers without and with compressed entries (model.md C.0)."""
    dim, yarn = config.qk_rope_head_dim, config.rope_scaling
    low, high = config.yarn_range
    stretched = stretch(
        frequencies(dim, config.compress_rope_theta), factor=yarn.factor, low=low, high=high
    )
    plain = frequencies(dim, config.rope_theta)
    return GrowingRope(plain, device), GrowingRope(stretched, device)
