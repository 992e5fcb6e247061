"""One rank's engine: plans in, results out. Knows nothing of processes, rings or epochs."""

import time
from collections.abc import Callable

import numpy as np
import torch

from phalanx.kernels.ops import sample
from phalanx.kernels.reference.logprobs import TokenLogprobs as RowLogprobs
from phalanx.kernels.reference.sample import SampleResult
from phalanx.protocol.arena import Arena, arena_name
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.messages import TokenLogprobs
from phalanx.protocol.steps import StepPlan, StepResult, WorkerHello
from phalanx.worker_svc.forced import force_tokens
from phalanx.worker_svc.gpu_room import Undone, done, room_for
from phalanx.worker_svc.model.batch import Room, StepBatch, step_rooms
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, CPU, CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import Weights
from phalanx.worker_svc.model.model import DenseParts, Model, PendingStep
from phalanx.worker_svc.model.moe import Experts
from phalanx.worker_svc.model.moving import moved
from phalanx.worker_svc.model.truncation import Truncation
from phalanx.worker_svc.pools import NUM_SNAPSHOTS, pool_sizes
from phalanx.worker_svc.scoring import score_rows
from phalanx.worker_svc.sequences import Sequences
from phalanx.worker_svc.slots import Int, PlanRows, ints


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
        settle: Callable[[], None] = lambda: None,
        num_blocks: int = 0,
        tell: Callable[[str], None] = lambda why: None,
        parts: DenseParts | None = None,
    ) -> None:
        """
        Args:
            settle: called before the results of a step are read, which a GPU may still be computing.
            num_blocks: as many as the worker before had; 0: none was there.
            tell: told why a part of a step that counts already is done a second time.
            parts: of these weights, if they are made already.
        """
        self.layout = CacheLayout(weights.config)
        self._device = weights.device
        # Before the caches, which may take what these leave of a GPU.
        parts = parts or DenseParts.of(weights)
        # Rows by logical expert since the last report, int64 [layers, experts].
        shape = (weights.config.num_hidden_layers, weights.config.n_routed_experts)
        self.expert_counts = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self.sizes = sizes = pool_sizes(self.layout, config, weights.device, num_blocks)
        # On a GPU the arena is a copy, of the blocks that are full: what the KV store reads.
        self._blocks = Arena.create(
            arena_name(config.node, f"kv{seat}", incarnation),
            (sizes.num_blocks if sizes.stored else 1) * sizes.block_bytes,
            f"worker-{seat}",
        )
        self._snapshots = Arena.create(
            arena_name(config.node, f"snap{seat}", incarnation),
            NUM_SNAPSHOTS * sizes.slot_bytes,
            f"worker-{seat}",
        )
        on_cpu = self._device.type == "cpu"
        self.pools = CachePools(
            self.layout,
            sizes.num_blocks,
            sizes.num_slots,
            self._blocks.data if on_cpu else None,
            device=self._device,
        )
        self._copy: torch.Tensor | None = None
        if sizes.stored and not on_cpu:
            whole = torch.frombuffer(self._blocks.data, dtype=torch.uint8)
            self._copy = whole[: self.pools.blocks.numel()].view(self.pools.blocks.shape)
        truncation = Truncation(config.worker.yoco_truncation, config.worker.yoco_keep_tokens)
        self.model = Model(weights, self.pools, experts, truncation=truncation, parts=parts)
        self._incarnation, self._fingerprint, self._eos = incarnation, fingerprint, eos_token_id
        self._settle, self._tell = settle, tell
        self._staging: Arena | None = None  # the scheduler's, once something was restored
        self.reset()

    def rooms(self) -> list[Room]:
        """Of the steps that are worth recording: decode steps of all contexts that there are blocks for."""
        config, sizes = self.model.config, self.sizes
        longest = min(config.max_positions, (sizes.num_blocks - 1) * BLOCK_TOKENS)
        return step_rooms(sizes.num_slots, longest)

    def reset(self) -> None:
        """Forget every sequence; weights and pools stay. Handles given out before are stale."""
        self._blocks.bump(0)
        self._snapshots.bump(0)
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
            num_snapshots=NUM_SNAPSHOTS if self.sizes.stored else 0,
            max_drafts=config.dspark_block_size,
            fingerprint=self._fingerprint,
        )

    def restore(self, plan: StepPlan) -> None:
        """Fill blocks and slots of the plan's new sequences with what came from the KV store.

        To be called before `run`, which may be abandoned: nobody else has these blocks and slots. Raises
        ArenaError when the staging arena is gone, because its scheduler is.
        """
        if not plan.restores:
            return
        if self._staging is None or self._staging.name != plan.staging:
            staging = Arena.attach(plan.staging)
            self._let_go_of_staging()
            self._staging = staging
        data, sizes = self._staging.data, self.sizes
        blocks, slots = self.pools.blocks, self.pools.slots
        staged = torch.frombuffer(data, dtype=torch.uint8)
        for restore in plan.restores:
            slots[restore.slot] = staged[restore.state : restore.state + sizes.slot_bytes]
            places = np.frombuffer(restore.places, np.int64)
            for block, place in zip(ints(restore.blocks).tolist(), places.tolist(), strict=True):
                blocks[block] = staged[place : place + sizes.block_bytes]
                if self._copy is not None:  # a later put of the sequence hands out this block too
                    self._copy[block] = staged[place : place + sizes.block_bytes]

    def _let_go_of_staging(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def run(self, plan: StepPlan) -> StepResult:
        """Compute, sample and commit one plan.

        What the plan adds to the tables (new sequences, blocks) is undone when the step is abandoned:
        EpochChanged passes through, and the same plan, or another one, may come again.
        """
        started_ns = time.monotonic_ns()
        for new in plan.new:
            self._sequences.admit(new)
        for slot, new_slot, block, new_block in plan.forks:
            # Harmless in a step that is abandoned: nobody else has the new slot and block.
            self.pools.slots[new_slot] = self.pools.slots[slot]
            if block:
                self.pools.blocks[new_block] = self.pools.blocks[block]
        batch, rows = self._sequences.batch(plan)
        try:
            with room_for(f"in a step of {batch.num_rows} rows", Undone):
                pending = self.model.forward(batch)
                sampled = self._sample(pending, rows)
                scored = self._score(pending, rows)
                failpoint("worker.step.after_sampler")
        except BaseException:
            self._sequences.retract(plan)
            raise
        # From here on the step counts, whatever happens to the epoch.
        outcome = self._sequences.slots.settle(rows, sampled.tokens.numpy(), sampled.status.numpy())
        done(lambda: self._keep(plan, pending, batch, outcome.accepted), self._tell)
        return StepResult(
            seq=plan.seq,
            aborted=False,
            counts=outcome.counts.astype(np.uint8).tobytes(),
            tokens=sampled.tokens.numpy()[outcome.kept].astype(np.int32).tobytes(),
            status=outcome.status.tobytes(),
            logprobs=self._logprobs(rows, outcome.kept, sampled),
            step_us=(time.monotonic_ns() - started_ns) // 1000,
            prompt_logprobs=scored,
        )

    def _keep(self, plan: StepPlan, pending: PendingStep, batch: StepBatch, accepted: Int) -> None:
        """Write what the step leaves. May be begun again: the same bytes go to the same places.

        Raises Undone where the GPU has no memory left for what is needed in between.
        """
        with room_for(f"while a step of {batch.num_rows} rows was kept", Undone):
            pending.commit(accepted.tolist())
            self._copy_full_blocks(batch, accepted)
            for slot, region in plan.snapshots:
                at = region * self.sizes.slot_bytes
                record = self.pools.slots[slot].cpu().numpy()
                self._snapshots.data[at : at + self.sizes.slot_bytes] = record.data.cast("B")
            self._count_picks(pending)

    def _copy_full_blocks(self, batch: StepBatch, accepted: Int) -> None:
        """Copy the blocks that this step filled to where the KV store reads them."""
        if self._copy is None:
            return
        first = batch.starts // BLOCK_TOKENS
        end = (batch.starts + accepted) // BLOCK_TOKENS
        full = [batch.block_table[i, first[i] : end[i]] for i in np.flatnonzero(end > first)]
        if full:
            blocks = torch.from_numpy(np.concatenate(full))
            self._copy[blocks] = self.pools.blocks[blocks.to(self._device)].cpu()

    def _count_picks(self, pending: PendingStep) -> None:
        # Of all layers with as many rows at once; these are neighbours.
        by_rows: dict[int, list[int]] = {}
        for layer, picks in pending.expert_picks.items():
            by_rows.setdefault(len(picks), []).append(layer)
        found = []
        for layers in by_rows.values():
            flat = torch.stack([pending.expert_picks[layer] for layer in layers]).flatten(1)
            counts = self.expert_counts[layers[0] : layers[-1] + 1]
            found.append((counts, flat, torch.ones_like(flat)))
        for counts, flat, ones in found:  # all memory is there: nothing is counted twice
            counts.scatter_add_(1, flat, ones)

    def _sample(self, pending: PendingStep, rows: PlanRows) -> SampleResult:
        settings = self._sequences.sampling_rows(rows.slots[rows.sample_seqs], rows.positions)
        if self._device != CPU:
            settings = moved(settings, self._device)
        sampled = sample(pending.logits, settings)
        forced = torch.from_numpy(self._sequences.slots.forced(rows))
        if bool((forced >= 0).any()):
            forced = forced.to(self._device)
            sampled = force_tokens(sampled, pending.logits, forced, settings.num_top_logprobs)
        self._settle()
        return sampled if self._device == CPU else moved(sampled, CPU)

    def _score(self, pending: PendingStep, rows: PlanRows) -> tuple[bytes, ...]:
        """Of each sequence that wants the logprobs of prompt tokens which its rows precede."""
        return tuple(
            score_rows(pending, int(rows.cu[place]), ids, num_top)
            for place, ids, num_top in self._sequences.to_score(rows)
        )

    def _logprobs(
        self, rows: PlanRows, kept: Int, sampled: SampleResult
    ) -> tuple[TokenLogprobs | None, ...]:
        """For each kept token what its request asked for; empty when none asked."""
        if sampled.logprobs is None:
            return ()
        processed = _columns(sampled.logprobs, kept)
        raw = processed if sampled.raw_logprobs is None else _columns(sampled.raw_logprobs, kept)
        out: list[TokenLogprobs | None] = []
        for at, slot in enumerate(rows.slots[rows.sample_seqs[kept]]):
            sampling = self._sequences.sampling[slot]
            count = sampling.logprobs
            if count is None:
                out.append(None)
                continue
            own, ids, values = raw if sampling.raw_logprobs else processed
            best = [(i, v) for i, v in zip(ids[at], values[at], strict=True) if i >= 0][:count]
            out.append(TokenLogprobs(own[at], tuple(i for i, _ in best), tuple(v for _, v in best)))
        return tuple(out)

    def close(self) -> None:
        self._let_go_of_staging()
        self._blocks.close()
        self._snapshots.close()


def _columns(
    found: RowLogprobs, kept: Int
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """(own, ids of the best, their values) of the kept rows, as plain lists."""
    return (
        found.logprobs[kept].tolist(),
        found.top_ids[kept].tolist(),
        found.top_logprobs[kept].tolist(),
    )
