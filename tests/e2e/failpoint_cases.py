"""Where a process is made to die, and what has to happen for it to get there."""

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.protocol.failpoints import NAMES, kind_of


@dataclass(frozen=True)
class Case:
    name: str
    process: str  # that dies there
    fallen: str = ""  # that is killed first, so that the node comes to this point
    nth: int = 1
    action: Literal["kill", "raise", "stop", "sleep"] = "kill"
    moves: bool = False  # experts move meanwhile

    def __str__(self) -> str:
        moment = f"{self.name}@{self.process}"
        moment += "" if self.action == "kill" else f"-{self.action}s"
        return moment + (f"-after-{self.fallen}" if self.fallen else "") + f"-{self.nth}"


CHANGE = (
    "worker.stop.before_ack",
    "worker.stop.after_ack",
    "worker.prepare.before",
    "worker.go.before_ack",
    "worker.go.after_ack",
    "worker.connect.before",
    "worker.connect.after",
)
REBALANCE = tuple(name for name in NAMES if name.startswith("worker.rebalance."))
# Of the planner and the supervisor, while experts move in a running group: `test_rebalance_faults.py`.
MOVING = tuple(n for n in NAMES if n.startswith(("eplb.plan.", "supervisor.rebalance.")))
SUPERVISOR = tuple(name for name in NAMES if kind_of(name) == "supervisor" and name not in MOVING)

# Everything but what a model computes: for a node without one, which restarts in a second.
CONTROL = (
    *(Case(name, "worker-0", "worker-1", 1) for name in CHANGE),  # a survivor, while a rank falls
    *(Case(name, "worker-0", "worker-1", 2) for name in CHANGE),  # the same while it rejoins
    *(Case(name, "worker-1", "worker-1", 1) for name in CHANGE),  # the one that rejoins
    Case("worker.load.before", "worker-1", "worker-1"),
    Case("worker.load.after", "worker-1", "worker-1"),
    Case("worker.link.before_hello", "worker-1", "worker-1"),
    Case("worker.link.before_hello", "worker-1", "scheduler-1"),
    *(Case(name, "worker-1", moves=True) for name in REBALANCE),
    *(
        Case(f"worker.step.{moment}", "worker-1", nth=20)
        for moment in ("before_enter", "after_enter", "after_commit", "after_result")
    ),
    Case("scheduler.submit.before", "scheduler-1"),
    *(
        Case(f"scheduler.{moment}", "scheduler-1", nth=20)
        for moment in (
            "plan.before_send",
            "plan.after_send",
            "commit.before",
            "tokens.before_send",
            "tokens.after_send",
        )
    ),
    *(
        Case(f"gateway.{moment}", "gateway", nth=nth)
        for nth in (1, 2)
        for moment in (
            "accept.before_write",
            "journal.before_commit",
            "journal.after_sync",
            "accept.after_sync",
            "accept.before_send",
            "submit.before_send",
            "final.before_write",
            "final.before_send",
            "final.after_send",
        )
    ),
    Case("gateway.tokens.before_write", "gateway", nth=20),
    Case("gateway.tokens.after_write", "gateway", nth=20),
    Case("gateway.resume.before_send", "gateway", "worker-1"),
    Case("gateway.resume.after_send", "gateway", "worker-1"),
    Case("tokenizer.encode.before_answer", "tokenizer-0"),
    Case("tokenizer.decode.before_answer", "tokenizer-0", nth=3),
)

# What only a node with a model comes to.
MODEL = (
    Case("worker.step.after_sampler", "worker-1", nth=9),
    Case("worker.exchange.before_send", "worker-1", nth=30),
    Case("worker.exchange.before_reply", "worker-1", nth=30),
    Case("worker.prepare.after_load", "worker-0", "worker-1"),
    Case("worker.prepare.after_load", "worker-1", "worker-1"),
    Case("kvstore.create.before", "kvstore", "kvstore"),
    Case("kvstore.write.before", "kvstore"),
    Case("kvstore.write.after", "kvstore"),
    Case("kvstore.put.before_answer", "kvstore"),
    Case("eplb.counts.before", "eplb"),
)
# A bug ends a process as a death does, whichever of its threads it is in.
JOURNAL_RAISES = Case("gateway.journal.before_commit", "gateway", nth=2, action="raise")
RAISING = (
    Case("worker.step.after_commit", "worker-1", nth=20, action="raise"),
    Case("scheduler.commit.before", "scheduler-1", nth=20, action="raise"),
    Case("gateway.final.before_send", "gateway", action="raise"),
    Case("tokenizer.decode.before_answer", "tokenizer-0", nth=3, action="raise"),
)
# It is killed for it, by whoever waits for its signs of life; another thread that hangs is no such thing.
HANGING = (
    *(replace(case, action="stop") for case in CONTROL if not case.moves),
    *(replace(case, action="sleep") for case in CONTROL if case.name in CHANGE),
)
RAISING_MODEL = (
    Case("kvstore.write.before", "kvstore", action="raise"),
    Case("eplb.counts.before", "eplb", action="raise"),
)
# Of a clean end, when there is nobody left to see, and of puts that ask for `disk`, which ranks do not:
# `tests/kvstore_svc` cuts writes short at every point.
ELSEWHERE = ("kvstore.seal.before", "kvstore.write.before_sync")
