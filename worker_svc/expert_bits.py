"""The bits of a rank's routed experts, as its scrubber looks at them (`scrub.py`)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phalanx.protocol.errors import NoRoom
from phalanx.protocol.placement import EMPTY
from phalanx.worker_svc.gpu_room import room_for
from phalanx.worker_svc.model.checkpoint import Packed, Weights
from phalanx.worker_svc.sampled_rows import SampledRows
from phalanx.worker_svc.scrub import Recomputed, Slot

_PARTS = 3  # gate, up, down


class ExpertBits:
    def __init__(self, weights: Weights, seat: int) -> None:
        self._weights = weights
        self._rng = random.Random(seat)
        self.rows = SampledRows(weights, self._rng)
        self._layers = range(weights.config.num_hidden_layers)
        self._known = [weights.slots(layer) for layer in self._layers]

    def take_fresh(self) -> list[Slot]:
        fresh: list[Slot] = []
        for layer in self._layers:
            now, before = self._weights.slots(layer), self._known[layer]
            if now != before:
                self._known[layer] = now
                padded = before + (EMPTY,) * (len(now) - len(before))
                fresh += [
                    slot
                    for slot, old in zip(self._in_layer(layer), padded, strict=True)
                    if slot.expert not in (EMPTY, old)
                ]
        return fresh

    def held(self) -> list[Slot]:
        everything = (slot for layer in self._layers for slot in self._in_layer(layer))
        return [slot for slot in everything if slot.expert != EMPTY]

    def _in_layer(self, layer: int) -> list[Slot]:
        return [Slot(layer, *slot) for slot in enumerate(self._weights.slots(layer))]

    def holds(self, held: Slot) -> bool:
        slots = self._weights.slots(held.layer)
        return held.slot < len(slots) and slots[held.slot] == held.expert

    def read(self, held: Slot) -> list[Packed]:
        return [self._weights.read_matrix(held.layer, held.expert, part) for part in range(_PARTS)]

    def compare(self, held: Slot, stored: list[Packed]) -> Iterator[bool | None]:
        for part, matrix in enumerate(stored):
            same = None
            with _short_of_room(), torch.inference_mode():
                same = self._weights.holds(held.layer, held.slot, part, matrix)
            yield same

    def want_row(self) -> None:
        self.rows.want()

    def forget_row(self) -> None:
        self.rows.forget()

    def compute_again(self) -> Recomputed | None:
        found = None
        with _short_of_room(), torch.inference_mode():
            found = self.rows.compute_again()
        if found is None:
            return None
        row, same = found
        return Recomputed(row.seat, row.layer, row.expert, same)

    def flip(self, wanted: str) -> list[Slot]:
        """Make one bit of an expert wrong, on purpose: of LAYER.EXPERT in each slot that has it, or of any.
        Returns which, none where it is not here."""
        held = [slot for slot in self.held() if wanted in ("", f"{slot.layer}.{slot.expert}")]
        chosen = held if wanted else self._rng.sample(held, 1)
        with torch.inference_mode():
            for slot in chosen:
                self._weights.flip_bit(slot.layer, slot.slot)
        return chosen


@contextmanager
def _short_of_room() -> Iterator[None]:
    """What finds no memory is done another time."""
    try:
        with room_for("while experts were scrubbed"):
            yield
    except (NoRoom, MemoryError):
        pass
