"""Loads a small checkpoint whole and answers with logits: the form in which references are compared."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import load_checkpoint
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import LocalExperts


class GoldenModel:
    """One sequence at a time, from its first token."""

    def __init__(self, directory: Path) -> None:
        weights = load_checkpoint(directory)
        num_blocks = 1 + -(-weights.config.max_positions // BLOCK_TOKENS)
        pools = CachePools(CacheLayout(weights.config), num_blocks, num_slots=1)
        self.model = Model(weights, pools, LocalExperts(weights), LocalExperts(weights))
        self.blocks = range(1, num_blocks)

    def logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """Logits at every position of a fresh sequence, float32 [T, vocab]."""
        rows = SequenceRows(0, 0, ids, self.blocks, logits=range(len(ids)))
        result: npt.NDArray[np.float32] = self.model.forward(StepBatch.of([rows])).logits.numpy()
        return result


def load(directory: str) -> GoldenModel:
    """Load a checkpoint directory with all experts."""
    return GoldenModel(Path(directory))
