"""What the sampler is told about its rows: one entry a row in each tensor, lists flattened.

A row is one token to be made: a decode row, the last row of a prompt chunk, or a draft row being
verified. Nothing here knows its place in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from phalanx.kernels.reference.noise import Purpose


@dataclass(frozen=True, slots=True)
class Ragged:
    """One list a row: row r holds `values[offsets[r]:offsets[r + 1]]`."""

    values: torch.Tensor  # [total]
    offsets: torch.Tensor  # int64 [n + 1], starts with 0

    @staticmethod
    def of(lists: Sequence[Sequence[int] | Sequence[float]], dtype: torch.dtype) -> "Ragged":
        values = torch.tensor([value for row in lists for value in row], dtype=dtype)
        lengths = torch.tensor([0, *(len(row) for row in lists)], dtype=torch.int64)
        return Ragged(values, lengths.cumsum(0))

    def row_of_value(self) -> torch.Tensor:
        """int64 [total]: the row each value belongs to."""
        lengths = self.offsets.diff()
        rows = torch.arange(lengths.numel(), device=lengths.device)
        return rows.repeat_interleave(lengths, output_size=self.values.numel())

    def to(self, device: torch.device) -> "Ragged":
        return Ragged(self.values.to(device), self.offsets.to(device))


@dataclass(frozen=True, slots=True)
class RowParams:
    """The settings of one row, with the defaults that change nothing but draw at temperature 1."""

    seed: int = 0
    position: int = 0  # index in the sequence of the token being made (prompt tokens counted)
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 or -1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    first_n_no_eos: int = 0
    output_ids: Sequence[int] = ()  # tokens made so far, without the prompt; drafts before it too
    num_outputs: int | None = None  # len(output_ids); given, a row without penalties may list none
    stop_ids: Sequence[int] = ()
    bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    blocked_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Struct of arrays over n rows. Values outside their range act as "off", never as a crash:
    requests are checked at the door, and one odd row must not end the step of its neighbours."""

    seed: torch.Tensor  # int64 [n]
    position: torch.Tensor  # int64 [n]
    temperature: torch.Tensor  # float [n]; 0 (or less, or NaN) is greedy
    top_p: torch.Tensor  # float [n]; float64 keeps 0.8 closer to what was asked than float32
    top_k: torch.Tensor  # int64 [n]; <= 0 is off
    min_p: torch.Tensor  # float [n]
    repetition_penalty: torch.Tensor  # float32 [n]
    presence_penalty: torch.Tensor  # float32 [n]
    frequency_penalty: torch.Tensor  # float32 [n]
    num_outputs: torch.Tensor  # int64 [n]: tokens made so far
    min_tokens: torch.Tensor  # int64 [n]
    first_n_no_eos: torch.Tensor  # int64 [n]
    outputs: Ragged  # int64: read only for rows with a penalty, others may leave theirs empty
    stop_ids: Ragged  # int64
    bias_ids: Ragged  # int64, distinct within a row
    bias_values: Ragged  # float32, parallel to bias_ids
    blocked_ids: Ragged  # int64
    eos_id: int = -1  # -1: the model has none
    num_top_logprobs: int = -1  # -1: no logprobs; 0: the token's own; k: the k best as well
    want_raw_logprobs: bool = False  # the same from the unprocessed logits, beside them
    purpose: Purpose = Purpose.SAMPLE

    @property
    def num_rows(self) -> int:
        return self.seed.numel()

    def to(self, device: torch.device) -> "SamplingRows":
        """The same rows with every tensor on `device`."""
        moved: dict[str, Any] = {
            part.name: value.to(device)
            for part in fields(self)
            if isinstance(value := getattr(self, part.name), torch.Tensor | Ragged)
        }
        return replace(self, **moved)

    @staticmethod
    def of(
        rows: Sequence[RowParams],
        *,
        eos_id: int = -1,
        num_top_logprobs: int = -1,
        want_raw_logprobs: bool = False,
        purpose: Purpose = Purpose.SAMPLE,
    ) -> "SamplingRows":
        """Lay out plain rows as arrays."""

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64)

        def floats(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype)

        return SamplingRows(
            seed=ints([row.seed for row in rows]),
            position=ints([row.position for row in rows]),
            temperature=floats([row.temperature for row in rows], torch.float64),
            top_p=floats([row.top_p for row in rows], torch.float64),
            top_k=ints([row.top_k for row in rows]),
            min_p=floats([row.min_p for row in rows], torch.float64),
            repetition_penalty=floats([row.repetition_penalty for row in rows], torch.float32),
            presence_penalty=floats([row.presence_penalty for row in rows], torch.float32),
            frequency_penalty=floats([row.frequency_penalty for row in rows], torch.float32),
            num_outputs=ints(
                [len(r.output_ids) if r.num_outputs is None else r.num_outputs for r in rows]
            ),
            min_tokens=ints([row.min_tokens for row in rows]),
            first_n_no_eos=ints([row.first_n_no_eos for row in rows]),
            outputs=Ragged.of([row.output_ids for row in rows], torch.int64),
            stop_ids=Ragged.of([row.stop_ids for row in rows], torch.int64),
            bias_ids=Ragged.of([list(row.bias) for row in rows], torch.int64),
            bias_values=Ragged.of([list(row.bias.values()) for row in rows], torch.float32),
            blocked_ids=Ragged.of([row.blocked_ids for row in rows], torch.int64),
            eos_id=eos_id,
            num_top_logprobs=num_top_logprobs,
            want_raw_logprobs=want_raw_logprobs,
            purpose=purpose,
        )
