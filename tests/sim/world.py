"""A whole node in one process, in virtual time, from one seed: the supervisor's core, the gateway's core
with its journal, the schedulers' cores and links, the planner's core, and models of what is left, above
all workers whose next token is a hash of what they read through real block tables and rings.

First there are faults, then there is calm. Whatever happens, every accepted request ends with one final
and with the stream of an undisturbed run, nobody keeps anything, and nothing waits for ever.

`python -P tests/sim/world.py --seed N -v` tells the story of one seed.
"""

import random
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from phalanx.protocol.errors import Code, ExitCode, Refused
from phalanx.protocol.limits import BLOCK_SIZE
from phalanx.protocol.messages import (
    Accepted,
    ClientMessage,
    ClientReply,
    Delta,
    Final,
    PromptLogprobs,
    Replay,
    Replayed,
)
from phalanx.protocol.steps import StepPlan
from phalanx.services.client_core import Question
from phalanx.services.client_flow import Begun, Received
from phalanx.services.gateway.core import Core
from phalanx.services.gateway.entries import Entry, Produced
from phalanx.supervisor.events import Finished, ShutdownAsked
from sim.clock import Clock
from sim.gateway_fakes import Expected
from sim.gateway_world import Disk
from sim.token_memory import TokenMemory
from sim.world_body import MS
from sim.world_checks import what_is_left
from sim.world_clients import Ask, Reading, SimClient, note_keys, random_ask
from sim.world_faults import Faults
from sim.world_gateway import MODEL, GatewayBody
from sim.world_node import Node
from sim.world_shape import Shape
from sim.world_waits import Waits
from sim.world_wires import Weather

HEAL_NS = 200_000 * MS  # a start that hangs is only given up after its deadline of 120 s
LOOK_NS = 20 * MS
DRAIN_NS = 70_000 * MS  # every question is repeated within half of this


class World:
    model = MODEL
    node_kind = Node
    staging = 4, 2  # blocks and states: so small that loads wait for each other

    def __init__(
        self, seed: int, ring: dict[str, int] | None = None, poison: int = 0, **shape: Any
    ) -> None:
        """`poison`: over so many of the requests every worker that computes them dies. `shape`: otherwise than drawn."""
        self.seed, self.rng = seed, random.Random(seed)
        self.shape = replace(Shape.of(self.rng), **shape)
        self.poison: set[bytes] = set()  # their prompts
        self._poison_left = poison
        self.ring = ring or {}  # of the workers, for a planted fault
        self.clock = Clock(1_000_000_000)
        self.weather = Weather(self.rng)
        self.faulty = True
        self.faults_end_ns = self.now_ns + self.shape.faults_ns
        self.disk, self.disk_was_full = Disk(), False
        self.memory = TokenMemory(seed)
        self.keyed: dict[bytes, Any] = {}
        self.stored: dict[bytes, Any] = {}  # what the KV store has, also after a restart
        self.steps = self.lives = self.flips = 0
        self.over = False  # everything has been checked: the node only has to end
        self.shut_down = False  # some life ended cleanly, so its open requests ended with it
        self.clients = [SimClient(self, number) for number in range(self.shape.clients)]
        self.readings: list[Reading] = []
        self.replays: list[tuple[SimClient, Question]] = []
        self.told: dict[tuple[bytes, str], list[bool]] = {}
        self.asks: dict[str, Ask] = {}  # by request id
        self.keys: dict[str, Ask] = {}  # by the key that their client drew
        self.logs: dict[tuple[str, int], list[int]] = {}  # all that was ever logged
        self.finals: dict[tuple[str, int], Final] = {}  # as told first
        self.node: Node | None = None
        self._start_node()
        self._schedule()
        self.waits = Waits(self)

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns

    # ------------------------------------------------------------ nodes

    def _start_node(self) -> None:
        self.lives += 1
        story = self.node.story if self.node is not None else []
        self.node = self.node_kind(
            self.seed, clock=self.clock, story=story, load_ms=self.shape.load_ms, world=self
        )
        self.node.story.append(f"{self.now_ns / 1e9:.3f} node {self.lives} starts")

    def kill_node(self) -> None:
        assert self.node is not None
        if not self.node.gone:
            self.node.supervisor_dies()
            if self.lives % 2:  # with the machine
                self.memory.lose()
            self.clock.after(self.rng.randint(50, 3000) * MS, self._start_node)

    def node_ended(self, node: Node, finished: Finished) -> None:
        """It gave up, or was told to end; somebody starts it again, except at the end of the run."""
        if finished.code != ExitCode.OK:
            node.checks.settled()
        elif not self.over:
            node.checks.ends_told()
            self.clock.after(0, node.checks.finished)  # the history's last word comes behind this
        if not self.over:
            self.clock.after(0, self.kill_node)

    def make_gateway(self, *args: Any) -> Core:
        return Core(*args)

    def gateway_is_up(self, body: GatewayBody) -> None:
        self.told.clear()
        for client in self.clients:
            client.up.receiver_back()

    def gateway_died(self, cleanly: bool = False) -> None:
        """`cleanly`: it waited until what it had sent was gone."""
        for client in self.clients:
            client.up.receiver_died()
            for _ in range(0 if cleanly else self.rng.randint(0, len(client.inbox))):
                client.inbox.pop()  # had not left it yet

    # ------------------------------------------------------------ clients

    def to_gateway_of_client(self, identity: bytes, message: ClientMessage) -> None:
        gateway = self.node.gateway if self.node is not None else None
        if gateway is not None:
            gateway.take(("client", identity, message))

    def to_client(self, gateway: GatewayBody, identity: bytes, message: ClientReply) -> bool | None:
        client = next(client for client in self.clients if client.identity == identity)
        taken = client.offer(message)
        if taken:
            self._check_said(gateway, identity, message)
        return taken

    def _check_said(self, gateway: GatewayBody, identity: bytes, message: ClientReply) -> None:
        """What may not be said, whatever happens."""
        if isinstance(message, Accepted):
            assert message.request_id in self.disk.entries, "accepted what is not on disk"
            ask = self.asks.get(message.request_id)
            if ask is None:
                ask = self.asks[message.request_id] = self._ask_of(message)
            assert ask.seed in (None, message.seed), "the seed of a request has changed"
            ask.seed = message.seed
            self.told[identity, message.request_id] = [False] * message.n
            return
        if self.shape.logged and isinstance(message, Delta | Final | PromptLogprobs):
            assert self.disk.has(message), f"told what is not on disk: {message}"
        if isinstance(message, Delta | Final):
            self.memory.handed(message)
            told = self.told[identity, message.request_id]
            assert not told[message.index], "said something after the final"
            ask = self.asks[message.request_id]
            if isinstance(message, Delta):
                end = message.offset + len(message.token_ids)
                right = self.right(ask, message.request_id, message.index).tokens[
                    message.offset : end
                ]
                what = f"{message.request_id}/{message.index} at {message.offset}"
                assert message.token_ids == right, f"{what}: {message.token_ids} for {right}"
                return
            told[message.index] = True
            self._check_one_final(gateway, message)
            if message.finish_reason == "abort" and not gateway.journal.failing:
                on_disk = self.disk.finals.get(message.request_id, {})
                assert message.index in on_disk, "told an abort that is not on disk"

    def right(self, ask: Ask, request_id: str, index: int) -> Expected:
        """The stream that this sequence has to give."""
        if not self.shape.inexact:
            return ask.expected(index)
        return ask.logged(index, self.logs.get((request_id, index), ()))

    def note_logged(self, produced: Produced) -> None:
        """A token that is on disk stays what it is."""
        log = self.logs.setdefault((produced.request_id, produced.index), [])
        assert produced.offset <= len(log), "a gap in the log"
        for at, token in enumerate(memoryview(produced.token_ids).cast("i"), produced.offset):
            if at == len(log):
                log.append(token)
            assert log[at] == token, f"the log had {log[at]} at {at}, and gets {token}"

    def _check_one_final(self, gateway: GatewayBody, final: Final) -> None:
        """However often it is told, to whomever and by which gateway: there is one."""
        for_one = self.asks[final.request_id].aborted or final.code is Code.SHUTDOWN
        if final.finish_reason == "abort" and for_one:
            return  # who aborts, or reads while the node stops: also of what had ended and is told again
        key = (final.request_id, final.index)
        first = self.finals.setdefault(key, final)
        early = final.finish_reason == "error"  # is told where its reader is
        ends = [(one.finish_reason, early or one.offset) for one in (first, final)]
        same = ends[0] == ends[1]
        # An abort that the disk did not take is told all the same, and may be forgotten.
        assert same or self.disk_was_full, f"{final} after {first}"

    def _ask_of(self, accepted: Accepted) -> Ask:
        """By the key: a key is one request."""
        return self._ask_of_entry(self.disk.entries[accepted.request_id])

    def _ask_of_entry(self, entry: Entry) -> Ask:
        return self.keys[entry.key]

    def _generate(self, ask: Ask) -> None:
        client = self.rng.choice([client for client in self.clients if not client.dead])
        flow = client.core.generate(ask.spec, self.now_ns, None, True)
        assert flow.generate is not None
        self.keys[flow.generate.key] = ask
        self.readings.append(Reading(ask, client, flow))
        client.flush()

    def _abort(self, ask: Ask) -> None:
        for reading in self.readings:
            if reading.ask is ask and not reading.flow.done:
                ask.aborted = True
                reading.client.core.abort(reading.flow, self.now_ns)
                reading.client.flush()

    def _succeed(self) -> None:
        """A client dies; another one reads on from where it was."""
        open_ones = [r for r in self.readings if r.flow.accepted and not r.flow.done]
        if not open_ones or not self.faulty:
            return
        old = self.rng.choice(open_ones).client
        heir = SimClient(self, len(self.clients))
        heir.is_heir = True
        self.clients.append(heir)
        if self.node is not None and self.node.gateway is None:
            heir.up.receiver_died()
        for reading in self.readings:
            if reading.client is not old or reading.flow.done:
                continue
            generate = reading.flow.generate
            if reading.flow.accepted or generate is None:
                begun = [_begun(one) for one in reading.flow.sequences] or reading.flow.begun
                reading.flow = heir.core.attach(reading.flow.request_id, begun, self.now_ns, None)
            else:  # it remembers the key, and asks again
                spec = reading.ask.spec
                keyed = type(spec)(
                    spec.prompt, spec.sampling, spec.n, spec.stream, "", generate.key
                )
                reading.flow = heir.core.generate(keyed, self.now_ns, None, True)
            reading.client = heir
        old.dead = True
        heir.flush()

    def _read_again(self) -> None:
        """Somebody wants to read from its start what has ended, perhaps in an earlier life, or to have it
        run again and compared."""
        open_ones = {r.flow.request_id for r in self.readings if not r.flow.done}
        ended = [
            r
            for r in self.readings
            if r.flow.done and r.flow.accepted and r.flow.request_id not in open_ones
        ]
        living = [client for client in self.clients if not client.dead]
        if ended and living:
            ask, request_id = (old := self.rng.choice(ended)).ask, old.flow.request_id
            client = self.rng.choice(living)
            if self.rng.random() < 0.7:
                flow = client.core.attach(request_id, (), self.now_ns, None)
                self.readings.append(Reading(ask, client, flow))
            else:
                seat = self.rng.choice((-1, -1, 0, 1))
                question = client.core.ask(lambda call: Replay(call, request_id, seat), self.now_ns)
                self.replays.append((client, question))
            client.flush()

    def keyed_at(self, key: bytes) -> Any:
        """What the store may copy under this key. Moved sequences have outputs among what they compute."""
        if key not in self.keyed:
            for entry in self.disk.entries.values():
                ask = self._ask_of_entry(entry)
                ask.seed = entry.sampling.seed  # it may run before its client hears of it
                ask.note_keys(self.keyed)
        return self.keyed[key]

    # ------------------------------------------------------------ the run

    def _schedule(self) -> None:
        rng, shape = self.rng, self.shape
        for number in range(shape.requests):
            ask = random_ask(rng, shape, number)
            if self._poison_left:
                self._poison_left -= 1
                self.poison.add(array("i", ask.prompt).tobytes())
            note_keys(self.keyed, ask.prompt)
            arrival_ns = rng.randrange(shape.faults_ns * 3 // 4)
            self.clock.after(arrival_ns, lambda ask=ask: self._generate(ask))  # type: ignore[misc]
            if rng.random() < shape.aborts:
                abort_ns = arrival_ns + rng.randrange(2_000 * MS)
                self.clock.after(abort_ns, lambda ask=ask: self._abort(ask))  # type: ignore[misc]
        if rng.random() < 0.3:
            self.clock.after(rng.randrange(shape.faults_ns), self._succeed)
        for _ in range(rng.choice((0, 2, 4))):
            self.clock.after(rng.randrange(shape.faults_ns), self._read_again)
        Faults(self)

    def run(self) -> "World":
        """Raises AssertionError when anything that must hold does not."""
        self.clock.advance(self.faults_end_ns)
        self._calm()
        calm_ns = self.now_ns
        self._advance(HEAL_NS, self._healed)
        self.healed_s = (self.now_ns - calm_ns) / 1e9
        node = self._living_node()
        node.checks.whole()
        healed_ns = self.now_ns
        self._advance((1 + 9 * len(self.poison)) * DRAIN_NS, self._over)
        self.drained_s = (self.now_ns - healed_ns) / 1e9
        for reading in self.readings:
            flow = reading.flow
            node.require(flow.done, f"waits for ever: {flow.request_id} {reading.ask.spec}")
            reading.check(self)
        for client, question in self.replays:
            self._check_replay(client, question)
        assert self._living_node() is node
        node.checks.drained()
        self._end(node)
        return self

    def _check_replay(self, client: SimClient, question: Question) -> None:
        """It was equal, if it came to its end at all."""
        assert client.dead or question.reply is not None, f"never answered: {question.message}"
        early = self.shape.config.preempt == "stop"  # where memory may end it
        if isinstance(question.reply, Replayed) and not self.shape.inexact and not early:
            for one in question.reply.sequences:
                same = one.difference is None or one.difference.what == "error"
                assert same, f"a replay differs: {question.reply}"

    def _advance(self, most_ns: int, done: Callable[[], bool]) -> None:
        end_ns = self.now_ns + most_ns
        while self.now_ns < end_ns and not done():
            self.clock.advance(self.now_ns + LOOK_NS)

    def _calm(self) -> None:
        self.faulty = False
        self.weather.calm()
        self.disk.full = False
        for client in self.clients:
            client.wake()
        node = self.node
        if node is not None and node.can_change and self.shape.changes:
            node.ask_for_a_change()  # one that no fault disturbs

    def _living_node(self) -> Node:
        assert self.node is not None and not self.node.gone, "there is no node"
        return self.node

    def _healed(self) -> bool:
        node = self.node
        return (
            node is not None
            and not node.gone
            and node.finished is None
            and not node.core.reasons()
            and not node.core.changes.told
            and all(child.mood == "well" for child in node.children.values() if child.alive)
        )

    def _over(self) -> bool:
        node = self.node
        if node is None or node.gone or len(self.keys) < self.shape.requests:
            return False
        if not all(reading.flow.done for reading in self.readings) or node.gateway is None:
            return False
        if any(question.reply is None and not client.dead for client, question in self.replays):
            return False
        if node.checks.idle_seats():
            return False
        return not what_is_left(node.gateway) and all(
            not scheduler.core.sequences
            and not scheduler.core.busy
            and (scheduler.core.store is None or not scheduler.core.store.holders())
            for scheduler in node.schedulers()
        )

    def _end(self, node: Node) -> None:
        """A clean shutdown leaves nothing alive."""
        self.over = True
        drain_ms = self.rng.choice((0, 500, 3000))
        node.checks.told_to_stop(drain_ms)
        node.feed(ShutdownAsked(drain_ms))
        self.clock.advance(self.now_ns + 30_000 * MS, lambda: node.finished is not None)
        node.checks.finished()

    # ------------------------------------------------------------ what is legal

    def may_refuse(self, ask: Ask, error: Refused) -> bool:
        """Whether a request may have been refused so."""
        if error.code is Code.BAD_REQUEST:
            return self._never_fits(ask)
        if error.code is Code.SHUTDOWN:
            return self.shut_down
        if error.code is Code.UNKNOWN_REQUEST:  # read again when it had been forgotten
            return ask not in map(self._ask_of_entry, self.disk.entries.values())
        if error.code is Code.INTERNAL:  # the tokenizers died over it
            node = self.node
            assert node is not None
            return node.checks.deaths["tokenizer"] >= 4
        return False

    def _never_fits(self, ask: Ask) -> bool:
        most = min(self.model.max_positions, (self.shape.num_blocks - 1) * BLOCK_SIZE)
        wanted = ask.spec.sampling.max_tokens
        return len(ask.prompt) + (wanted or 1) > most

    def is_poison(self, plan: StepPlan | None) -> bool:
        """Whether a worker dies over it."""
        new = plan.new if plan is not None and self.poison else ()
        return any(one.tokens[: 4 * one.num_prompt] in self.poison for one in new)

    def may_end(self, ask: Ask, final: Final) -> bool:
        """Whether a sequence may have ended so, before its stream's end."""
        if array("i", ask.prompt).tobytes() in self.poison and final.code is Code.INTERNAL:
            return "times in a row before a new token came" in final.error
        if final.code is Code.SHUTDOWN:
            return self.shut_down and final.finish_reason == "abort"
        if final.finish_reason == "abort":
            return ask.aborted and final.code is None
        if final.code is Code.KV_PRESSURE:
            return final.finish_reason == "length" and self.shape.config.preempt == "stop"
        # A request that came before any rank had told of its pool.
        return final.code is Code.BAD_REQUEST and self._never_fits(ask)


def _begun(one: Received) -> Begun:
    """What an heir knows of a sequence: how many tokens there were, and mostly which."""
    return Begun(one.offset) if one.base else Begun(one.offset, tuple(one.token_ids))


@click.command()
@click.option("--seed", type=int, required=True)
@click.option("--verbose", "-v", is_flag=True, help="Tell the story.")
def main(seed: int, verbose: bool) -> None:
    started = time.process_time()
    world = World(seed)
    try:
        world.run()
    finally:
        if verbose:
            click.echo(world.shape)
            click.echo("\n".join(world.node.story if world.node else []))
        click.echo(
            f"seed {seed}: {world.now_ns / 1e9:.1f} s of virtual time, {world.lives} lives,"
            f" {world.steps} steps, {len(world.readings)} requests,"
            f" {time.process_time() - started:.2f} s of CPU"
        )


if __name__ == "__main__":
    main()
