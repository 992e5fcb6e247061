"""Messages are lost, doubled, late and damaged, disks are full, processes slow: no token changes.

CI draws one more fault of messages; its seed stands in the name, `MESSAGE_SEED=N` repeats it.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.draws import seed_of_run
from e2e.field import Field
from e2e.node import tokens, wait_for
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import (
    BusFromGateway,
    BusToGateway,
    ClientMessage,
    ClientReply,
    FromSupervisor,
    ToSupervisor,
)
from phalanx.protocol.rundir import JOURNAL_FILE
from phalanx.services.client import Client
from phalanx.testing.node import Node

pytestmark = pytest.mark.process

UNIONS = (ClientMessage, ClientReply, BusToGateway, BusFromGateway, ToSupervisor, FromSupervisor)
# Those that tell a fault to happen or ask about it: they are repeated, and tested apart.
OURS = {"Inject", "Injected", "StatusQuery", "StatusReply", "Shutdown", "ShutdownDone"}
TYPES = sorted({kind.__name__ for union in UNIONS for kind in union.__args__} - OURS)
SEED = seed_of_run("MESSAGE_SEED")


@dataclass(frozen=True)
class Fault:
    kind: str
    process: str
    rate: float

    def __str__(self) -> str:
        return f"{self.kind}-{self.process}-{self.rate}"


def drawn(rng: random.Random) -> Fault:
    return Fault(
        rng.choice(["drop", "corrupt", "duplicate", "delay"]),
        rng.choice(["gateway", "scheduler", "tokenizer", "worker", "supervisor"]),
        rng.choice([0.05, 0.1, 0.2]),
    )


@pytest.fixture
def node(control: Field) -> Node:
    return control.healthy_node("worker-1")


@pytest.mark.parametrize("fault", [drawn(random.Random(SEED))], ids=lambda one: f"{SEED}-{one}")
def test_a_drawn_fault_changes_nothing(control: Field, node: Node, fault: Fault) -> None:
    ms = 60 if fault.kind == "delay" else 0
    node.inject(fault.kind, fault.process, rate=fault.rate, ms=ms)
    control.check_run(lambda: control.kill("worker-1"), 240)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["drop", "corrupt"])
def test_the_first_message_of_every_type_is_lost_to_everyone(
    control: Field, node: Node, kind: str
) -> None:
    """To its sender and to its receiver: what is sent again is lost again. A worker falls meanwhile, so that
    the words of a start and of a move are among them."""
    for name in ("gateway", "scheduler", "tokenizer", "worker"):
        for only in TYPES:
            node.inject(kind, name, only=only, count=1)
    hit: dict[str, int] = {}

    def meanwhile() -> None:
        control.kill("worker-1")
        hit.update(node.came_up("gateway"))

    control.check_run(meanwhile)
    assert {"Generate", "Accepted", "Submit"} <= {only for only, times in hit.items() if times}


def test_everything_comes_twice(control: Field, node: Node) -> None:
    node.inject("duplicate", "all")
    node.inject("duplicate", "supervisor")
    control.check_run(lambda: control.kill("worker-1"))


def test_much_comes_late_and_out_of_order(control: Field, node: Node) -> None:
    node.inject("delay", "all", rate=0.2, ms=60)
    node.inject("delay", "supervisor", rate=0.5, ms=60)
    control.check_run(lambda: control.kill("worker-1"))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["drop", "corrupt"])
def test_a_fifth_of_everything_is_lost(control: Field, node: Node, kind: str) -> None:
    node.inject(kind, "all", rate=0.2)
    node.inject(kind, "supervisor", rate=0.2)
    control.check_run(lambda: control.kill("worker-1"), 240)


def test_slow_processes_change_nothing(control: Field, node: Node) -> None:
    for name in ("worker-0", "scheduler-1", "tokenizer-0"):
        node.inject("slow", name, ms=5, count=200)
    control.check_run()


def test_a_full_disk_refuses_new_requests_and_lets_running_ones_go_on(
    control: Field, node: Node
) -> None:
    def full() -> None:
        node.inject("diskfull", "gateway")
        with Client(node.run_dir) as client, pytest.raises(Refused) as refused:
            client.generate("Hello", timeout=30, seed=1, max_tokens=4).results()
        assert refused.value.code is Code.OVERLOADED and refused.value.retry_after_ms > 0
        wait_for(lambda: str(node.run_dir / JOURNAL_FILE) in reasons(), 20, "told by the health")
        assert "bytes are free there" in reasons() and "make room on that disk" in reasons()
        assert not node.look().healthy

    def reasons() -> str:
        return next(p.detail for p in node.look().processes if p.name == "supervisor")

    control.check_run(full)  # and it is healthy again once it can be written, though nobody asks
    with Client(node.run_dir) as client:
        assert client.generate("Hello", timeout=30, seed=1, max_tokens=4).results()


@pytest.mark.soak
def test_a_full_disk_stops_caching_and_nothing_else(phalanx_node: Node) -> None:
    def requests(first: int) -> list[dict[str, Any]]:
        prompts = [[first + i] * 300 for i in range(3)]
        return [{"prompt_token_ids": ids, "seed": 1, "max_tokens": 8} for ids in prompts]

    def told(what: str) -> bool:
        return what in (phalanx_node.run_dir / "logs" / "kvstore.log").read_text()

    fault_free = tokens(phalanx_node.generate(requests(20)))
    assert not told("caching is off")
    phalanx_node.inject("diskfull", "kvstore")
    phalanx_node.generate(requests(60))
    wait_for(lambda: told("caching is off"), 20, "caching off")
    assert tokens(phalanx_node.generate(requests(20))) == fault_free
    phalanx_node.clear("kvstore")

    def cached_again() -> bool:
        phalanx_node.generate(requests(100))
        return told("caching is on")

    wait_for(cached_again, 40, "caching again")
