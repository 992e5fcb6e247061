"""Where experts lie as ranks fall and return: the group's memory of its placement. Pure but for `read_shape`."""

import json
from pathlib import Path

import msgspec

from phalanx.protocol.errors import ConfigError
from phalanx.protocol.placement import (
    Placement,
    after_joins,
    after_loss,
    initial_placement,
    slots_per_rank,
    widened,
)

_encoder = msgspec.msgpack.Encoder()


class GroupPlacements:
    """Follows the group from one membership to the next, moving as few experts as possible."""

    def __init__(self, num_layers: int, experts: int, ranks: int) -> None:
        self._num_layers, self._experts = num_layers, experts
        self._slots = slots_per_rank(experts, ranks)
        self.current: Placement | None = None

    def resize(self, ranks: int) -> None:
        """The group shall have so many seats from now on: more of them share the experts, or fewer."""
        self._slots = slots_per_rank(self._experts, ranks)

    def settle(self, seats: tuple[int, ...]) -> bytes:
        """The placement for a group of these seats; at least one.

        A seat that was lost and is taken again since the last call keeps its slots: its new worker has
        to load its experts whichever they are. Slots are made for the loss of any one rank; when more
        fall, the survivors get as many as it takes, down to a last one that holds everything. A
        newcomer takes no more than its share, and seats that hold more than theirs let go of copies
        that others have: that loads nothing and spreads the work.
        """
        self.current = self._follow(seats)
        return _encoder.encode(self.current)

    def _follow(self, seats: tuple[int, ...]) -> Placement:
        placement = self.current
        if placement is None:
            slots = max(self._slots, -(-self._experts // len(seats)))
            return initial_placement(self._num_layers, self._experts, seats, slots)
        # Joins first: two survivors of three may have no room for what the newcomer can take.
        placement = after_joins(placement, seats, self._slots)
        for seat in sorted(set(placement.seats) - set(seats)):
            needed = -(-self._experts // (len(placement.seats) - 1))
            if needed > placement.slots_per_rank:
                placement = widened(placement, needed)
            placement = after_loss(placement, seat)
        return placement


def read_shape(model_dir: Path) -> tuple[int, int]:
    """(layers, routed experts) of the checkpoint. Raises ConfigError when its config.json is unusable."""
    path = model_dir / "config.json"
    try:
        text = json.loads(path.read_text())["text_config"]
        shape = (int(text["num_hidden_layers"]), int(text["n_routed_experts"]))
    except OSError as error:
        raise ConfigError(f"cannot read the model's {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a model of this family: {error!r}") from error
    if min(shape) < 1:
        raise ConfigError(
            f"{path}: {shape[0]} layers and {shape[1]} experts, both must be positive"
        )
    return shape
