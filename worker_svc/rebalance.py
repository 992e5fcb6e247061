"""Another placement of experts for a group that runs, without a stall.

The supervisor proposes it on the board. Each rank copies the experts that are new to it into slots that
the running placement leaves empty, and lays out where rows will go: a piece at a time, between its
rounds, so that no step waits for more than one piece. When that is done its votes say so, and from the
first round on in which all votes do, all ranks go by the new placement (`Group.votes`).

What is proposed may be withdrawn or replaced. A rank lets go of it only between rounds: a vote that was
posted is kept. A change of the group lets go of it, too: GO says what runs then.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec

from phalanx.protocol.board import Board
from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.failpoints import failpoint
from phalanx.protocol.placement import EMPTY, Placement, slots_used
from phalanx.protocol.topology import Proposal
from phalanx.worker_svc.group import Group


class NotReady(PhalanxError):
    """A rank cannot get ready for a placement; it goes on with the one that runs. For people."""


class Experts(Protocol):
    """The part of a backend that holds experts and knows where rows go."""

    @property
    def slots(self) -> int:
        """Of a layer, that there are; 0: any number."""

    def bring(self, layer: int, slot: int, expert: int) -> None:
        """Hold that expert in a slot which no step reads. Raises NotReady when it cannot be had."""

    def lay_out(self, placement: Placement, layer: int) -> None:
        """Work out where rows of that layer go under a placement that may come: layer 0 first."""

    def flip(self) -> None:
        """Go by what was laid out last, all layers of it, from the next step on."""


class Log(Protocol):
    def info(self, event: str, **fields: object) -> object: ...

    def warning(self, event: str, **fields: object) -> object: ...


class Rebalance:
    """A rank's part in it, for one epoch, which begins with `placement`.

    `turn` between rounds, `follow` after each.
    """

    def __init__(
        self, board: Board, group: Group, placement: Placement, experts: Experts, log: Log
    ) -> None:
        self._board, self._group, self._experts, self._log = board, group, experts, log
        self._row = board.seats[group.seat]
        self._running = placement
        self._seen = 0  # of the board: what was proposed then is known here
        self._coming: Placement | None = None
        self._work: Iterator[None] | None = None  # what is left to do for it

    def turn(self) -> bool:
        """A piece of the work. False when there is nothing to do.

        Only between rounds: with a vote posted, the others may count on what it says.
        """
        if not self._group.peers:
            return False
        seen = self._board.proposal_version
        if seen != self._seen:
            self._seen = seen
            self._let_go()
            self._consider(self._board.proposal())
            return True
        if self._work is None:
            return False
        try:
            next(self._work)
            self._row.placement_copied += 1
        except StopIteration:
            self._work = None
        except NotReady as why:
            self._refuse(str(why))
        return True

    def follow(self) -> None:
        """Go by what the group runs, before the step of the round that is over."""
        if self._group.version == self._running.version:
            return
        assert self._coming is not None and self._coming.version == self._group.version
        failpoint("worker.rebalance.before_flip")
        self._experts.flip()
        self._running, self._coming = self._coming, None
        self._row.placement_run = self._running.version
        self._board.supervisor_bell.ring()
        failpoint("worker.rebalance.after_flip")
        self._log.info("placement", version=self._running.version)

    # ------------------------------------------------------------ a proposal

    def _consider(self, proposal: Proposal | None) -> None:
        if proposal is None or proposal.epoch != self._group.epoch:
            return
        placement = msgspec.msgpack.decode(proposal.placement, type=Placement)
        if placement.version == self._running.version:
            return  # it runs, and nothing else was proposed
        self._coming = placement
        why = unsuited(self._running, placement, self._group.seat, self._experts.slots)
        if why:
            self._refuse(why)
        else:
            self._work = self._get_ready(placement)

    def _get_ready(self, placement: Placement) -> Iterator[None]:
        wanted = list(_new_here(self._running, placement, self._group.seat))
        for layer, slot, expert in wanted:
            failpoint("worker.rebalance.before_copy")
            self._experts.bring(layer, slot, expert)
            failpoint("worker.rebalance.after_copy")
            yield
        for layer in range(len(placement.physical_to_logical)):
            self._experts.lay_out(placement, layer)
            yield
        self._could_run(placement.version)
        self._log.info("ready for placement", version=placement.version, copied=len(wanted))

    def _refuse(self, why: str) -> None:
        assert self._coming is not None
        version = self._coming.version
        self._log.warning("placement refused", version=version, why=why)
        self._let_go()

    def _let_go(self) -> None:
        """Of what was proposed, however far it came. What was copied lies in slots that nobody uses."""
        self._coming = self._work = None
        self._could_run(self._running.version)

    def _could_run(self, version: int) -> None:
        if version != self._group.ready:
            self._group.ready = self._row.placement_ready = version
            self._board.supervisor_bell.ring()


def unsuited(running: Placement, proposed: Placement, seat: int, slots: int) -> str:
    """Why a group cannot go over from one placement to the other while it runs, for people.

    Args:
        seat: of the rank that asks: who must keep what is in use, and has no more than `slots` slots of
            a layer (0: any number).
    """
    if proposed.version < running.version:
        return f"its version is {proposed.version}, and {running.version} runs"
    shapes = [(p.seats, p.num_experts, len(p.physical_to_logical)) for p in (running, proposed)]
    if shapes[0] != shapes[1]:
        return "seats {}, experts {}, layers {} run; it is for {}, {}, {}".format(
            *shapes[0], *shapes[1]
        )
    used = slots_used(proposed, seat)
    if slots and used > slots:
        return f"it uses {used} slots of a layer, and rank {seat} has {slots}"
    experts = set(range(proposed.num_experts))
    index = running.seats.index(seat)
    for layer, seats in enumerate(proposed.physical_to_logical):
        lost = experts.difference(*seats)
        if lost:
            return f"layer {layer} has no copy of expert {min(lost)}"
        held = running.physical_to_logical[layer][index]
        for slot, (old, new) in enumerate(zip(held, seats[index], strict=False)):
            if EMPTY not in (old, new) and old != new:
                return f"layer {layer}, slot {slot}: expert {old} is in use, it puts {new} there"
    return ""


def _new_here(running: Placement, proposed: Placement, seat: int) -> Iterator[tuple[int, int, int]]:
    """(layer, slot, expert) of each expert that this seat has in a slot that was not its before."""
    index = running.seats.index(seat)
    layers = zip(running.physical_to_logical, proposed.physical_to_logical, strict=True)
    for layer, (old, new) in enumerate(layers):
        held = old[index]
        for slot, expert in enumerate(new[index]):
            if expert != EMPTY and (slot >= len(held) or held[slot] != expert):
                yield layer, slot, expert
