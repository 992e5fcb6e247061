"""Which expert sits in which slot of which seat, and how that changes when a seat falls or returns.

A seat is a rank's fixed number; a lost seat leaves a hole and its replacement takes the same number.
Every function is a pure function of its arguments, so that every process that is told "seat 2 was
lost" computes the same placement. Slots are never reordered: what stays in place need not be loaded.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

EMPTY = -1

Item = TypeVar("Item")

SeatSlots = tuple[int, ...]  # expert in each slot of one seat, EMPTY where there is none
LayerSlots = tuple[SeatSlots, ...]  # parallel to Placement.seats


class PlacementError(ValueError):
    """The experts cannot be placed as asked; the message has the numbers."""


class Placement(msgspec.Struct, frozen=True):
    """Experts of every layer. Every expert has at least one copy in every layer."""

    version: int  # grows by one with every change
    num_experts: int  # routed experts of a layer, 0..num_experts - 1
    slots_per_rank: int
    seats: tuple[int, ...]  # ascending
    physical_to_logical: tuple[LayerSlots, ...]  # [layer][seat's index in `seats`][slot]


def slots_per_rank(experts: int, ranks: int) -> int:
    """Slots a rank needs so that any one rank may be lost and every expert still has a place."""
    if experts < 1 or ranks < 1:
        raise PlacementError(f"{experts} experts on {ranks} ranks: both must be at least 1")
    return experts if ranks == 1 else -(-experts // (ranks - 1))


def initial_placement(
    num_layers: int, experts: int, seats: Iterable[int], slots_per_rank: int
) -> Placement:
    """The placement before any load is known, the same in every layer.

    Experts are dealt in runs, as evenly as they go. Spare slots take copies so that as many experts
    as possible keep a copy whichever single seat is lost: second copies before third ones, never
    beside the first, and drawn evenly from all seats so that no seat's loss is much dearer than
    another's.

    Raises:
        PlacementError: no seats, a seat twice, or more experts than slots.
    """
    ordered = tuple(sorted(seats))
    if not ordered or len(set(ordered)) < len(ordered):
        raise PlacementError(f"seats {ordered} must be distinct and at least one")
    _check_room(experts, len(ordered), slots_per_rank)
    bounds = [experts * i // len(ordered) for i in range(len(ordered) + 1)]
    held = [list(range(bounds[i], bounds[i + 1])) for i in range(len(ordered))]
    _deal_copies(held, experts, slots_per_rank, range(len(ordered)))
    layer = tuple(_padded(slots, slots_per_rank) for slots in held)
    return Placement(0, experts, slots_per_rank, ordered, (layer,) * num_layers)


def after_loss(placement: Placement, lost_seat: int) -> Placement:
    """The placement of the survivors, who keep what they hold.

    An expert whose last copy is gone takes an empty slot, else the place of a redundant copy: one
    load for each such expert and no other. Loads are spread over the survivors, because they happen
    at the same time while everybody waits.

    Raises:
        PlacementError: the seat is not in the placement, or the survivors have too few slots.
    """
    if lost_seat not in placement.seats:
        raise PlacementError(f"seat {lost_seat} is not one of {placement.seats}")
    gone = placement.seats.index(lost_seat)
    seats = _without(placement.seats, gone)
    _check_room(placement.num_experts, len(seats), placement.slots_per_rank)
    repaired = {
        layer: _repaired(_without(layer, gone), placement.num_experts)
        for layer in set(placement.physical_to_logical)
    }
    return Placement(
        placement.version + 1,
        placement.num_experts,
        placement.slots_per_rank,
        seats,
        tuple(repaired[layer] for layer in placement.physical_to_logical),
    )


def widened(placement: Placement, slots: int) -> Placement:
    """The same placement with more slots a rank, the new ones empty: for survivors who must hold more."""
    assert slots >= placement.slots_per_rank
    layers = tuple(
        tuple(_padded(list(held), slots) for held in layer)
        for layer in placement.physical_to_logical
    )
    return msgspec.structs.replace(placement, slots_per_rank=slots, physical_to_logical=layers)


def after_join(placement: Placement, seat: int, most: int | None = None) -> Placement:
    """The placement with one more seat; the others keep what they hold.

    The newcomer takes copies of the experts that have the fewest, drawn evenly from the other seats:
    one for each slot, or `most` of them.

    Raises:
        PlacementError: the seat is already there.
    """
    if seat in placement.seats:
        raise PlacementError(f"seat {seat} is already one of {placement.seats}")
    seats = tuple(sorted((*placement.seats, seat)))
    index = seats.index(seat)
    wanted = placement.slots_per_rank if most is None else min(most, placement.slots_per_rank)
    # Layers are all alike until loads differ: work out each kind once, everybody waits for this.
    joined: dict[LayerSlots, LayerSlots] = {}
    for layer in set(placement.physical_to_logical):
        held = [[e for e in slots if e != EMPTY] for slots in layer]
        held.insert(index, [])
        _deal_copies(held, placement.num_experts, wanted, (index,))
        newcomer = _padded(held[index], placement.slots_per_rank)
        joined[layer] = (*layer[:index], newcomer, *layer[index:])
    return Placement(
        placement.version + 1,
        placement.num_experts,
        placement.slots_per_rank,
        seats,
        tuple(joined[layer] for layer in placement.physical_to_logical),
    )


def after_joins(placement: Placement, seats: Iterable[int], most: int) -> Placement:
    """The placement with these seats as well, each with at most `most` experts a layer.

    Seats that hold more than that let go of copies that others have then: it loads nothing and spreads
    the work.
    """
    joining = sorted(set(seats) - set(placement.seats))
    for seat in joining:
        placement = after_join(placement, seat, most)
    return trimmed(placement, most) if joining else placement


def trimmed(placement: Placement, most: int) -> Placement:
    """The same placement with at most `most` experts a seat and layer, where others hold copies enough.

    The seat that holds most lets go first, of the expert with most copies: never of a last copy. The
    slots become empty, so nothing has to be loaded.
    """
    trims = {layer: _trimmed(layer, most) for layer in set(placement.physical_to_logical)}
    layers = tuple(trims[layer] for layer in placement.physical_to_logical)
    if layers == placement.physical_to_logical:
        return placement
    return msgspec.structs.replace(
        placement, version=placement.version + 1, physical_to_logical=layers
    )


def slots_used(placement: Placement, seat: int) -> int:
    """Slots a layer that the seat must have: up to the last one that holds an expert in any layer."""
    layers = {
        _slots_of(placement, layer, seat) for layer in range(len(placement.physical_to_logical))
    }
    used = [at for slots in layers for at, expert in enumerate(slots) if expert != EMPTY]
    return max(used, default=-1) + 1


def moves(old: Placement, new: Placement) -> dict[int, list[tuple[int, int, int]]]:
    """What each seat must load to go from `old` to `new`: seat -> [(layer, slot, expert)].

    Seats with nothing to load are left out.
    """
    loads: dict[int, list[tuple[int, int, int]]] = {}
    for layer, seat_slots in enumerate(new.physical_to_logical):
        for index, seat in enumerate(new.seats):
            before = _slots_of(old, layer, seat)
            for slot, expert in enumerate(seat_slots[index]):
                if expert != EMPTY and (slot >= len(before) or before[slot] != expert):
                    loads.setdefault(seat, []).append((layer, slot, expert))
    return loads


def copies(placement: Placement, layer: int) -> list[list[tuple[int, int]]]:
    """For each expert of a layer, where its copies are: [(seat, slot)], ascending."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(placement.num_experts)]
    slots_by_seat = placement.physical_to_logical[layer]
    for seat, slots in zip(placement.seats, slots_by_seat, strict=True):
        for slot, expert in enumerate(slots):
            if expert != EMPTY:
                found[expert].append((seat, slot))
    return found


def choose_copy(
    copy_key: npt.NDArray[np.int64] | npt.NDArray[np.uint64], num_copies: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Which copy a token uses: a hash of its key, spread evenly over the copies.

    A function of the token alone (request and position, not its row in the batch), so that the same
    token meets the same copy wherever it is computed. The hash is SplitMix64's finaliser, scaled by
    Lemire's multiply-shift (arXiv 1805.10941).

    Args:
        copy_key: any 64-bit integers.
        num_copies: at least 1, below 2**31; broadcast against the keys.

    Returns:
        int64, each in 0..num_copies - 1.
    """
    word = copy_key.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    scaled = (word >> np.uint64(32)) * num_copies.astype(np.uint64)
    return (scaled >> np.uint64(32)).astype(np.int64)


def _check_room(experts: int, ranks: int, slots: int) -> None:
    if experts > ranks * slots:
        raise PlacementError(
            f"{experts} experts do not fit into {ranks} ranks x {slots} slots = {ranks * slots}; "
            "start more ranks, or raise the slots per rank"
        )


def _deal_copies(held: list[list[int]], experts: int, slots: int, receivers: Sequence[int]) -> None:
    """Fill the free slots of `receivers` with further copies, in place.

    The receiver with most room goes first, and takes an expert of fewest copies that it lacks. Among
    those it prefers one from the seat with most such experts and room together: that seat cannot
    take its own experts, so the two must not be what is left in the end.
    """
    count = Counter(expert for seat in held for expert in seat)
    present = [set(seat) for seat in held]
    room = [slots - len(held[i]) if i in receivers else 0 for i in range(len(held))]
    open_seats = list(receivers)
    while open_seats:
        receiver = max(open_seats, key=lambda i: (room[i], -i))
        lacking = [e for e in range(experts) if e not in present[receiver]]
        if not room[receiver] or not lacking:
            open_seats.remove(receiver)
            continue
        fewest = min(count[e] for e in lacking)
        rare = {e for e in lacking if count[e] == fewest}
        offers = [rare & seat for seat in present]
        donors = [i for i, offer in enumerate(offers) if offer]
        donor = max(donors, key=lambda i: (len(offers[i]) + room[i], -i))
        expert = min(offers[donor])
        held[receiver].append(expert)
        present[receiver].add(expert)
        room[receiver] -= 1
        count[expert] += 1


def _repaired(layer: LayerSlots, experts: int) -> LayerSlots:
    """The layer with every missing expert back in it."""
    held = [list(slots) for slots in layer]
    count = Counter(expert for slots in held for expert in slots if expert != EMPTY)
    # Slots that may be taken, the best last: an empty one, then that of the expert most copied.
    offers = [
        sorted(
            (slot for slot, old in enumerate(slots) if old == EMPTY or count[old] > 1),
            key=lambda slot: (slots[slot] == EMPTY, count[slots[slot]], -slot),
        )
        for slots in held
    ]
    loads = [0] * len(held)
    for expert in [e for e in range(experts) if not count[e]]:
        for i, slots in enumerate(held):  # a copy taken elsewhere may have made this one the last
            while offers[i] and slots[offers[i][-1]] != EMPTY and count[slots[offers[i][-1]]] == 1:
                offers[i].pop()
        index = min((i for i in range(len(held)) if offers[i]), key=lambda i: (loads[i], i))
        slot = offers[index].pop()
        count[held[index][slot]] -= 1
        count[expert] += 1
        held[index][slot] = expert
        loads[index] += 1
    return tuple(tuple(slots) for slots in held)


def _trimmed(layer: LayerSlots, most: int) -> LayerSlots:
    held = [list(slots) for slots in layer]
    count = Counter(expert for slots in held for expert in slots if expert != EMPTY)
    sizes = [sum(expert != EMPTY for expert in slots) for slots in held]
    wide = [i for i, size in enumerate(sizes) if size > most]
    while wide:
        index = max(wide, key=lambda i: (sizes[i], -i))
        slots = held[index]
        spare = [slot for slot, e in enumerate(slots) if e != EMPTY and count[e] > 1]
        if not spare or sizes[index] <= most:
            wide.remove(index)
            continue
        slot = max(spare, key=lambda slot: (count[slots[slot]], -slot))
        count[slots[slot]] -= 1
        slots[slot] = EMPTY
        sizes[index] -= 1
    return tuple(tuple(slots) for slots in held)


def _slots_of(placement: Placement, layer: int, seat: int) -> SeatSlots:
    if seat not in placement.seats:
        return ()
    return placement.physical_to_logical[layer][placement.seats.index(seat)]


def _padded(slots: list[int], size: int) -> SeatSlots:
    return (*slots, *(EMPTY,) * (size - len(slots)))


def _without(items: tuple[Item, ...], index: int) -> tuple[Item, ...]:
    return items[:index] + items[index + 1 :]
