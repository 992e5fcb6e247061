"""What the shell tells the core besides the messages of gateway, worker and KV store; what comes back."""

import msgspec

from phalanx.protocol.messages import BusToGateway
from phalanx.protocol.steps import Offer, StepPlan


class Membership(msgspec.Struct, frozen=True):
    """What the topology says of this seat."""

    epoch: int
    member: bool


class WorkerLost(msgspec.Struct, frozen=True):
    """The worker of this seat died, hung or was replaced: its memory is gone."""


class GatewayChanged(msgspec.Struct, frozen=True):
    """Another gateway took over: it knows nothing of this seat."""


class Staging(msgspec.Struct, frozen=True):
    """An arena for what comes from the KV store: `num_blocks` regions of a block's bytes each, then
    `num_states` of a slot's, all at `generation` now. It is of this scheduler alone, and of no other worker
    before. Whoever sends a Get first sets its region's generation to that of the handle."""

    arena: str
    generation: int
    num_blocks: int
    num_states: int


class StoreArenas(msgspec.Struct, frozen=True):
    """Generations of region 0 of the worker's block arena and snapshot arena; follows its hello."""

    blocks: int
    snapshots: int
    staging: Staging | None = None  # None: what is stored is not read back


class StoreLost(msgspec.Struct, frozen=True):
    """The KV store is gone: it reads nothing any more."""


class Actions(msgspec.Struct):
    """What the shell is to do, in this order, each list in its own."""

    offer: Offer | None = None  # for the worker, ahead of the plans
    plans: list[StepPlan] = []
    gateway: list[BusToGateway] = []

    def add(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self.plans.append(plan)
