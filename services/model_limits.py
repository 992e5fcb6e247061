"""What a service must know of the model to judge a request, read from its config.json without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from phalanx.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelLimits:
    name: str  # as the operator named the model; a client names it so or not at all
    vocab_size: int
    max_positions: int  # tokens of a sequence, prompt and output together
    eos_token_id: int
    skips_prompt_rows: bool = False  # prompts are truncated: not every token gets a log-probability


def read_model(model_dir: Path, name: str) -> ModelLimits:
    """Raises ConfigError when config.json is absent, malformed or lacks one of the numbers."""
    path = model_dir / "config.json"
    try:
        tree = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read the model's {path}: {error.strerror}") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"the model's {path} is not a JSON object: {error}") from error
    text = tree.get("text_config", tree)
    return ModelLimits(
        name,
        vocab_size=_positive(path, text, "vocab_size"),
        max_positions=_positive(path, text, "max_position_embeddings"),
        eos_token_id=_number(path, tree if "eos_token_id" in tree else text, "eos_token_id"),
    )


def _number(path: Path, tree: object, field: str) -> int:
    value = tree.get(field) if isinstance(tree, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{path}: {field} is {value!r}, it must be a whole number")
    return value


def _positive(path: Path, tree: object, field: str) -> int:
    value = _number(path, tree, field)
    if value == 0:
        raise ConfigError(f"{path}: {field} is 0, it must be at least 1")
    return value
