"""The streams of `phalanx chaos`: requests of many kinds, how each sequence arrived, and whether it is the right one."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from phalanx.protocol.errors import Refused
from phalanx.protocol.messages import Delta, PromptLogprob, Sampling, TokenLogprobs
from phalanx.services.client import GatewaySilent, RequestTimeout, Spec
from phalanx.services.client_async import AsyncClient

REQUESTS = 24
REQUEST_S_MAX = 240.0
_FORCED = 6  # tokens


@dataclass
class Outcome:
    """One sequence as it arrived."""

    tokens: list[int] = field(default_factory=list[int])
    text: str = ""
    finals: list[str] = field(default_factory=list[str])  # finish reasons: exactly one is right
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: tuple[PromptLogprob | None, ...] = ()
    longest_gap_ms: float = 0.0
    gap_end: float = 0.0  # when that gap was over, time.monotonic
    first_ms: float = 0.0  # from the call to its first token, or to its end without one
    first_end: float = 0.0  # when that was

    @property
    def refused(self) -> bool:
        """The node said that it does not take the request."""
        return [final.partition(":")[0] for final in self.finals] == [Refused.__name__]


def requests(rng: random.Random, count: int = REQUESTS) -> list[Spec]:
    """Requests of many kinds; all of them with a seed, since without one there is nothing to compare."""
    specs: list[Spec] = []
    for position in range(count):
        prompt = [rng.randrange(10, 200) for _ in range(rng.choice([1, 3, 17, 64, 129, 300, 900]))]
        forced = tuple(range(20, 20 + _FORCED)) if position % 8 == 5 else ()
        sampling = Sampling(
            temperature=rng.choice([0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            seed=position,
            max_tokens=rng.choice([16, 48, 120]),
            ignore_eos=True,
            frequency_penalty=0.5 if position % 4 == 1 else 0.0,
            repetition_penalty=1.1 if position % 4 == 2 else 1.0,
            stop=("zq", "\x00never") if position % 6 == 3 else (),
            logprobs=2 if position % 5 == 0 else None,
            prompt_logprobs=1 if position % 7 == 0 else None,
            forced_token_ids=forced,
        )
        specs.append(Spec(tuple(prompt), sampling, n=2 if position % 5 == 4 else 1))
    return specs


def predicting(specs: list[Spec], wanted: dict[tuple[int, int], Outcome]) -> list[Spec]:
    """Some of the requests bring what is known of them as drafts, which changes no token."""
    return [
        spec
        if position % 3
        else replace(
            spec,
            sampling=structs.replace(
                spec.sampling, predicted_token_ids=tuple(wanted[position, 0].tokens)
            ),
        )
        for position, spec in enumerate(specs)
    ]


async def receive(
    client: AsyncClient, spec: Spec, leave_after_s: float | None = None
) -> tuple[str, list[Outcome]]:
    """One request to its end, which its client may leave midway. Returns (its id if it was accepted, ...)."""
    outcomes = [Outcome() for _ in range(spec.n)]
    began = time.monotonic()
    stream = client.generate(spec, timeout=REQUEST_S_MAX)
    leaving = None
    if leave_after_s is not None:
        leaving = asyncio.get_running_loop().call_later(leave_after_s, stream.abort)
    last = [began] * spec.n
    try:
        async for event in stream:
            outcome, now = outcomes[event.index], time.monotonic()
            stood_ms = (now - last[event.index]) * 1000
            if not outcome.tokens:
                outcome.first_ms, outcome.first_end = (now - began) * 1000, now
            elif stood_ms > outcome.longest_gap_ms:
                outcome.longest_gap_ms, outcome.gap_end = stood_ms, now
            last[event.index] = now
            if isinstance(event, Delta):
                outcome.tokens.extend(event.token_ids)
                outcome.logprobs.extend(event.logprobs)
                outcome.text += event.text
            else:
                outcome.finals.append(event.finish_reason)
    except (Refused, RequestTimeout, GatewaySilent) as error:
        now = time.monotonic()
        for outcome in outcomes:
            outcome.finals.append(f"{type(error).__name__}: {error}")
            if not outcome.tokens:
                outcome.first_ms, outcome.first_end = (now - began) * 1000, now
    finally:
        if leaving is not None:
            leaving.cancel()
    outcomes[0].prompt_logprobs = stream.prompt_logprobs
    return stream.request_id, outcomes


def difference(wanted: Outcome, got: Outcome, left: bool) -> tuple[str, str] | None:
    """(`lost`, `changed`, `logprobs` or `finals`, in words), or None for the stream that it should have been.

    A client that left midway has the first part of the stream, and one final all the same.
    """
    if len(got.finals) != 1:
        return "finals", f"final messages: {got.finals}"
    (final,) = got.finals
    tokens = wanted.tokens
    if left and final == "abort":
        wanted = replace(
            wanted,
            tokens=(tokens := tokens[: len(got.tokens)]),
            logprobs=wanted.logprobs[: len(got.logprobs)],
            prompt_logprobs=wanted.prompt_logprobs[: len(got.prompt_logprobs)],
        )
    elif final not in ("length", "stop"):
        return "lost", f"ended with {final} after {len(got.tokens)} of {len(tokens)} tokens"
    elif final != wanted.finals[0]:
        return "changed", f"finish reason {final}, without faults {wanted.finals[0]}"
    if got.tokens != tokens:
        at = _first_other(got.tokens, tokens)
        said = f"{got.tokens[at : at + 3]}, without faults {tokens[at : at + 3]}"
        return "changed", f"from token {at} on: {said}"
    if got.text != wanted.text and not left:
        return "changed", f"the text: {got.text!r}, without faults {wanted.text!r}"
    return _logprobs_differ(wanted, got)


def _logprobs_differ(wanted: Outcome, got: Outcome) -> tuple[str, str] | None:
    for what, these, those in (
        ("token", got.logprobs, wanted.logprobs),
        ("prompt token", got.prompt_logprobs, wanted.prompt_logprobs),
    ):
        at = _first_other(these, those)
        if at < max(len(these), len(those)):
            said = f"{these[at : at + 1]}, without faults {those[at : at + 1]}"
            return "logprobs", f"log-probabilities from {what} {at} on: {said}"
    return None


def _first_other(these: Sequence[object], those: Sequence[object]) -> int:
    """Where they differ first; the length of the shorter one if it is the other's beginning."""
    pairs = zip(these, those, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(these), len(those)))
