"""Every limit on what comes from outside. Pure: a bad request gets one clear error and touches nothing.

Two stages, because a text has no length before it is tokenized: `check` on arrival, `resolve` when
the prompt's ids are known. Both raise `Refused`; what they let through is safe for every process
behind the gateway: each id is in the vocabulary and each sum fits the model and the KV pool.
"""

import math
from collections.abc import Collection, Sequence

import msgspec

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.introductions import check_introduced, introduction_bytes
from phalanx.protocol.limits import (
    BLOCKED_IDS_MAX,
    KEY_CHARS_MAX,
    LOGIT_BIAS_MAX,
    MODEL_NAME_CHARS_MAX,
    N_MAX,
    PROMPT_CHARS_MAX,
    SEED_MAX,
    STOP_IDS_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
    TOP_LOGPROBS_MAX,
)
from phalanx.protocol.messages import PROTOCOL_VERSION, ChatMessage, Generate, Sampling, Span
from phalanx.services.model_limits import ModelLimits

GREEDY_BELOW = 1e-5  # a temperature below this is greedy: logits divided by it leave float32
TEMPERATURE_MAX = 100.0
PENALTY_MAX = 2.0  # presence and frequency, either sign
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 100.0
LOGIT_BIAS_VALUE_MAX = 100.0
ROLE_CHARS_MAX = 64


def check(message: Generate, model: ModelLimits) -> None:
    """Everything that can be judged before the prompt is tokenized. Raises Refused."""
    if message.v != PROTOCOL_VERSION:
        raise _bad(f"the message is of protocol version {message.v}, this is {PROTOCOL_VERSION}")
    _check_prompt(message, model)
    _within("n", message.n, 1, N_MAX)
    if message.n > 1 and message.sampling.max_tokens == 0:
        raise _bad(
            f"n is {message.n} and max_tokens is 0: prompt_logprobs alone are told once; leave n out"
        )
    _text("key", message.key, KEY_CHARS_MAX)
    _text("model", message.model, MODEL_NAME_CHARS_MAX)
    if message.model not in ("", model.name):
        raise Refused(
            Code.UNKNOWN_MODEL,
            f"the model {message.model!r} is not served here, {model.name!r} is; leave the name out"
            " or use that one",
        )
    check_sampling(message.sampling, model)


def check_sampling(sampling: Sampling, model: ModelLimits) -> None:
    """Ranges of every sampling field by itself. Raises Refused."""
    s = sampling
    _real("temperature", s.temperature, 0.0, TEMPERATURE_MAX)
    _real("top_p", s.top_p, 0.0, 1.0)
    if s.top_p == 0:
        raise _bad("top_p is 0, it must be above 0 and at most 1; temperature 0 is greedy")
    _within("top_k", s.top_k, -1, 2**31 - 1)
    _real("min_p", s.min_p, 0.0, 1.0)
    if s.min_p == 1:
        raise _bad("min_p is 1, it must be at least 0 and below 1; temperature 0 is greedy")
    _real(
        "repetition_penalty", s.repetition_penalty, REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX
    )
    _real("presence_penalty", s.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
    _real("frequency_penalty", s.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
    if s.seed is not None:
        _within("seed", s.seed, 0, SEED_MAX)
    if s.logprobs is not None:
        _within("logprobs", s.logprobs, 0, min(TOP_LOGPROBS_MAX, model.vocab_size))
    if s.prompt_logprobs is not None:
        _within("prompt_logprobs", s.prompt_logprobs, 0, min(TOP_LOGPROBS_MAX, model.vocab_size))
        if model.skips_prompt_rows:
            raise _bad(
                "prompt_logprobs cannot be told here: this node leaves a prompt's early tokens out of"
                " the later layers (worker.yoco_truncation: compact); it needs off or mask"
            )
    _check_ends(s, model)
    _count("logit_bias", s.logit_bias, LOGIT_BIAS_MAX)
    _ids("logit_bias", list(s.logit_bias), model)
    for token, bias in s.logit_bias.items():
        _real(f"logit_bias[{token}]", bias, -LOGIT_BIAS_VALUE_MAX, LOGIT_BIAS_VALUE_MAX)


def resolve(
    sampling: Sampling,
    prompt_ids: Sequence[int],
    model: ModelLimits,
    *,
    pool_tokens: int | None,
    default_max_tokens: int,
    seed: int,
) -> Sampling:
    """The sampling as it will be run, once the prompt's ids are known. Raises Refused.

    Args:
        pool_tokens: Tokens that the KV pool of the smallest rank holds; None while no rank said so.
        seed: Used when the request brings none.
    """
    if not prompt_ids:
        raise _bad("the prompt has no tokens; send at least one")
    _ids("the prompt", prompt_ids, model)
    count = len(prompt_ids)
    made = sampling_for(sampling, count, model, pool_tokens, default_max_tokens, seed)
    assert made.max_tokens is not None
    # Each of its sequences has a seed of its own: none takes more than the largest.
    beside = introduction_bytes(msgspec.structs.replace(made, seed=SEED_MAX))
    check_introduced(count, made.max_tokens, beside)
    return made


def sampling_for(
    s: Sampling,
    prompt_tokens: int,
    model: ModelLimits,
    pool_tokens: int | None,
    default_max_tokens: int,
    seed: int,
) -> Sampling:
    """Bounds the length as whole numbers of any size, and fills in what the request left open."""
    limit, owner = model.max_positions, "the model takes"
    if pool_tokens is not None and pool_tokens < limit:
        limit, owner = pool_tokens, "the KV pool of a rank holds"
    room = limit - prompt_tokens
    if room < 1 and not (room == 0 and s.max_tokens == 0):
        raise _bad(
            f"the prompt has {prompt_tokens} tokens, {owner} {limit} with at least 1 for the output;"
            " shorten the prompt"
        )
    max_tokens = s.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(max(default_max_tokens, s.min_tokens), room))
    if s.clamp_max_tokens:
        max_tokens = min(max_tokens, room)
    if max_tokens > room:
        raise _bad(
            f"prompt ({prompt_tokens} tokens) + max_tokens ({max_tokens}) ="
            f" {prompt_tokens + max_tokens}, {owner} {limit}; ask for at most {room}"
        )
    if s.min_tokens > max_tokens:
        raise _bad(f"min_tokens is {s.min_tokens}, more than max_tokens ({max_tokens})")
    return msgspec.structs.replace(
        s,
        temperature=0.0 if s.temperature < GREEDY_BELOW else s.temperature,
        top_k=0 if s.top_k < 0 or s.top_k >= model.vocab_size else s.top_k,
        seed=seed if s.seed is None else s.seed,
        max_tokens=max_tokens,
        first_n_token_no_eos=min(s.first_n_token_no_eos, max_tokens),
        predicted_token_ids=s.predicted_token_ids[:max_tokens],
        forced_token_ids=s.forced_token_ids[:max_tokens],
    )


def _check_prompt(message: Generate, model: ModelLimits) -> None:
    given = [
        name
        for name in ("prompt", "prompt_token_ids", "messages", "spans")
        if getattr(message, name) is not None
    ]
    if len(given) != 1:
        raise _bad(
            "a request has exactly one of prompt, prompt_token_ids, messages and spans, this one has "
            + (" and ".join(given) if given else "none")
        )
    if message.prompt is not None:
        _text("the prompt", message.prompt, PROMPT_CHARS_MAX, Code.TOO_LARGE)
        if not message.prompt:
            raise _bad("the prompt is empty; send at least one character")
    if message.prompt_token_ids is not None:
        if not message.prompt_token_ids:
            raise _bad("prompt_token_ids is empty; send at least one id")
        _ids("prompt_token_ids", message.prompt_token_ids, model)
    if message.messages is not None:
        _check_chat(message.messages)
    if message.spans is not None:
        _check_spans(message.spans)


def _check_spans(spans: Sequence[Span]) -> None:
    if not any(span.text for span in spans):
        raise _bad("spans is empty; send at least one character")
    for at, span in enumerate(spans):
        _text(f"spans[{at}]", span.text, PROMPT_CHARS_MAX, Code.TOO_LARGE)
    total = sum(len(span.text) for span in spans)
    if total > PROMPT_CHARS_MAX:
        raise Refused(
            Code.TOO_LARGE, f"spans have {total} characters, at most {PROMPT_CHARS_MAX} fit"
        )


def _check_chat(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise _bad("messages is empty; send at least one message")
    for at, message in enumerate(messages):
        _text(f"messages[{at}].role", message.role, ROLE_CHARS_MAX)
        if not message.role:
            raise _bad(f"messages[{at}].role is empty; say system, user or assistant")
        _text(f"messages[{at}].content", message.content, PROMPT_CHARS_MAX, Code.TOO_LARGE)
    total = sum(len(message.content) for message in messages)
    if total > PROMPT_CHARS_MAX:
        raise Refused(
            Code.TOO_LARGE, f"messages have {total} characters, at most {PROMPT_CHARS_MAX} fit"
        )


def _check_ends(s: Sampling, model: ModelLimits) -> None:
    least = 1 if s.prompt_logprobs is None else 0
    if s.max_tokens is not None and s.max_tokens < least:
        raise _bad(
            f"max_tokens is {s.max_tokens}, it must be at least 1, or 0 to get prompt_logprobs alone"
        )
    # Bounded here as well, so that no process behind needs more than 32 bits for a length.
    _within("min_tokens", s.min_tokens, 0, model.max_positions)
    _within("first_n_token_no_eos", s.first_n_token_no_eos, 0, 2**31 - 1)
    _count("stop", s.stop, STOP_STRINGS_MAX)
    for at, stop in enumerate(s.stop):
        _text(f"stop[{at}]", stop, STOP_STRING_CHARS_MAX)
        if not stop:
            raise _bad(f"stop[{at}] is empty: it would end every stream at once; leave it out")
    _count("stop_token_ids", s.stop_token_ids, STOP_IDS_MAX)
    _ids("stop_token_ids", s.stop_token_ids, model)
    _count("blocked_token_ids", s.blocked_token_ids, BLOCKED_IDS_MAX)
    _ids("blocked_token_ids", s.blocked_token_ids, model)
    _count("predicted_token_ids", s.predicted_token_ids, model.max_positions)
    _ids("predicted_token_ids", s.predicted_token_ids, model)
    _count("forced_token_ids", s.forced_token_ids, model.max_positions)
    _ids("forced_token_ids", s.forced_token_ids, model)


def _ids(name: str, ids: Sequence[int], model: ModelLimits) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
        at, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < model.vocab_size)
        raise _bad(
            f"{name} has the id {wrong} at {at}; the model's are 0 to {model.vocab_size - 1}"
        )


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise _bad(f"{name} is {value}, allowed are {low} to {high}")


def _real(name: str, value: float, low: float, high: float) -> None:
    # Written so that nan fails.
    if not (math.isfinite(value) and low <= value <= high):
        raise _bad(f"{name} is {value}, allowed are {low:g} to {high:g}")


def _count(name: str, values: Collection[object], most: int) -> None:
    if len(values) > most:
        raise _bad(f"{name} has {len(values)} entries, at most {most} are allowed")


def _text(name: str, value: str, most: int, code: Code = Code.BAD_REQUEST) -> None:
    if len(value) > most:
        raise Refused(code, f"{name} has {len(value)} characters, at most {most} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _bad(
            f"{name} is not valid Unicode: a lone surrogate at character {error.start}"
        ) from error


def _bad(text: str) -> Refused:
    return Refused(Code.BAD_REQUEST, text)
