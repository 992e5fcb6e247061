"""Requests from the command line or a JSONL file, checked line by line."""

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from phalanx.protocol.errors import ConfigError
from phalanx.protocol.messages import ChatMessage, Sampling
from phalanx.services.client import Spec

F = TypeVar("F", bound=Callable[..., Any])
_SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_OTHER_FIELDS = frozenset({*_PROMPT_FIELDS, "n", "model"})


def sampling_options(function: F) -> F:
    """Options of every command that generates: defaults for requests that do not say."""
    for option in (
        click.option(
            "--prompt-logprobs",
            type=int,
            default=None,
            help="With --json: of each prompt token and of so many likeliest. Goes with --max-tokens 0, too.",
        ),
        click.option("--n", type=int, default=None, help="Sequences of each prompt."),
        click.option(
            "--ignore-eos",
            is_flag=True,
            default=None,
            help="Go on to --max-tokens, past the end of text.",
        ),
        click.option(
            "--stop", multiple=True, help="End before this text; may be given several times."
        ),
        click.option("--seed", type=int, default=None, help="Drawn and reported when absent."),
        click.option("--top-k", type=int, default=None, help="Draw from so many likeliest tokens."),
        click.option(
            "--top-p",
            type=float,
            default=None,
            help="Draw from the likeliest tokens that have this share together.",
        ),
        click.option("--temperature", type=float, default=None, help="0 is greedy."),
        click.option("--max-tokens", type=int, default=None, help="Of each sequence."),
    ):
        function = option(function)
    return function


@dataclass(frozen=True)
class BadLine:
    """An input line that is no request; it harms none of the others."""

    text: str


def parse_file(path: Path, defaults: dict[str, Any], stream: bool) -> list[Spec | BadLine]:
    """One entry a non-empty line. Raises ConfigError when the file cannot be read."""
    return [parse_line(line, defaults, stream) for line in read_lines(path)]


def read_lines(path: Path) -> list[bytes]:
    """The lines that are not empty. Raises ConfigError when the file cannot be read."""
    try:
        lines = path.read_bytes().removeprefix(BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return [line for line in lines if line.strip()]


def parse_texts(
    texts: Iterable[str], defaults: dict[str, Any], stream: bool
) -> list[Spec | BadLine]:
    return [_parse({"prompt": text}, defaults, stream) for text in texts]


def parse_line(line: bytes, defaults: dict[str, Any], stream: bool) -> Spec | BadLine:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadLine(f"not valid UTF-8: byte {error.start} of the line is {line[error.start]:#x}")
    except (ValueError, RecursionError) as error:
        return BadLine(f"not JSON: {error}")
    if not isinstance(fields, dict):
        return BadLine(f"a line must be a JSON object, this is a {type(fields).__name__}")
    return _parse(fields, defaults, stream)


def _parse(fields: dict[str, Any], defaults: dict[str, Any], stream: bool) -> Spec | BadLine:
    unknown = sorted(set(fields) - _SAMPLING_FIELDS - _OTHER_FIELDS)
    if unknown:
        return BadLine(f"unknown fields: {', '.join(unknown)}")
    given = [name for name in _PROMPT_FIELDS if fields.get(name) is not None]
    if len(given) != 1:
        return BadLine(
            f"give exactly one of {', '.join(_PROMPT_FIELDS)}; this line has {given or 'none'}"
        )
    merged = {**defaults, **fields}
    sampling = {name: merged[name] for name in _SAMPLING_FIELDS if merged.get(name) is not None}
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = [sampling["stop"]]
    kind = {"prompt": str, "prompt_token_ids": list[int], "messages": list[ChatMessage]}[given[0]]
    try:
        return Spec(
            prompt=msgspec.convert(fields[given[0]], kind),
            sampling=msgspec.convert(sampling, Sampling, strict=True, str_keys=True),
            n=msgspec.convert(merged.get("n", 1), int),
            stream=stream,
            model=msgspec.convert(merged.get("model") or "", str),
        )
    except msgspec.ValidationError as error:
        return BadLine(str(error))
