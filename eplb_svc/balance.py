"""Plans which experts get copies and where the copies go, from a window of counts. Pure, numpy only.

Both stages are the greedy ones of DeepSeek's engine: copies go to whatever lowers the hottest single
copy most, and each copy, heaviest first, goes where the busiest rank stays lowest. Both score every
step of the window by itself and then add, because ranks wait for each other at every step: two experts
busy at different steps sit well together, whatever their totals.

Where this differs from DeepSeek's: an expert never gets more copies than there are ranks, and never two
on one rank (`distinct`): a second copy there takes a slot and, with tokens split evenly over copies,
draws more of its load to the same rank.

Layouts are int64 [ranks, slots], the expert in each slot, -1 where empty.
"""

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]  # [steps, experts]: tokens routed to each expert at each step
Layout = npt.NDArray[np.int64]
Loads = npt.NDArray[np.float64]

EMPTY = -1


def startup_layout(experts: int, ranks: int, slots_per_rank: int) -> Layout:
    """DeepSeek's layout before any load is known: slots in order, then copies of experts 0, 1, ..."""
    _check_room(experts, ranks, slots_per_rank)
    return (np.arange(ranks * slots_per_rank) % experts).reshape(ranks, slots_per_rank)


def plan(counts: Counts, ranks: int, slots_per_rank: int, *, distinct: bool = True) -> Layout:
    """A layout for the window's load; the current one plays no part (see `worth_applying`).

    Args:
        counts: [steps, experts], one layer.
        distinct: False gives DeepSeek's plan exactly, two copies on a rank included.

    Raises:
        ValueError: more experts than slots.
    """
    experts = counts.shape[1]
    _check_room(experts, ranks, slots_per_rank)
    slots = ranks * slots_per_rank
    copied = replicate(counts, slots - experts, max_copies=ranks if distinct else slots)
    return place(counts, copied, ranks, slots_per_rank, distinct=distinct)


def replicate(counts: Counts, extra: int, *, max_copies: int) -> list[int]:
    """Stage A: the experts that get a further copy, in the order of choosing.

    Each round takes the expert whose copy gives the smallest sum, over steps, of the hottest single
    copy; ties to the lower expert. An expert with all the copies it may have is left out of the sum:
    nothing can cool it further, and it would hide what can be. Only an expert that is hottest
    somewhere can lower the sum, so it is enough to know, for each step, the two hottest copies.

    Args:
        extra: copies to give beyond the first of each expert.
        max_copies: copies an expert may have; fewer are given when all experts have that many.
    """
    num_steps, experts = counts.shape
    load = counts.astype(np.float64)
    copies = np.ones(experts, dtype=np.int64)
    steps = np.arange(num_steps)
    chosen: list[int] = []
    first, hottest, second = _top_two(load)
    while len(chosen) < extra and copies.min() < max_copies:
        relieved = counts[steps, first] / (copies[first] + 1)
        gain = np.bincount(first, weights=hottest - np.maximum(second, relieved), minlength=experts)
        gain[copies >= max_copies] = -1.0
        expert = int(gain.argmax())
        copies[expert] += 1
        chosen.append(expert)
        touched = load[:, expert] >= second  # elsewhere neither of the two is this expert
        capped = copies[expert] == max_copies
        load[:, expert] = 0.0 if capped else counts[:, expert] / copies[expert]
        first[touched], hottest[touched], second[touched] = _top_two(load[touched])
    return chosen


def place(
    counts: Counts, copied: list[int], ranks: int, slots_per_rank: int, *, distinct: bool = True
) -> Layout:
    """Stage B: each copy, heaviest first, to the non-full rank that keeps the sum, over steps, of the
    busiest rank smallest; ties to the lower rank, copies of equal weight in slot order.

    Args:
        copied: from `replicate`; slot order is experts 0, 1, ... and then these.
    """
    experts = counts.shape[1]
    expert_of = np.array([*range(experts), *copied], dtype=np.int64)
    per_copy = counts / np.bincount(expert_of, minlength=experts)
    order = np.argsort(-per_copy.sum(0)[expert_of], kind="stable")
    busy = np.zeros((ranks, counts.shape[0]))
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert in expert_of[order].tolist():
        room = [r for r in range(ranks) if len(held[r]) < slots_per_rank]
        fit = [r for r in room if expert not in held[r]] if distinct else room
        if fit:
            rank = fit[_best(busy, fit, per_copy[:, expert])]
        else:
            rank = _make_room(held, busy, per_copy, expert, room[0])
        held[rank].append(expert)
        busy[rank] += per_copy[:, expert]
    return np.array([[*h, *[EMPTY] * (slots_per_rank - len(h))] for h in held], dtype=np.int64)


def rank_loads(counts: Counts, layout: Layout) -> Loads:
    """Tokens each rank computes at each step, [steps, ranks], an expert's tokens split evenly.

    Raises:
        ValueError: an expert with tokens has no slot.
    """
    experts = counts.shape[1]
    on_rank = np.stack([np.bincount(row[row >= 0], minlength=experts) for row in layout])
    copies = on_rank.sum(0)
    homeless = np.flatnonzero((copies == 0) & counts.any(0))
    if homeless.size:
        raise ValueError(f"experts {homeless.tolist()} have tokens but no slot in the layout")
    # One order of adding for every machine: einsum and BLAS would choose their own.
    loads = np.zeros((counts.shape[0], layout.shape[0]))
    for expert in np.flatnonzero(copies):
        loads += (counts[:, expert] / copies[expert])[:, None] * on_rank[:, expert]
    return loads


def moe_lb(counts: Counts, layout: Layout) -> float:
    """How much longer the window takes than with perfect balance: the busiest rank of each step,
    summed over steps, over the mean rank likewise. 1 is perfect; an idle window counts as such."""
    loads = rank_loads(counts, layout)
    mean = counts.sum() / layout.shape[0]
    return float(loads.max(1).sum() / mean) if mean else 1.0


def lower_bound(counts: Counts, ranks: int, slots_per_rank: int) -> float:
    """What no layout's `moe_lb` can beat.

    At each step the busiest rank has at least the mean, and at least the hottest copy. Copies beyond
    one a rank do not cool an expert (some rank still has its 1/ranks share), so the hottest copy is
    at least what it would be if that step alone chose all copies: of the values `load / k`, k up to
    `ranks`, the `extra` largest can be removed by a further copy, in descending order.
    """
    num_steps, experts = counts.shape
    _check_room(experts, ranks, slots_per_rank)
    extra = ranks * slots_per_rank - experts
    shares = (counts[:, :, None] / np.arange(1, ranks + 1)).reshape(num_steps, ranks * experts)
    hottest = counts.max(1) / ranks if num_steps else np.zeros(0)
    if extra < shares.shape[1]:
        left = np.sort(shares, axis=1)[:, shares.shape[1] - 1 - extra]
        hottest = np.maximum(hottest, left)
    mean = counts.sum(1) / ranks
    total = float(mean.sum())
    return float(np.maximum(mean, hottest).sum() / total) if total else 1.0


def worth_applying(
    counts: Counts, current: Layout, planned: Layout, *, margin: float, moving_cost: float = 0.0
) -> bool:
    """Whether the plan beats the layout in place by more than it costs.

    Greedy starts from nothing and can be worse than what it replaces, on the very window it planned
    from; and weights in motion cost memory traffic even when the balance is already good.

    Args:
        margin: improvement of `moe_lb` that is asked for, for instance 0.02.
        moving_cost: what moving costs over the plan's life, in the same unit.
    """
    return moe_lb(counts, planned) + moving_cost <= moe_lb(counts, current) - margin


def _top_two(load: Loads) -> tuple[npt.NDArray[np.int64], Loads, Loads]:
    """(expert of the largest, lower on ties; largest; second largest) of each step."""
    first = load.argmax(1)
    rows = np.arange(load.shape[0])
    hottest = load[rows, first]
    if load.shape[1] == 1:
        return first, hottest, np.zeros_like(hottest)
    return first, hottest, np.partition(load, -2, axis=1)[:, -2]


def _best(busy: Loads, ranks: list[int], added: Loads) -> int:
    """Index into `ranks` of the one that may take the load with the lowest sum of peaks."""
    peaks = np.maximum(busy.max(0), busy[ranks] + added)
    return int(peaks.sum(1).argmin())


def _make_room(
    held: list[list[int]], busy: Loads, per_copy: Loads, expert: int, target: int
) -> int:
    """Every rank with room already has this expert: move another copy into `target`'s room from a
    full rank that lacks it, and return that rank.

    One always exists: no expert has more copies than ranks, so some rank lacks it; that rank is full,
    and so holds an expert which `target`, with room left, does not.
    """
    swaps = [
        (rank, other)
        for rank in range(len(held))
        if expert not in held[rank]
        for other in held[rank]
        if other not in held[target]
    ]

    def peaks(swap: tuple[int, int]) -> float:
        rank, other = swap
        after = busy.copy()
        after[rank] += per_copy[:, expert] - per_copy[:, other]
        after[target] += per_copy[:, other]
        return float(after.max(0).sum())

    rank, other = min(swaps, key=peaks)  # the first of equals: lower rank, earlier slot
    held[rank].remove(other)
    held[target].append(other)
    busy[rank] -= per_copy[:, other]
    busy[target] += per_copy[:, other]
    return rank


def _check_room(experts: int, ranks: int, slots_per_rank: int) -> None:
    if experts > ranks * slots_per_rank:
        raise ValueError(
            f"{experts} experts do not fit into {ranks} ranks x {slots_per_rank} slots; "
            "raise the slots per rank"
        )
