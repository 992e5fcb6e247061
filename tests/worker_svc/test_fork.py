"""Sequences of one request share their prompt on the real engine: tokens and logprobs are those that each
would have alone, whatever the prompt's place in blocks and windows, with chunks and with abandoned steps."""

import numpy as np
import pytest
import torch
from engine_world import MAX_LEN, EngineWorld
from forward_world import weights_of

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.errors import EpochChanged
from phalanx.protocol.messages import Sampling, Submit, TokenLogprobs, Tokens
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, StepResult
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import Membership
from sim.token_rows import Handles

OUTPUTS = 6
SEEDS = (11, 12, 13)
Stream = tuple[list[int], list[TokenLogprobs]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Served:
    """The scheduler's core over the engine, one plan at a time."""

    def __init__(self, shape: str, budget: int) -> None:
        self.engine = EngineWorld(shape).engine
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_waiting=8)
        rows = 24
        columns = QueueTable.create(memoryview(bytearray(queue_bytes(rows))), rows, 0, 1)
        self.core = Scheduler(config, 0, 1, columns)
        self.core.handle(self.engine.hello(), 0)
        self.core.handle(Membership(2, True), 0)
        self.forks = 0

    def streams(
        self, prompts: list[tuple[str, int, list[int], int]], abandon: int = 0
    ) -> list[Stream]:
        """Run (request id, index, prompt, seed) together; every `abandon`-th plan is given up once."""
        for call, (request_id, index, prompt, seed) in enumerate(prompts):
            sampling = Sampling(seed=seed, max_tokens=OUTPUTS, ignore_eos=True, logprobs=1)
            ids = np.array(prompt, np.int32).tobytes()
            self.core.handle(Submit(call, request_id, index, 0, ids, sampling), 0)
        found: dict[tuple[str, int], Stream] = {(r, i): ([], []) for r, i, _, _ in prompts}
        handles, plans, aborted = Handles(), list[StepPlan](), 0
        while True:
            actions = self.core.step(0)
            plans += actions.plans
            for message in actions.gateway:
                if isinstance(message, Tokens):
                    for item in handles.items(message):
                        tokens, logprobs = found[item.request_id, item.index]
                        assert item.offset == len(tokens)
                        tokens += item.token_ids
                        logprobs += item.logprobs
            if not plans:
                return list(found.values())
            plan = plans.pop(0)
            self.forks += len(plan.forks)
            if plan.seen < aborted or (abandon and plan.seq % abandon == 0):
                if plan.seen >= aborted:
                    self._give_up(plan)
                aborted = plan.seq
                self.core.handle(StepResult(plan.seq, aborted=True), 0)
            else:
                self.core.handle(self.engine.run(plan), 0)

    def _give_up(self, plan: StepPlan) -> None:
        """What an abandoned step may do, it does: the forward pass runs, nothing is committed."""

        def moved(*ignored: object) -> None:
            raise EpochChanged("for the test")

        sample, self.engine._sample = self.engine._sample, moved  # type: ignore[method-assign,assignment]
        with pytest.raises(EpochChanged):
            self.engine.run(plan)
        self.engine._sample = sample  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("shape", "budget", "abandon"), [("tiny-a", 1024, 0), ("short", 1024, 0), ("short", 50, 3)]
)
def test_followers_are_as_if_alone(shape: str, budget: int, abandon: int) -> None:
    vocab = weights_of(shape).config.vocab_size
    served = Served(shape, budget)
    try:
        for length in (1, 2, 127, 128, 129, 200):
            assert length + OUTPUTS <= MAX_LEN
            prompt = [3 + (7 * at * at + length) % (vocab - 3) for at in range(length)]
            before = served.forks
            together = served.streams(
                [(f"{length:032x}", i, prompt, seed) for i, seed in enumerate(SEEDS)], abandon
            )
            assert served.forks > before or length == 1
            alone = [
                served.streams([(f"{1000 * length + seed:032x}", 0, prompt, seed)])[0]
                for seed in SEEDS
            ]
            assert together == alone, f"a prompt of {length} tokens"
            assert all(len(tokens) == OUTPUTS for tokens, _ in together)
        pool = served.core.rank.pool
        assert pool.free == pool.total
    finally:
        served.engine.close()
