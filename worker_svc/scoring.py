"""Log-probabilities of the prompt tokens that a step's rows precede, as records for the scheduler."""

import numpy as np
import torch

from phalanx.kernels.reference.logprobs import prompt_logprobs, token_ranks
from phalanx.protocol.prompt_logprobs import record_bytes
from phalanx.worker_svc.model.model import PendingStep

LOGITS_ELEMENTS = 1 << 24  # of the rows that are scored at a time: 64 MiB of float32


def score_rows(pending: PendingStep, first: int, ids: torch.Tensor, num_top: int) -> bytes:
    """Records (`protocol/prompt_logprobs.py`) of `ids`, which follow the rows from `first` on.

    Where the model's numbers are broken the logprob is nan and nothing else is told.

    Args:
        ids: int64 [n], n > 0.
    """
    size = max(1, LOGITS_ELEMENTS // pending.logits.shape[1])
    parts = []
    for at in range(0, len(ids), size):
        chosen = ids[at : at + size]
        rows = slice(first + at, first + at + len(chosen))
        parts.append(_records(pending.logits_of(rows), chosen, num_top))
    return b"".join(parts)


def _records(logits: torch.Tensor, ids: torch.Tensor, num_top: int) -> bytes:
    words = np.zeros((len(ids), record_bytes(num_top) // 4), np.int32)
    words[:, 0] = np.float32(np.nan).view(np.int32)
    words[:, 2 : 2 + num_top] = -1
    good = logits.amax(1).isfinite()
    logits, ids = logits[good], ids.to(logits.device)[good]
    if len(ids):
        found = prompt_logprobs(logits, ids, num_top)
        columns = (
            found.logprobs[:, None].view(torch.int32),
            token_ranks(logits, ids)[:, None].int(),
            found.top_ids.int(),
            found.top_logprobs.view(torch.int32),
        )
        words[good.cpu().numpy()] = torch.cat(columns, dim=1).cpu().numpy()
    return words.tobytes()
