"""Whom does the group wait for? Pure."""

from collections.abc import Mapping


def awaited(awaits: Mapping[int, int]) -> frozenset[int]:
    """The seats that keep the group waiting.

    A rank that waits for peers could not be quicker, so it is none of them; only where all who are waited for
    wait themselves, in a circle, it may be any.

    Args:
        awaits: of each rank of the group, the seats that it waits for, one bit each; 0: it does not wait.
    """
    named = 0
    for mask in awaits.values():
        named |= mask
    seats = {seat for seat in awaits if named >> seat & 1}
    return frozenset({seat for seat in seats if not awaits[seat]} or seats)
