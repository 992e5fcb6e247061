"""YOCO truncation: the early rows of a prompt skip the decoder half of the layers (model.md C.8).

The decoder half shares one long-range memory, the entries of its first layer, and those need only the
encoder half. So a prompt's rows before its last `keep_tokens` end there: about half the work is
saved. What is lost are their window vectors: the rows that go on see windows that begin where they
begin, so their results are approximate. Outputs are never truncated, and which rows are depends on
the prompt's length alone: a truncated stream is still the same in any company and any portions.

`mask` computes every row with the same clipped windows: it saves nothing, and must agree with
`compact` bit for bit.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import torch
from torch import Tensor

from phalanx.worker_svc.model.batch import Int, StepBatch
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.fields import ConfigError

TruncationMode = Literal["off", "mask", "compact"]


@dataclass(frozen=True)
class Tail:
    """The part of a step that the decoder half computes: S' sequences, R' rows, maybe none.

    Attributes:
        batch: those rows, as if they were a step of their own.
        rows: int64 [R'], their places among the whole step's rows.
        seqs: int64 [S'], the whole step's sequences that have such rows.
        skipped: int64 [S'], rows of each that end before the decoder half; always its first ones.
    """

    batch: StepBatch
    rows: Tensor
    seqs: Tensor
    skipped: Tensor

    def accepted(self, num_accepted: Tensor) -> Tensor:
        """int64 [S] of the whole step -> int64 [S']: how many of the tail's rows are kept."""
        return (num_accepted[self.seqs] - self.skipped).clamp(min=0)


@dataclass(frozen=True)
class Truncation:
    """Which rows of a prompt the decoder half computes.

    Attributes:
        keep_tokens: the last tokens of each prompt, which it always does.
    """

    mode: TruncationMode = "off"
    keep_tokens: int = 0

    @property
    def label(self) -> str:
        """Part of the numerics fingerprint."""
        return self.mode if self.mode == "off" else f"{self.mode}-{self.keep_tokens}"

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError with both numbers when too few rows would be kept.

        The first output's window must find every vector, also after a verification took back all its
        rows but one.
        """
        window, most_rows = config.sliding_window, config.dspark_block_size + 1
        if self.mode != "off" and self.keep_tokens < window + most_rows:
            raise ConfigError(
                f"yoco_keep_tokens is {self.keep_tokens}; this model needs at least "
                f"{window + most_rows} (window {window} + {most_rows} rows of a verification)"
            )

    def tail(self, batch: StepBatch) -> Tail | None:
        """What the decoder half computes of a step; None if it is simply the whole step.

        Raises ValueError if logits are wanted of a row that is not computed.
        """
        if self.mode == "off":
            return None
        if batch.prompt_lens is None:
            raise ValueError("prompts are truncated, but the step does not say how long they are")
        keep_from = np.maximum(batch.prompt_lens - self.keep_tokens, 0)
        if not ((keep_from > 0) & (batch.starts < batch.prompt_lens)).any():
            return None
        first = keep_from if batch.window_from is None else np.maximum(keep_from, batch.window_from)
        clipped = replace(batch, window_from=first)
        if self.mode == "compact":
            return _compact(clipped, keep_from)
        return Tail(
            clipped,
            rows=torch.arange(batch.num_rows),
            seqs=torch.arange(batch.num_seqs),
            skipped=torch.zeros(batch.num_seqs, dtype=torch.int64),
        )


OFF: Final = Truncation()


def _compact(batch: StepBatch, keep_from: Int) -> Tail:
    assert batch.prompt_lens is not None and batch.window_from is not None
    lengths = batch.seqlens_q
    skipped = np.clip(keep_from - batch.starts, 0, lengths)
    within = np.arange(batch.num_rows) - np.repeat(batch.cu_seqlens_q[:-1], lengths)
    kept = within >= np.repeat(skipped, lengths)
    if not kept[batch.logit_rows].all():
        raise ValueError(
            "logits of a truncated prompt's early rows are wanted, and those are not computed: "
            "prompt logprobs need yoco_truncation off"
        )
    (seqs,) = np.nonzero(lengths > skipped)
    lengths = (lengths - skipped)[seqs]
    part = StepBatch(
        slot_ids=batch.slot_ids[seqs],
        starts=(batch.starts + skipped)[seqs],
        cu_seqlens_q=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))),
        token_ids=batch.token_ids[kept],
        block_table=batch.block_table[seqs],
        logit_rows=(np.cumsum(kept) - 1)[batch.logit_rows],
        copy_keys=batch.copy_keys[seqs],
        prompt_lens=batch.prompt_lens[seqs],
        window_from=batch.window_from[seqs],
    )
    return Tail(
        part,
        rows=torch.from_numpy(np.flatnonzero(kept)),
        seqs=torch.from_numpy(seqs),
        skipped=torch.from_numpy(skipped[seqs]),
    )
