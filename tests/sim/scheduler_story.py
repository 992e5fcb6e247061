"""One scheduler core and one hash worker, stepped by hand: tests read as given, event, effects."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.messages import (
    AbortSequence,
    BusToGateway,
    FinishReason,
    KVRequest,
    Sampling,
    Submit,
    Tokens,
    TokensItem,
)
from phalanx.protocol.queues import QueueTable, queue_bytes
from phalanx.protocol.steps import StepPlan, StepResult
from phalanx.scheduler_svc.core import Scheduler
from phalanx.scheduler_svc.events import Membership, Staging, StoreArenas
from sim.hash_worker import HashWorker, fault_free
from sim.scheduler_checks import check
from sim.token_rows import Handles

T = TypeVar("T")
MS = 1_000_000


def request_id(number: int) -> str:
    return f"{number:032x}"


class Story:
    """`step` runs one whole step; `plan` and `finish` are its two halves."""

    def __init__(
        self,
        *,
        num_blocks: int = 20,
        num_slots: int = 8,
        store: bool = False,
        num_snapshots: int = 2,
        staging: Staging | None = None,
        accepting: bool = True,
        **config: object,
    ) -> None:
        limits = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "max_waiting": 8,
            "async_steps": False,  # one plan at a time makes stories easier to tell
            **config,
        }
        self.config = msgspec.convert(limits, SchedulerConfig)
        rows = 2 * self.config.max_waiting + self.config.max_num_seqs
        self.columns = QueueTable.create(memoryview(bytearray(queue_bytes(rows))), rows, 3, 7)
        self.core = Scheduler(self.config, 3, 7, self.columns, store_enabled=store)
        self.worker = HashWorker(1, num_blocks, num_slots, num_snapshots=num_snapshots)
        self.now_ns = 1_000 * MS
        self.heard: list[BusToGateway] = []
        self.puts: list[KVRequest] = []
        self.plan: StepPlan | None = None
        self.prompts: dict[int, tuple[list[int], Sampling]] = {}
        if accepting:
            self.event(self.worker.hello(), StoreArenas(0, 0, staging), Membership(2, True))

    def event(self, *events: object) -> None:
        """Events, then the core's decisions: a plan stays under way until `finish`."""
        for event in events:
            self.core.handle(event, self.now_ns)
        self._decide()

    def _decide(self) -> None:
        actions = self.core.step(self.now_ns)
        check(self.core)
        self.heard += actions.gateway
        self.puts += self.core.store_step(self.now_ns)
        for plan in actions.plans:
            assert self.plan is None, "two plans under way"
            self.plan = plan

    def submit(
        self,
        number: int,
        prompt: int | Sequence[int] = 10,
        *,
        attempt: int = 0,
        outputs: Sequence[int] = (),
        priority: int = 0,
        resumed: bool | None = None,
        afresh: bool = False,
        **sampling: object,
    ) -> None:
        """A prompt of that many tokens, or these tokens. End tokens are off unless told. It is resumed if it has
        outputs, unless told."""
        settings = {"seed": number, "max_tokens": 20, "ignore_eos": True, **sampling}
        chosen = msgspec.convert(settings, Sampling)
        ids = (
            [(number + 3 * at) % 50 for at in range(prompt)] if isinstance(prompt, int) else prompt
        )
        self.prompts[number] = (list(ids), chosen)
        self.event(
            Submit(
                number,
                request_id(number),
                0,
                attempt,
                np.array(ids, np.int32).tobytes(),
                chosen,
                np.array(outputs, np.int32).tobytes(),
                priority,
                bool(outputs) if resumed is None else resumed,
                afresh=afresh,
            )
        )

    def abort(self, number: int, *, attempt: int = 0, reason: FinishReason = "abort") -> None:
        self.event(AbortSequence(900 + number, request_id(number), 0, attempt, reason))

    def finish(
        self, *, abandon: bool = False, status: dict[int, int] | None = None, forced: int = -1
    ) -> None:
        """The result of the step under way. `status`: of its samples; `forced`: a token for all."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        result = self.worker.run(plan, abandon=abandon)
        if status:
            result = failed(result, status)
        if forced >= 0:
            tokens = np.full(len(result.tokens) // 4, forced, np.int32).tobytes()
            result = msgspec.structs.replace(result, tokens=tokens)
        self.now_ns += MS
        self.event(result)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.finish()

    def run(self, steps_max: int = 2000) -> None:
        """Until nothing is under way."""
        for _ in range(steps_max):
            if self.plan is None:
                return
            self.finish()
        raise AssertionError(f"still running after {steps_max} steps")

    def later(self, ms: int) -> None:
        self.now_ns += ms * MS
        self._decide()

    # ------------------------------------------------------------ what came out

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in self.heard if isinstance(message, kind)]

    def items(self, number: int) -> list[TokensItem]:
        handles = Handles()
        every = [item for message in self.of(Tokens) for item in handles.items(message)]
        return [item for item in every if item.request_id == request_id(number)]

    def outputs(self, number: int) -> list[int]:
        tokens: list[int] = []
        for item in self.items(number):
            assert item.offset <= len(tokens), "a gap"
            tokens[item.offset :] = item.token_ids
        return tokens

    def ends(self, number: int) -> list[FinishReason]:
        return [item.finish_reason for item in self.items(number) if item.finish_reason is not None]

    def expected(self, number: int, count: int) -> list[int]:
        prompt, sampling = self.prompts[number]
        return fault_free(prompt, sampling.seed or 0, count)

    def rows(self) -> list[tuple[int, int]]:
        """(slot, rows) of each sequence in the plan under way."""
        assert self.plan is not None
        slots = np.frombuffer(self.plan.slots, np.int32).tolist()
        return list(zip(slots, np.frombuffer(self.plan.seqlens_q, np.int32).tolist(), strict=True))

    @property
    def free(self) -> tuple[int, int]:
        """(blocks, slots) that nobody holds."""
        return self.core.rank.pool.free, len(self.core.rank.free_slots)


def result_of(plan: StepPlan, token: int = 5) -> StepResult:
    count = plan.sample.count(1)
    tokens = np.full(count, token, np.int32).tobytes()
    return StepResult(plan.seq, aborted=False, tokens=tokens, status=bytes(count))


def failed(result: StepResult, status: dict[int, int]) -> StepResult:
    """The result, had the samples at these places failed: no token there, but a status."""
    assert result.counts == b"\1" * len(result.counts), "for steps without drafts"
    codes, counts = bytearray(result.status), bytearray(result.counts)
    for place, code in status.items():
        codes[place] = code
        counts[place] = code == 0
    kept = np.frombuffer(bytes(counts), np.uint8).astype(bool)
    tokens = np.frombuffer(result.tokens, np.int32)[kept]
    return msgspec.structs.replace(
        result, counts=bytes(counts), tokens=tokens.tobytes(), status=bytes(codes)
    )
