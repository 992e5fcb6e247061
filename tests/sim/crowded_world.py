"""The load of `bench recovery --blocks 42` in virtual time: three ranks with full pools, one of which falls, and how
long its streams stand still.

`python -P tests/sim/crowded_world.py --seeds N` tells of N such falls.
"""

import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.messages import ClientReply, Delta, Sampling
from phalanx.protocol.seeds import derive_seed
from phalanx.protocol.steps import StepPlan
from phalanx.scheduler_svc.state import Sequence
from phalanx.services.client_flow import Spec
from phalanx.services.model_limits import ModelLimits
from sim.hash_worker import EOS, VOCAB, fault_free
from sim.host import Plan
from sim.world import World
from sim.world_body import MS
from sim.world_clients import Ask, note_keys
from sim.world_gateway import GatewayBody
from sim.world_node import Node

RANKS, BLOCKS = 3, 42
STREAMS, LONG, OUTPUTS = 12, 2000, 160
STEP_NS, ROW_NS = 24 * MS, 60_000  # of a step at one rank, and of each of its prompts' rows
BEGIN_NS, WHOLE_NS = 1_500 * MS, 5_200 * MS  # when the streams begin; about how long they take
SETTLED_NS = 1_000 * MS  # so long after the fall those with short prompts begin anew at their ends
LOOK_NS = 5 * MS
NOTHING_ELSE: dict[str, Any] = {
    "faults": 0,
    "chains": 0.0,
    "aborts": 0.0,
    "step_death": 0.0,
    "protocol_death": 0.0,
    "spawn_failure": 0.0,
    "disk_full": False,
    "node_deaths": 0,
    "shut_down": False,
    "crash_looper": False,
    "changes": 0,
    "newcomer_fails": 0.0,
    "scrub_every_s": 0.0,
    "logged": False,
    "inexact": False,
}
SHAPE: dict[str, Any] = {
    "ranks": RANKS,
    "tokenizers": 2,
    "tight": False,
    "uneven": False,
    "num_blocks": BLOCKS,
    "num_slots": 64,
    "config": SchedulerConfig(),
    "requests": STREAMS,
    "clients": 1,
    "max_open": 1000,
    "faults_ns": BEGIN_NS + 2 * WHOLE_NS,
    "load_ms": (60, 150),
}
Name = tuple[str, int]


class CrowdedNode(Node):
    """Nothing takes long but steps and a worker's start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.least_room = 0

    def _draw_plan(self) -> Plan:
        return Plan(0.0, 0.0, 0.0, "", 0.0, "")

    def _draw_load(self) -> tuple[int, int]:
        return 1, self.ms(0.1, 10)

    def step_ns(self, plan: StepPlan | None = None) -> int:
        rows = len(plan.token_ids) // 4 if plan is not None else 0
        return int(self.rng.uniform(1.0, 1.2) * STEP_NS) + ROW_NS * rows


@dataclass
class Came:
    """Of one sequence: when something of it came."""

    times: list[int] = field(default_factory=list[int])

    def pause_ms(self, since_ns: int) -> float:
        """Its longest one since then, beyond its ordinary step."""
        gaps = [(after - before, after) for before, after in pairwise(self.times)]
        usual = median([gap for gap, _ in gaps])
        return max([gap - usual for gap, after in gaps if after > since_ns], default=0.0) / MS


class CrowdedWorld(World):
    model = ModelLimits("sim", VOCAB, 4096, EOS)
    node_kind = CrowdedNode
    staging = BLOCKS - 1, 16

    def __init__(self, seed: int, *, pair: bool = False, **shape: Any) -> None:
        """`pair`: soon after the streams began the rank falls that runs two sequences of one long prompt, and no long
        stream is over soon because it was predicted."""
        self._pair = pair
        self.came: dict[Name, Came] = {}
        self.struck_ns = 0
        self.used = 0.0  # of the fullest pool, then
        self.moved: set[Name] = set()  # ran at the rank that fell
        self.pushed_out: set[Name] = set()  # ran elsewhere, and gave their blocks up since
        super().__init__(seed, **SHAPE | NOTHING_ELSE | {"store": seed % 2 == 0} | shape)
        self.weather.calm()

    # ------------------------------------------------------------ the streams

    def _schedule(self) -> None:
        rng = self.rng
        self.streams = [self._stream(rng, position) for position in range(STREAMS)]
        self.clock.after(BEGIN_NS, self._begin_all)
        share = rng.uniform(0.2, 0.4) if self._pair else rng.uniform(0.05, 0.8)
        self.clock.after(BEGIN_NS + int(share * WHOLE_NS), self._strike)

    def _stream(self, rng: random.Random, position: int) -> Spec:
        """As in `bench/recovery_load.py`."""
        length = LONG if position % 2 == 0 else rng.choice((1, 17, 64))
        prompt = [rng.randrange(10, VOCAB) for _ in range(length)]
        note_keys(self.keyed, prompt)
        predicts = position % 6 == 0 and not self._pair
        right = fault_free(prompt, derive_seed(position, 0), OUTPUTS) if predicts else ()
        sampling = Sampling(
            seed=position, max_tokens=OUTPUTS, ignore_eos=True, predicted_token_ids=tuple(right)
        )
        return Spec(prompt, sampling, n=2 if position % 5 == 4 else 1)

    def _begin_all(self) -> None:
        for position in range(STREAMS):
            self._begin(position)

    def _begin(self, position: int) -> None:
        spec = self.streams[position]
        self._generate(Ask(spec, list(spec.prompt), model=self.model))
        if position % 2:
            self._again(position, len(self.readings) - 1)

    def _again(self, position: int, at: int) -> None:
        """One with a short prompt begins anew at its end."""
        if not self.readings[at].flow.done:
            self.clock.after(LOOK_NS, lambda: self._again(position, at))
        elif not self.struck_ns or self.now_ns < self.struck_ns + SETTLED_NS:
            self._begin(position)

    def to_client(self, gateway: GatewayBody, identity: bytes, message: ClientReply) -> bool:
        taken = super().to_client(gateway, identity, message)
        if taken and isinstance(message, Delta):
            name = message.request_id, message.index
            self.came.setdefault(name, Came()).times.append(self.now_ns)
        return taken

    # ------------------------------------------------------------ the fall

    def _strike(self) -> None:
        node = self._living_node()
        cores = {body.seat: body.core for body in node.schedulers()}
        pools = [core.rank.pool for core in cores.values()]
        self.used = max([pool.used / pool.total for pool in pools])
        pairs = [seat for seat, core in cores.items() if _pair(core.sequences.values())]
        victim = pairs[0] if self._pair else self.rng.randrange(RANKS)
        self.struck_ns = self.now_ns
        self.moved = {one.key for one in cores[victim].sequences.values() if one.num_outputs > 1}
        node.story.append(f"{self.now_ns / 1e9:.3f} worker-{victim} falls")
        node.die(node.children[f"worker-{victim}"], -9)
        self._look(_preempted(node))

    def _look(self, before: set[Name]) -> None:
        node = self._living_node()
        self.pushed_out |= _preempted(node) - before - self.moved
        if self.now_ns < self.struck_ns + SETTLED_NS:
            self.clock.after(LOOK_NS, lambda: self._look(before))

    def pauses_ms(self) -> dict[Name, float]:
        """Of each sequence that ran at the rank that fell, and was not at its end."""
        return {
            name: came.pause_ms(self.struck_ns)
            for name, came in self.came.items()
            if name in self.moved and came.times[-1] > self.struck_ns
        }


def _pair(sequences: Iterable[Sequence]) -> bool:
    """Two of these share the blocks of a long prompt."""
    large = [one for one in sequences if one.num_prompt == LONG and one.blocks]
    return any(one.blocks[0] == other.blocks[0] for one, other in combinations(large, 2))


def _preempted(node: Node) -> set[Name]:
    tables = [body.core.table for body in node.schedulers()]
    return {
        sequence.key
        for table in tables
        for row, sequence in table.by_row.items()
        if table.columns.preemptions[row]
    }


@click.command()
@click.option("--first", type=int, default=0, help="The first seed.")
@click.option("--seeds", type=int, default=1)
@click.option("--pair", is_flag=True, help="The rank falls that has two of one request.")
@click.option("--verbose", "-v", is_flag=True, help="Tell the story.")
def main(first: int, seeds: int, pair: bool, verbose: bool) -> None:
    longest: list[float] = []
    for seed in range(first, first + seeds):
        world = CrowdedWorld(seed, pair=pair).run()
        pauses = sorted(world.pauses_ms().values())
        longest += pauses[-1:]
        if verbose and world.node is not None:
            click.echo("\n".join(world.node.story))
        click.echo(
            f"seed {seed}: pool {world.used:.0%} full, pauses {[round(pause) for pause in pauses]} ms,"
            f" {len(world.pushed_out)} pushed out"
        )
    late = sum(pause > 1000 for pause in longest)
    click.echo(f"the longest {max(longest, default=0):.0f} ms; {late} of {seeds} above a second")


if __name__ == "__main__":
    main()
