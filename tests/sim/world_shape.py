"""What kind of run a seed makes: how large the node is, how it is configured, how rough it gets."""

import random
from dataclasses import dataclass
from typing import Literal

from phalanx.protocol.config import EplbConfig, KVStoreConfig, NodeConfig, SchedulerConfig
from sim.host import Plan
from sim.world_body import MS


@dataclass(frozen=True)
class Shape:
    ranks: int
    tokenizers: int
    store: bool
    tight: bool  # prompts just below a block border, and a pool too small for what runs
    num_blocks: int
    scrub_every_s: float
    uneven: bool  # some ranks have more blocks
    num_slots: int
    config: SchedulerConfig
    step_ns: tuple[int, int]  # of one part of a step, at one rank
    requests: int
    clients: int
    max_open: int  # sequences
    faults_ns: int  # how long there are faults
    faults: int
    chains: float  # chance that a fault is followed by another one during its recovery
    load_ms: tuple[int, int]  # of a worker
    aborts: float  # share of the requests
    step_death: float  # at each look of a worker
    protocol_death: float  # at each step of STOP and GO
    spawn_failure: float
    disk_full: bool
    node_deaths: int
    shut_down: bool  # in good order
    crash_looper: bool
    changes: int  # of the number of ranks, or fresh processes, asked for while there are faults
    newcomer_fails: float
    logged: bool  # tokens are told once they are on disk, and go on from there
    eplb: EplbConfig
    loads_ns: int  # how long experts are as hot as they are
    copy_ns: tuple[int, int]  # of an expert that a running rank gets
    cannot_copy: float  # a rank, at each proposal
    inexact: bool  # taken up anew, a sequence goes on with other tokens than it would have had

    @classmethod
    def of(cls, rng: random.Random) -> "Shape":
        rough = rng.random() < 0.9
        tight = rng.random() < 0.3
        seqs = 4 if tight else rng.choice((2, 4, 6))
        preempt: Literal["recompute", "stop"] = "stop" if rng.random() < 0.25 else "recompute"
        # Where a stream ends for want of memory depends on the load, so it is not made again.
        logged = preempt == "stop" or rng.random() < 0.2
        inexact = logged and rng.random() < 0.5
        return cls(
            ranks=rng.choice((1, 2, 2, 3, 3, 4, 5, 7, 8)),
            tokenizers=rng.choice((1, 2)),
            store=rng.random() < 0.5
            and not inexact,  # what it keeps is checked by the right stream
            tight=tight,
            num_blocks=6 if tight else rng.choice((6, 8, 12)),
            scrub_every_s=rng.choice((0.0, 0.0, 0.4)),
            uneven=rng.random() < 0.3,
            num_slots=seqs + rng.choice((-1, 0, 1)),
            config=SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=rng.choice((17, 40, 130, 400)),
                prefill_watermark=rng.choice((0.5, 0.9, 1.0)),
                max_waiting=rng.choice((2, 20)),
                async_steps=rng.random() < 0.75,
                target_itl_ms=rng.choice((0, 0, 4)),
                priority_step_ms=rng.choice((0, 20)),
                preempt=preempt,
            ),
            step_ns=rng.choice(((2 * MS, 8 * MS), (5 * MS, 40 * MS))),
            requests=rng.randint(3, 8),
            clients=rng.choice((1, 2)),
            max_open=rng.choice((4, 100, 100)),
            faults_ns=rng.randint(2_500, 7_000) * MS,
            faults=rng.choice((1, 2, 4, 6)) * rough,
            chains=rng.choice((0.0, 0.3, 0.6)),
            load_ms=rng.choice(((300, 800), (300, 800), (300, 3000), (1000, 5000))),
            aborts=rng.choice((0.0, 0.0, 0.3)),
            step_death=rng.choice((0.0, 0.0, 0.001)) * rough,
            protocol_death=rng.choice((0.0, 0.0, 0.01, 0.05)) * rough,
            spawn_failure=rng.choice((0.0, 0.0, 0.05)) * rough,
            disk_full=rng.random() < 0.2 * rough,
            node_deaths=rng.choice((0, 0, 0, 0, 1, 2)) * rough,
            shut_down=rng.random() < 0.15 * rough,
            crash_looper=rng.random() < 0.03 * rough,
            changes=rng.choice((0, 1, 2, 4)),
            newcomer_fails=rng.choice((0.0, 0.0, 0.5)) * rough,
            logged=logged,
            inexact=inexact,
            eplb=EplbConfig(
                spare_slots=rng.choice((0, 1, 1, 2)),
                period_s=rng.choice((0.1, 0.3, 1.0)),
                min_rows=rng.choice((1, 500)),
                margin=rng.choice((0.0, 0.02)),
            ),
            loads_ns=rng.choice((300, 1000, 4000)) * MS,
            copy_ns=rng.choice(((MS, 20 * MS), (5 * MS, 200 * MS))),
            cannot_copy=rng.choice((0.0, 0.0, 0.05)),
        )

    def node_config(self) -> NodeConfig:
        return NodeConfig(
            ranks=self.ranks,
            tokenizers=self.tokenizers,
            kvstore=KVStoreConfig(enabled=self.store),
            eplb=self.eplb,
        )

    def draw_plan(self, rng: random.Random, names: list[str]) -> Plan:
        return Plan(
            protocol_death=self.protocol_death,
            slow_answer=rng.choice((0.0, 0.02)),
            spawn_failure=self.spawn_failure,
            crash_looper=rng.choice(names) if self.crash_looper and rng.random() < 0.5 else "",
            ignores_term=rng.choice((0.0, 0.2)),
            bad_input="",
            newcomer_fails=self.newcomer_fails,
        )
