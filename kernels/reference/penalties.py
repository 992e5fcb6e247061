"""Edits of the logits before anything is drawn, in the order of DeepSeek's engine.

Blocked ids, logit bias, penalties, then the bans on ending, then the grammar mask. Each edit touches
single elements by (row, id), so no order of summation exists that a neighbour could change. An id
outside the vocabulary is ignored: in a flat index it would be a write into the next row.
"""

import torch

from phalanx.kernels.reference.sampling_rows import Ragged, SamplingRows

BLOCKED = float("-inf")


def edit_logits(
    logits: torch.Tensor, rows: SamplingRows, mask: torch.Tensor | None
) -> torch.Tensor:
    """Logits as the draw sees them.

    Args:
        logits: float32 [n, V]; never written to.
        mask: bool [n, V], True where the grammar allows the token; None allows all.

    Returns:
        float32 [n, V]: `logits` itself when no row asks for anything, else an edited copy.
    """
    edits = _LazyCopy(logits)
    _block(edits, rows.blocked_ids)
    _add_bias(edits, rows)
    _penalise(edits, rows)
    _ban_ends(edits, rows)
    if mask is not None:
        edits.writable().masked_fill_(~mask, BLOCKED)
    return edits.current


class _LazyCopy:
    """The logits, copied at the first edit: most steps edit nothing."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.current = logits
        self._owned = False

    def writable(self) -> torch.Tensor:
        if not self._owned:
            self.current, self._owned = self.current.clone(), True
        return self.current

    @property
    def vocab(self) -> int:
        return self.current.shape[1]


def _cells(ids: Ragged, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, id) of every listed id that is in the vocabulary."""
    inside = (ids.values >= 0) & (ids.values < vocab)
    return ids.row_of_value()[inside], ids.values[inside]


def _block(edits: _LazyCopy, ids: Ragged) -> None:
    if ids.values.numel():
        edits.writable()[_cells(ids, edits.vocab)] = BLOCKED


def _add_bias(edits: _LazyCopy, rows: SamplingRows) -> None:
    ids, values = rows.bias_ids.values, rows.bias_values.values
    if ids.numel():
        inside = (ids >= 0) & (ids < edits.vocab)
        cells = rows.bias_ids.row_of_value()[inside], ids[inside]
        edits.writable().index_put_(cells, values[inside], accumulate=True)


def _penalise(edits: _LazyCopy, rows: SamplingRows) -> None:
    """Repetition (CTRL, arXiv 1909.05858: divide a positive logit, multiply another), then
    frequency and presence (OpenAI: subtract per occurrence, and once), over the row's outputs."""
    if not rows.outputs.values.numel():
        return
    repetition, presence, frequency = (
        rows.repetition_penalty,
        rows.presence_penalty,
        rows.frequency_penalty,
    )
    active = (repetition != 1) | (presence != 0) | (frequency != 0)
    if not bool(active.any()):
        return
    row, token = _cells(rows.outputs, edits.vocab)
    wanted = active[row]
    flat = row[wanted] * edits.vocab + token[wanted]
    cells, counts = torch.unique(flat, return_counts=True)
    row = cells // edits.vocab
    view = edits.writable().view(-1)
    value, factor = view[cells], repetition[row]
    value = torch.where(value > 0, value / factor, value * factor)
    view[cells] = value - frequency[row] * counts.float() - presence[row]


def _ban_ends(edits: _LazyCopy, rows: SamplingRows) -> None:
    """No end token among the first `first_n_no_eos` outputs; neither it nor a stop id before
    `min_tokens` of them exist."""
    too_short = rows.num_outputs < rows.min_tokens
    if 0 <= rows.eos_id < edits.vocab:
        no_eos = too_short | (rows.num_outputs < rows.first_n_no_eos)
        if bool(no_eos.any()):
            edits.writable()[no_eos, rows.eos_id] = BLOCKED
    if rows.stop_ids.values.numel() and bool(too_short.any()):
        row, token = _cells(rows.stop_ids, edits.vocab)
        banned = too_short[row]
        edits.writable()[row[banned], token[banned]] = BLOCKED
