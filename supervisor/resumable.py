"""The output file of `phalanx run`: finished sequences, a line each, that a later run goes on from."""

import json
import os
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.protocol.errors import ConfigError

_SYNC_S = 1.0  # what a crash of the machine may cost


def digest(line: bytes) -> str:
    """Of one input line: an output is only taken for the line it was made from."""
    return blake2b(line.strip(), digest_size=8).hexdigest()


class Results:
    """Append-only. A torn last line, which a crash leaves, is cut off and done again.

    Args:
        inputs: the digest of every input line, by position.

    Raises:
        ConfigError: the file cannot be used, or belongs to other prompts.
    """

    def __init__(self, path: Path, inputs: Sequence[str]) -> None:
        self._path, self._inputs = path, inputs
        self.done: set[tuple[int, int]] = set()  # (position, index)
        self.failed = 0  # sequences with an error: tried again
        whole = self._read()
        try:
            self._file = path.open("ab")
            self._file.truncate(whole)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        self._synced = time.monotonic()

    def _read(self) -> int:
        """Take note of what is done; returns the length of the whole lines."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from error
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            self._note(number, line)
        return whole

    def _note(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            position, index, made_from = row["position"], row["index"], row["input"]
            known = self._inputs[position] if 0 <= position < len(self._inputs) else None
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self._path}, line {number} is no result of phalanx run: choose another --out"
            ) from error
        if known != made_from:
            raise ConfigError(
                f"{self._path}, line {number} belongs to other prompts (position {position}): choose"
                " another --out, or remove it to begin anew"
            )
        if row.get("error"):
            self.failed += 1
        else:
            self.done.add((position, index))

    def add(self, row: dict[str, Any]) -> None:
        """Write one result; after a crash of the program it is there."""
        row = row | {"input": self._inputs[row["position"]]}
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > _SYNC_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
