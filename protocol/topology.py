"""Who is in the expert-parallel group, and what is proposed to it: published by the supervisor on the board."""

from typing import Literal

import msgspec

SeatState = Literal["absent", "loading", "joining", "member", "lost"]


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """One rank. Seats are never renumbered: a hole stays a hole, a replacement takes the same seat."""

    seat: int
    worker_incarnation: int  # 0: no worker yet
    scheduler_incarnation: int
    state: SeatState
    scheduler_left: bool = False  # the scheduler before that one ended because it was told to
    kept_out: bool = False  # it comes into no group before somebody does something about it


class Topology(msgspec.Struct, frozen=True, array_like=True):
    """`epoch` is the even epoch that this membership is for: steps run while the epoch word equals it.

    `placement` is opaque here: msgpack of `phalanx.protocol.placement.Placement`, empty for no group.
    """

    epoch: int
    seats: tuple[Seat, ...] = ()
    placement: bytes = b""
    fingerprint: str = ""  # of the numerics; a worker that differs does not join

    def members(self) -> list[int]:
        return [seat.seat for seat in self.seats if seat.state == "member"]

    def seat(self, number: int) -> Seat | None:
        return next((seat for seat in self.seats if seat.seat == number), None)


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """Another placement for the group of that epoch, while it runs. Only its members care.

    A seat keeps each expert that stays in its slot. Further copies go where the placement that runs has
    no expert: there the worker may copy them while steps are taken. The version is higher than any before.
    """

    epoch: int
    placement: bytes  # as in `Topology`
