"""Launch settings of the kernels: a table in the package, written by `phalanx tune`, read at start.

A setting may depend on the shape of a weight or of the model. It may depend on the number of rows
only where that changes no bit of a row (tile height, warps, pipeline stages): otherwise a token
would depend on who shares its batch.
"""

import json
from functools import cache
from pathlib import Path
from typing import Final

TABLE: Final = Path(__file__).with_name("configs.json")

Config = dict[str, int]  # names of a kernel's settings -> values


@cache
def table() -> dict[str, dict[str, Config]]:
    """operation -> key -> settings, as written by `phalanx tune`."""
    loaded: dict[str, dict[str, Config]] = json.loads(TABLE.read_text())
    return loaded


def config(operation: str, key: str, default: Config) -> Config:
    """The settings for an operation at a shape (`key`, for example "5120x2304"), or the default."""
    return default | table().get(operation, {}).get(key, {})
