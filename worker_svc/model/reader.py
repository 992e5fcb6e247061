"""Single sequences in a model of their own, read in any portions: for measuring and comparing."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from phalanx.kernels.reference.logprobs import TokenLogprobs, prompt_logprobs
from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import LocalExperts
from phalanx.worker_svc.model.truncation import OFF, Truncation


class Reader:
    """One sequence of at most `max_len` tokens, from its first.

    Attributes:
        position: tokens read so far.
    """

    def __init__(self, weights: Weights, max_len: int, truncation: Truncation = OFF) -> None:
        num_blocks = 1 + -(-max_len // BLOCK_TOKENS)
        layout = CacheLayout(weights.config)
        self.pools = CachePools(layout, num_blocks, num_slots=1, history_len=max_len)
        self.model = Model(weights, self.pools, LocalExperts(weights), truncation=truncation)
        self._blocks = range(1, num_blocks)
        self.position = 0

    def restart(self) -> None:
        """Forget the sequence."""
        self.position = 0

    def read(
        self, ids: Sequence[int], *, prompt_len: int = 0, window_from: int = 0, stored: int = 0
    ) -> Tensor:
        """Logits float32 [n, vocab] of the last rows, as many as are computed: all, unless truncated.

        Args:
            ids: the next tokens.
            prompt_len, window_from, stored: see `StepBatch`.
        """
        truncation = self.model.truncation
        first = prompt_len - truncation.keep_tokens if truncation.mode == "compact" else 0
        computed = range(max(0, first - self.position), len(ids))
        rows = SequenceRows(
            0, self.position, ids, self._blocks, computed, 0, prompt_len, window_from, stored
        )
        pending = self.model.forward(StepBatch.of([rows]))
        pending.commit([len(ids)])
        self.position += len(ids)
        return pending.logits

    def take_prefix(self, other: "Reader", length: int, replay: int) -> None:
        """Begin with `length` tokens of another reader's sequence: its blocks as they are, and windows
        from reading the last `replay` tokens again, with nothing before them.

        That is exact where replay reaches as far back as layers * (window - 1) tokens, or to the start.

        Args:
            length: even, so that no token waits for its partner.
        """
        assert length % 2 == 0 and replay % 2 == 0, "a pair must not be cut"
        start = max(0, length - replay)
        self.pools.blocks.copy_(other.pools.blocks)
        self.pools.history.copy_(other.pools.history)
        self.position = start
        ids = other.pools.history[0, start:length].tolist()
        self.read(ids, window_from=start, stored=length)

    def score(self, ids: Sequence[int], portion: int, num_top: int = 0) -> TokenLogprobs:
        """Prompt logprobs of a fresh sequence's tokens after the first, read `portion` at a time.

        Returns:
            n = len(ids) - 1 entries.
        """
        self.restart()
        parts = [self.read(ids[at : at + portion]) for at in range(0, len(ids), portion)]
        return prompt_logprobs(torch.cat(parts)[:-1], torch.tensor(ids[1:]), num_top)


def open_reader(directory: Path, max_len: int, truncation: Truncation = OFF) -> Reader:
    """Load a checkpoint with all experts."""
    return Reader(load_checkpoint(directory), max_len, truncation)
