"""Loads a small checkpoint whole and answers with logits: the form in which references are compared."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from phalanx.worker_svc.model.batch import SequenceRows, StepBatch
from phalanx.worker_svc.model.caches import BLOCK_TOKENS, CPU, CacheLayout, CachePools
from phalanx.worker_svc.model.checkpoint import load_checkpoint
from phalanx.worker_svc.model.model import Model
from phalanx.worker_svc.model.moe import LocalExperts


class GoldenModel:
    """One sequence at a time, from its first token."""

    def __init__(self, directory: Path, device: torch.device = CPU) -> None:
        weights = load_checkpoint(directory, device=device)
        num_blocks = 1 + -(-weights.config.max_positions // BLOCK_TOKENS)
        pools = CachePools(CacheLayout(weights.config), num_blocks, num_slots=1, device=device)
        self.model = Model(weights, pools, LocalExperts(weights), LocalExperts(weights))
        self.blocks = range(1, num_blocks)

    def logits(self, ids: list[int]) -> npt.NDArray[np.float32]:
        """Logits at every position of a fresh sequence, float32 [T, vocab]."""
        rows = SequenceRows(0, 0, ids, self.blocks, logits=range(len(ids)))
        logits = self.model.forward(StepBatch.of([rows])).logits
        result: npt.NDArray[np.float32] = logits.cpu().numpy()
        return result


def load(directory: str, device: str = "cpu") -> GoldenModel:
    """Load a checkpoint directory with all experts."""
    return GoldenModel(Path(directory), torch.device(device))
