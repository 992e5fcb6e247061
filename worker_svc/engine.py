"""One rank's engine: plans in, results out. Knows nothing of processes, rings or epochs."""

import time
from dataclasses import dataclass

import numpy as np

from phalanx.kernels.reference.logprobs import TokenLogprobs as RowLogprobs
from phalanx.kernels.reference.sample import SampleResult, sample
from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ConfigError
from phalanx.protocol.messages import TokenLogprobs
from phalanx.protocol.steps import StepPlan, StepResult, WorkerHello
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.memory import shown_bytes
from phalanx.worker_svc.model.model import Model, PendingStep
from phalanx.worker_svc.model.moe import Experts
from phalanx.worker_svc.sequences import Int, Sequences, ints

NUM_SNAPSHOTS = 8  # window states that may wait for the KV store at a time


@dataclass(frozen=True)
class PoolSizes:
    """How many blocks (the null block included) and state slots fit, and what they take."""

    num_blocks: int
    num_slots: int
    block_bytes: int
    slot_bytes: int

    def lines(self) -> list[tuple[str, str]]:
        """The memory plan for people."""
        tokens = (self.num_blocks - 1) * BLOCK_TOKENS
        return [
            (
                "KV blocks",
                f"{self.num_blocks - 1} x {shown_bytes(self.block_bytes)}: {tokens} tokens",
            ),
            ("state slots", f"{self.num_slots} x {shown_bytes(self.slot_bytes)}"),
        ]


def pool_sizes(layout: CacheLayout, config: NodeConfig) -> PoolSizes:
    """Split worker.kv_bytes into state slots (one a running sequence) and blocks.

    Raises ConfigError, with both numbers, when not even one sequence of a block would fit.
    """
    num_slots = config.scheduler.max_num_seqs
    longest = -(-layout.config.max_positions // BLOCK_TOKENS)
    num_blocks = config.worker.num_blocks
    if num_blocks == 0:
        room = config.worker.kv_bytes - num_slots * layout.slot_bytes
        num_blocks = min(room // layout.block_bytes, num_slots * longest + 1)
    if num_blocks < 2:
        need = num_slots * layout.slot_bytes + 2 * layout.block_bytes
        raise ConfigError(
            f"worker.kv_bytes is {config.worker.kv_bytes}, {num_slots} state slots and two blocks need"
            f" {need} bytes: raise it, or lower scheduler.max_num_seqs"
        )
    return PoolSizes(num_blocks, num_slots, layout.block_bytes, layout.slot_bytes)


class Engine:
    """Weights, caches and sequences of one rank.

    KV blocks and snapshots of state slots lie in arenas, so that the KV store copies them by handle.
    """

    def __init__(
        self,
        weights: Weights,
        experts: Experts,
        config: NodeConfig,
        seat: int,
        incarnation: int,
        eos_token_id: int,
        fingerprint: str,
    ) -> None:
        self.layout = CacheLayout(weights.config)
        self.sizes = sizes = pool_sizes(self.layout, config)
        self._blocks = Arena.create(
            arena_name(config.node, f"kv{seat}", incarnation),
            sizes.num_blocks * sizes.block_bytes,
            f"worker-{seat}",
        )
        self._snapshots = Arena.create(
            arena_name(config.node, f"snap{seat}", incarnation),
            NUM_SNAPSHOTS * sizes.slot_bytes,
            f"worker-{seat}",
        )
        self.pools = CachePools(self.layout, sizes.num_blocks, sizes.num_slots, self._blocks.data)
        self.model = Model(weights, self.pools, experts)
        # Rows by logical expert since the last report, int64 [layers, experts].
        shape = (weights.config.num_hidden_layers, weights.config.n_routed_experts)
        self.expert_counts = np.zeros(shape, np.int64)
        self._incarnation, self._fingerprint, self._eos = incarnation, fingerprint, eos_token_id
        self.reset()

    def reset(self) -> None:
        """Forget every sequence; weights and pools stay."""
        self._sequences = Sequences(self.sizes.num_slots, self.pools.history, self._eos)

    def hello(self) -> WorkerHello:
        config = self.model.config
        return WorkerHello(
            worker_incarnation=self._incarnation,
            num_blocks=self.sizes.num_blocks,
            num_slots=self.sizes.num_slots,
            max_model_len=config.max_positions,
            vocab_size=config.vocab_size,
            eos_token_id=self._eos,
            block_bytes=self.sizes.block_bytes,
            slot_bytes=self.sizes.slot_bytes,
            block_arena=self._blocks.name,
            snapshot_arena=self._snapshots.name,
            num_snapshots=NUM_SNAPSHOTS,
            fingerprint=self._fingerprint,
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Compute, sample and commit one plan.

        What the plan adds to the tables (new sequences, blocks) is undone when the step is abandoned:
        EpochChanged passes through, and the same plan, or another one, may come again.
        """
        started_ns = time.monotonic_ns()
        for new in plan.new:
            self._sequences.admit(new)
        slots = ints(plan.slots)
        try:
            pending = self.model.forward(self._sequences.batch(plan))
            sampled = self._sample(plan, pending)
        except BaseException:
            self._sequences.retract(plan)
            raise
        # From here on the step counts, whatever happens to the epoch.
        pending.commit(ints(plan.seqlens_q).tolist())
        for slot, region in plan.snapshots:
            at = region * self.sizes.slot_bytes
            record = self.pools.slots[slot].numpy()
            self._snapshots.data[at : at + self.sizes.slot_bytes] = record.data.cast("B")
        self._count_picks(pending)
        rows = np.frombuffer(plan.sample, np.uint8).astype(bool)
        return StepResult(
            seq=plan.seq,
            aborted=False,
            tokens=sampled.tokens.numpy().astype(np.int32).tobytes(),
            status=sampled.status.numpy().tobytes(),
            logprobs=self._logprobs(slots[rows], sampled.logprobs),
            step_us=(time.monotonic_ns() - started_ns) // 1000,
        )

    def _count_picks(self, pending: PendingStep) -> None:
        for layer, picks in pending.expert_picks.items():
            counts = picks.flatten().bincount(minlength=self.expert_counts.shape[1])
            self.expert_counts[layer] += counts.numpy()

    def _sample(self, plan: StepPlan, pending: PendingStep) -> SampleResult:
        rows = np.frombuffer(plan.sample, np.uint8).astype(bool)
        positions = (ints(plan.starts) + ints(plan.seqlens_q))[rows]
        settings = self._sequences.sampling_rows(ints(plan.slots)[rows], positions)
        return sample(pending.logits, settings)

    def _logprobs(self, slots: Int, rows: RowLogprobs | None) -> tuple[TokenLogprobs | None, ...]:
        """For each sampled row what its request asked for; empty when none asked."""
        if rows is None:
            return ()
        own, ids, values = rows.logprobs.tolist(), rows.top_ids.tolist(), rows.top_logprobs.tolist()
        out: list[TokenLogprobs | None] = []
        for row, slot in enumerate(slots):
            count = self._sequences.sampling[slot].logprobs
            if count is None:
                out.append(None)
                continue
            best = [(i, v) for i, v in zip(ids[row], values[row], strict=True) if i >= 0][:count]
            out.append(
                TokenLogprobs(own[row], tuple(i for i, _ in best), tuple(v for _, v in best))
            )
        return tuple(out)

    def close(self) -> None:
        self._blocks.close()
        self._snapshots.close()
