"""API keys: who may ask, and how much at a time. The file holds one key a line, `NAME KEY [RUNNING [WAITING]]`."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.protocol.errors import ConfigError
from phalanx.services.http.errors import HttpError
from phalanx.services.http.quotas import Quota

KEY_CHARS_MIN = 8
ANYONE = "anyone"  # the one holder where no keys are asked for


@dataclass(frozen=True)
class Keys:
    """Digests of the keys, so that the process does not hold what a log could leak. Empty: no key is needed."""

    names: dict[bytes, str]
    quotas: dict[str, Quota]

    def who(self, headers: Mapping[str, str]) -> str:
        """The name of the key in `Authorization: Bearer` or `x-api-key`. Raises HttpError 401."""
        if not self.names:
            return ANYONE
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not key:
            raise HttpError(
                401, "no_api_key", "send an API key: Authorization: Bearer KEY, or x-api-key: KEY"
            )
        digest, found = _digest(key), ""
        for known, name in self.names.items():
            if hmac.compare_digest(known, digest):
                found = name
        if not found:
            raise HttpError(401, "invalid_api_key", "this API key is not known here")
        return found


def read_keys(path: Path, default: Quota) -> Keys:
    """Raises ConfigError with the line that is wrong."""
    names: dict[bytes, str] = {}
    quotas: dict[str, Quota] = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        if not 2 <= len(words) <= 4:
            raise ConfigError(f"{where}: {len(words)} words, expected NAME KEY [RUNNING [WAITING]]")
        name, key, *bounds = words
        if len(key) < KEY_CHARS_MIN:
            raise ConfigError(
                f"{where}: the key has {len(key)} characters, at least {KEY_CHARS_MIN}"
            )
        if name in quotas or _digest(key) in names:
            raise ConfigError(f"{where}: the name or the key is there already")
        try:
            numbers = [int(bound) for bound in bounds]
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        running = numbers[0] if numbers else default.running
        waiting = numbers[1] if len(numbers) == 2 else default.waiting
        if running < 1 or waiting < 0:
            raise ConfigError(f"{where}: RUNNING must be at least 1 and WAITING at least 0")
        names[_digest(key)] = name
        quotas[name] = Quota(running, waiting)
    if not names:
        raise ConfigError(f"{path} has no key: every request would be refused")
    return Keys(names, quotas)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
