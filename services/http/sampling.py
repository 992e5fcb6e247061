"""Fields of a request's body to `Sampling`. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from phalanx.protocol.messages import Sampling
from phalanx.services.http.errors import HttpError, bad

# Fields that a body may carry beside those of its API; each is the one of `Sampling`.
EXTENSIONS = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "first_n_token_no_eos",
    "blocked_token_ids",
    "raw_logprobs",
    "predicted_token_ids",
    "forced_token_ids",
)


def sampling(body: Mapping[str, Any], fields: Mapping[str, Any]) -> Sampling:
    """`fields`, and what the body says of EXTENSIONS and `logit_bias`. Raises HttpError 400."""
    given = {name: value for name, value in fields.items() if value is not None}
    given |= {name: body[name] for name in EXTENSIONS if body.get(name) is not None}
    if body.get("logit_bias"):
        given["logit_bias"] = _biases(body["logit_bias"])
    try:
        return msgspec.convert(given, Sampling)
    except msgspec.ValidationError as error:
        raise bad(str(error)) from error


def stops(value: object) -> tuple[str, ...]:
    """`stop`: a string, a list of them, or nothing. Raises HttpError 400."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(stop, str) for stop in value):
        return tuple(value)
    raise bad("stop must be a string or a list of strings", "stop")


def refuse_fields(body: Mapping[str, Any], names: Iterable[str]) -> None:
    """What is asked for and not done here must not pass in silence."""
    for name in names:
        if body.get(name):
            raise HttpError(400, "unsupported", f"{name} is not supported here", param=name)


def whole(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(f"{name} is {value!r}, it must be a whole number", name)
    return value


def _biases(value: object) -> dict[int, float]:
    """JSON has strings for keys."""
    try:
        return {int(token): float(bias) for token, bias in dict(value).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise bad("logit_bias must map token ids to numbers", "logit_bias") from error
