"""The streams of `bench recovery`: requests of many kinds, and when each of their tokens arrived."""

import asyncio
import gc
import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from phalanx.protocol.errors import Refused
from phalanx.protocol.messages import Delta, PromptLogprob, Sampling, TokenLogprobs
from phalanx.services.client import GatewaySilent, RequestTimeout, Spec
from phalanx.services.client_async import AsyncClient

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sizes:
    """In tokens."""

    long_prompt: int = 2000
    outputs: int = 160


USUAL = Sizes()


@dataclass
class Sequence:
    """One sequence as it arrived."""

    position: int
    index: int
    request_id: str = ""
    sent_ns: int = 0  # when it was asked for, CLOCK_MONOTONIC
    tokens: list[int] = field(default_factory=list[int])
    times: list[int] = field(default_factory=list[int])  # of each delivery, CLOCK_MONOTONIC ns
    finish: str = ""  # empty: it never ended
    text: str = ""
    seed: int = 0  # of its request, as the node accepted it
    ended_ns: int = 0  # when its final came
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: tuple[PromptLogprob | None, ...] = ()

    @property
    def said(self) -> tuple[list[int], str, str]:
        """What must be the same whatever falls."""
        return self.tokens, self.text, self.finish

    @property
    def scores(self) -> tuple[list[TokenLogprobs], tuple[PromptLogprob | None, ...]]:
        """That must be, too, where it was asked for."""
        return self.logprobs, self.prompt_logprobs

    @property
    def arrivals(self) -> list[int]:
        """All deliveries, that of the final too."""
        return [*self.times, *([self.ended_ns] if self.ended_ns else [])]

    def spans(self, start_ns: int, end_ns: int) -> bool:
        """Whether something arrived both before and after this time."""
        arrivals = self.arrivals
        return len(arrivals) > 1 and arrivals[0] < start_ns and arrivals[-1] > end_ns

    def runs_in(self, start_ns: int, end_ns: int) -> bool:
        """Whether some time between two deliveries lies in this time, at least in part."""
        arrivals = self.arrivals
        return len(arrivals) > 1 and arrivals[0] < end_ns and arrivals[-1] > start_ns


@dataclass
class Load:
    """Requests to run at once. While `going_on`, those with short prompts begin anew at their end."""

    specs: list[Spec]
    going_on: bool = False


@dataclass
class Played:
    sequences: list[Sequence]
    first_round_s: float  # until every request had ended once


def requests(
    rng: random.Random,
    count: int,
    known: dict[tuple[int, int], Sequence] | None = None,
    sizes: Sizes = USUAL,
) -> list[Spec]:
    """`count` requests: every other prompt long, some short ones text; some n=2, penalties, stop
    strings, log-probabilities, no seed.

    Args:
        known: what the sequences were, by (position, index): some requests predict it then.
    """
    specs: list[Spec] = []
    for position in range(count):
        length = sizes.long_prompt if position % 2 == 0 else rng.choice([1, 17, 64])
        prompt = [rng.randrange(10, 200) for _ in range(length)]
        predicts = position % 6 == 0 and known is not None
        sampling = Sampling(
            temperature=rng.choice([0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            seed=None if position % 8 == 7 else position,
            max_tokens=sizes.outputs,
            ignore_eos=True,
            frequency_penalty=0.5 if position % 4 == 1 else 0.0,
            repetition_penalty=1.1 if position % 4 == 2 else 1.0,
            stop=("zq", "\x00never") if position % 6 == 3 else (),
            predicted_token_ids=tuple(known[position, 0].tokens) if known and predicts else (),
            logprobs=2 if position % 5 == 0 else None,
            prompt_logprobs=1 if position % 7 == 0 else None,
        )
        text = "".join(map(chr, prompt)) if position % 4 == 1 else tuple(prompt)
        specs.append(Spec(text, sampling, n=2 if position % 5 == 4 else 1))
    return specs


def with_seeds(specs: list[Spec], drawn: list[Sequence]) -> list[Spec]:
    """The request of each of these sequences, with the seed that the node drew for it."""
    return [
        replace(
            specs[s.position], sampling=structs.replace(specs[s.position].sampling, seed=s.seed)
        )
        for s in drawn
    ]


async def play(run_dir: Path, load: Load) -> Played:
    """Run the load to its end. Nobody's time is taken while our own garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        return await _play(run_dir, load)
    finally:
        gc.enable()


async def _play(run_dir: Path, load: Load) -> Played:
    started, sequences = time.monotonic(), list[Sequence]()
    async with AsyncClient(run_dir) as client:
        once = [0.0] * len(load.specs)

        async def slot(position: int, spec: Spec) -> None:
            sequences.extend(await _receive(client, position, spec))
            once[position] = time.monotonic() - started
            while load.going_on and position % 2 == 1:
                sequences.extend(await _receive(client, position, spec))

        await asyncio.gather(*(slot(at, spec) for at, spec in enumerate(load.specs)))
    return Played(sequences, max(once))


async def _receive(client: AsyncClient, position: int, spec: Spec) -> list[Sequence]:
    """One request to its end; a sequence that does not come to one has no `finish`."""
    sent_ns = time.monotonic_ns()
    found = [Sequence(position, index, sent_ns=sent_ns) for index in range(spec.n)]
    stream = client.generate(spec, timeout=_TIMEOUT_S)
    try:
        async for event in stream:
            sequence = found[event.index]
            if isinstance(event, Delta):
                sequence.times.append(time.monotonic_ns())
                sequence.tokens.extend(event.token_ids)
                sequence.logprobs.extend(event.logprobs)
                sequence.text += event.text
            else:
                sequence.finish, sequence.ended_ns = event.finish_reason, time.monotonic_ns()
    except (Refused, RequestTimeout, GatewaySilent):
        pass  # it counts as lost
    for sequence in found:
        sequence.request_id, sequence.seed = stream.request_id, stream.seed
    found[0].prompt_logprobs = stream.prompt_logprobs
    return found
