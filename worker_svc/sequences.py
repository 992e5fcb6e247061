"""What the worker remembers of each sequence between steps, by state slot."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from phalanx.kernels.reference.sampling_rows import Ragged, SamplingRows
from phalanx.protocol.messages import Sampling
from phalanx.protocol.steps import NewSequence, StepPlan
from phalanx.worker_svc.model.batch import StepBatch
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, NULL_BLOCK
from phalanx.worker_svc.slots import Int, PlanRows, Slots, ints


class Sequences:
    """Block tables, token history and sampling parameters; a slot is a row in every array.

    `admit` and `batch` only add; `retract` takes back what they added for a step that is abandoned.
    """

    def __init__(self, num_slots: int, history: torch.Tensor, eos_token_id: int) -> None:
        max_blocks = -(-history.shape[1] // BLOCK_TOKENS)
        self.block_table = np.full((num_slots, max_blocks), NULL_BLOCK, np.int64)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.copy_keys = np.zeros(num_slots, np.int64)
        self.slots = Slots(num_slots)
        self.history = history  # int32 [num_slots, max positions]
        self.sampling: list[Sampling] = [Sampling()] * num_slots
        self._eos = eos_token_id
        self._floats = torch.zeros(num_slots, 6, dtype=torch.float64)
        self._ints = torch.zeros(num_slots, 4, dtype=torch.int64)

    def admit(self, new: NewSequence) -> None:
        """Give the slot to a new sequence; whatever it held is forgotten."""
        slot, sampling = new.slot, new.sampling
        tokens = np.frombuffer(new.tokens, np.int32)
        self.block_table[slot] = NULL_BLOCK
        self.num_blocks[slot] = 0
        self.copy_keys[slot] = new.copy_key
        self.slots.admit(new)
        self.history[slot, : len(tokens)] = torch.from_numpy(tokens.copy())
        self.sampling[slot] = sampling
        self._floats[slot] = torch.tensor(
            (
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            ),
            dtype=torch.float64,
        )
        end_bans = sampling.first_n_token_no_eos
        self._ints[slot] = torch.tensor(
            (sampling.seed or 0, sampling.top_k, sampling.min_tokens, end_bans)
        )

    def batch(self, plan: StepPlan) -> tuple[StepBatch, PlanRows]:
        """The plan's rows for the model. Adds the plan's blocks to the tables."""
        rows = self.slots.resolve(plan)
        self._extend(rows.slots, ints(plan.block_counts), ints(plan.block_ids))
        columns = int(self.num_blocks[rows.slots].max(initial=0))
        batch = StepBatch(
            slot_ids=rows.slots,
            starts=rows.starts,
            cu_seqlens_q=rows.cu,
            token_ids=rows.token_ids,
            block_table=self.block_table[rows.slots, :columns],
            logit_rows=rows.sample_rows,
            copy_keys=self.copy_keys[rows.slots],
            prompt_lens=self.slots.num_prompt[rows.slots],
        )
        return batch, rows

    def _extend(self, slots: Int, counts: Int, block_ids: Int) -> None:
        at = 0
        for slot, count in zip(slots[counts > 0], counts[counts > 0], strict=True):
            have = self.num_blocks[slot]
            self.block_table[slot, have : have + count] = block_ids[at : at + count]
            self.num_blocks[slot] = have + count
            at += count

    def retract(self, plan: StepPlan) -> None:
        """Take back what `batch` added for a step that was abandoned."""
        self.num_blocks[ints(plan.slots)] -= ints(plan.block_counts)

    def sampling_rows(self, slots: Int, positions: Int) -> SamplingRows:
        """Settings of the rows to sample.

        Args:
            slots: [n] the sequences.
            positions: [n] index of the token each makes.
        """
        chosen = [self.sampling[slot] for slot in slots]
        floats, whole = self._floats[slots], self._ints[slots]
        position = torch.from_numpy(positions)
        wanted = [s.logprobs for s in chosen if s.logprobs is not None]
        return SamplingRows(
            seed=whole[:, 0],
            position=position,
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            top_k=whole[:, 1],
            min_p=floats[:, 2],
            repetition_penalty=floats[:, 3].float(),
            presence_penalty=floats[:, 4].float(),
            frequency_penalty=floats[:, 5].float(),
            num_outputs=position - torch.from_numpy(self.slots.num_prompt[slots]),
            min_tokens=whole[:, 2],
            first_n_no_eos=whole[:, 3],
            outputs=self._outputs(slots, positions, chosen),
            stop_ids=Ragged.of([s.stop_token_ids for s in chosen], torch.int64),
            bias_ids=Ragged.of([list(s.logit_bias) for s in chosen], torch.int64),
            bias_values=Ragged.of([list(s.logit_bias.values()) for s in chosen], torch.float32),
            blocked_ids=Ragged.of([s.blocked_token_ids for s in chosen], torch.int64),
            eos_id=self._eos,
            num_top_logprobs=max(wanted, default=-1),
            want_raw_logprobs=any(s.raw_logprobs for s in chosen),
        )

    def to_score(self, rows: PlanRows) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Sequences that want logprobs of their prompt and have rows before its last token.

        Yields:
            Place in the step; the prompt tokens after its rows, int64 [n > 0]; how many of the best.
        """
        for place, slot in enumerate(rows.slots):
            num_top = self.sampling[slot].prompt_logprobs
            if num_top is None:
                continue
            start = int(rows.starts[place])
            end = min(start + int(rows.lengths[place]), int(self.slots.num_prompt[slot]) - 1)
            if start < end:
                yield place, self.history[slot, start + 1 : end + 1].long(), num_top

    def _outputs(self, slots: Int, positions: Int, chosen: Sequence[Sampling]) -> Ragged:
        """Tokens made so far, for the rows that have a penalty."""
        lists: list[list[int]] = [
            self.history[slot, self.slots.num_prompt[slot] : position].tolist()
            if (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1.0, 0.0, 0.0)
            else []
            for slot, position, s in zip(slots, positions, chosen, strict=True)
        ]
        return Ragged.of(lists, torch.int64)
