"""Where experts lie as ranks fall and return: the group's memory of its placement. Pure but for `read_shape`."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from phalanx.protocol.errors import ConfigError
from phalanx.protocol.placement import (
    EMPTY,
    Placement,
    SeatSlots,
    after_joins,
    after_loss,
    initial_placement,
    slots_per_rank,
    slots_used,
    widened,
)

_encoder = msgspec.msgpack.Encoder()


class GroupPlacements:
    """Follows the group from one membership to the next, moving as few experts as possible."""

    def __init__(self, num_layers: int, experts: int, ranks: int) -> None:
        self._num_layers, self._experts = num_layers, experts
        self._slots = slots_per_rank(experts, ranks)
        self.current: Placement | None = None  # that the group runs, or ran last
        self.proposed: Placement | None = None  # to the running group; members may run it already
        self.adopted = -1  # the version that was proposed and is in force since
        self._top = 0  # no version is ever given to two placements

    def propose(self, placement: Placement) -> Placement:
        """Note what is proposed to the running group; returns it under a version of its own."""
        self._top += 1
        self.proposed = msgspec.structs.replace(placement, version=self._top)
        return self.proposed

    def adopt(self) -> bytes:
        """The group runs what was proposed."""
        assert self.proposed is not None
        self.current, self.proposed = self.proposed, None
        self.adopted = self.current.version
        return _encoder.encode(self.current)

    def forget(self) -> None:
        """Nobody runs what was proposed, nor will."""
        self.proposed = None

    def resize(self, ranks: int) -> None:
        """The group shall have so many seats from now on: more of them share the experts, or fewer."""
        self._slots = slots_per_rank(self._experts, ranks)

    def shortage(self, rooms: Mapping[int, int]) -> str:
        """Why a group of these seats cannot hold all experts, for people; empty when it can.

        Args:
            rooms: of each seat, the slots of a layer that it has room for; 0: any number.
        """
        if not rooms:
            return "no worker is ready"
        room, ranks = self._least(rooms), len(rooms)
        if room * ranks >= self._experts:
            return ""
        names = ", ".join(f"worker-{seat}" for seat in sorted(rooms))
        return (
            f"{names} {'has' if ranks == 1 else 'have'} room for {ranks} x {room} of {self._experts}"
            f" experts a layer, so it takes {-(-self._experts // room)} ranks"
        )

    def settle(self, rooms: Mapping[int, int], runs: Collection[int] = ()) -> bytes | None:
        """The placement for a group of these seats; None when there is a `shortage`.

        A seat that was lost and is taken again since the last call keeps its slots: its new worker has
        to load its experts whichever they are. Slots are made for the loss of any one rank; when more
        fall, the survivors get as many as it takes, as far as they have room, down to a last one that holds
        everything. A newcomer takes no more than its share, and seats that hold more than theirs let go of
        copies that others have: that loads nothing and spreads the work.

        Args:
            runs: The versions that the survivors of the last group ran when it stopped. What was proposed to
                it is where they go on from if one of them ran it: so little as possible is loaded, and who
                ran it lacks nothing.
        """
        if self.proposed is not None and self.proposed.version in runs:
            self.adopt()
        self.forget()
        if self.shortage(rooms):
            return None
        seats, most = tuple(sorted(rooms)), min(self._slots, self._least(rooms))
        placement = self._follow(seats, most)
        if any(slots_used(placement, seat) > self._room(rooms[seat]) for seat in seats):
            # One of them has less room than whoever sat there before: they are dealt anew.
            placement = msgspec.structs.replace(
                self._dealt(seats, most), version=placement.version + 1
            )
        if placement != self.current or self._top > placement.version:
            self._top = max(self._top + 1, placement.version)
            placement = msgspec.structs.replace(placement, version=self._top)
        self.current = placement
        return _encoder.encode(placement)

    def _room(self, slots: int) -> int:
        return slots or self._experts

    def _least(self, rooms: Mapping[int, int]) -> int:
        """Slots of a layer that each of them has room for: seats share experts evenly."""
        return min(map(self._room, rooms.values()))

    def _dealt(self, seats: tuple[int, ...], most: int) -> Placement:
        slots = max(most, -(-self._experts // len(seats)))
        return initial_placement(self._num_layers, self._experts, seats, slots)

    def _follow(self, seats: tuple[int, ...], most: int) -> Placement:
        placement = self.current
        if placement is None:
            return self._dealt(seats, most)
        # Joins first: two survivors of three may have no room for what the newcomer can take.
        placement = after_joins(placement, seats, most)
        for seat in sorted(set(placement.seats) - set(seats)):
            needed = -(-self._experts // (len(placement.seats) - 1))
            if needed > placement.slots_per_rank:
                placement = widened(placement, needed)
            placement = after_loss(placement, seat)
        return placement


def objection(running: Placement, proposed: Placement, slots: Mapping[int, int]) -> str:
    """Why the running group cannot go over to the proposed placement, for people; empty when it can.

    Args:
        slots: of a seat, the expert slots of a layer that it has; absent: any number.
    """
    shape = (proposed.seats, proposed.num_experts, len(proposed.physical_to_logical))
    if shape != (running.seats, running.num_experts, len(running.physical_to_logical)):
        return f"the plan is for other seats, experts or layers than run: {shape}"
    if proposed.version != running.version + 1:
        return f"the plan starts from placement {proposed.version - 1}, the group runs {running.version}"
    everyone, width = set(range(running.num_experts)), proposed.slots_per_rank
    for layer, rows in enumerate(proposed.physical_to_logical):
        if len(rows) != len(proposed.seats) or any(len(row) != width for row in rows):
            return f"layer {layer} has not {width} slots at each of {len(proposed.seats)} seats"
        if {expert for row in rows for expert in row} - {EMPTY} != everyone:
            return f"layer {layer} has not every one of {running.num_experts} experts, or others"
        for seat, old, row in zip(
            proposed.seats, running.physical_to_logical[layer], rows, strict=True
        ):
            if text := _conflict(old, row, slots.get(seat, width)):
                return f"layer {layer} of worker-{seat}: {text}"
    return ""


def _conflict(old: SeatSlots, row: SeatSlots, slots: int) -> str:
    """What is wrong with one seat's slots of a layer, which it runs with `old` until all are ready."""
    held = [expert for expert in row if expert != EMPTY]
    if len(set(held)) < len(held):
        return "an expert is there twice"
    for slot, expert in enumerate(row):
        before = old[slot] if slot < len(old) else EMPTY
        if expert in (EMPTY, before):
            continue
        if before != EMPTY:
            return f"slot {slot} is in use for expert {before}, and {expert} is to be copied there"
        if expert in old:
            return f"expert {expert} leaves its slot for slot {slot}"
        if slot >= slots:
            return f"slot {slot} is to be used, and there are {slots}"
    return ""


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
