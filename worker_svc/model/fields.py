"""Typed, strict access to a JSON object: every error names the field and shows its value."""

from collections.abc import Mapping


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is for the person who wrote it."""


class Fields:
    """One JSON object of a configuration file. Remembers what was read, to report the rest."""

    def __init__(self, path: str, raw: object) -> None:
        if not isinstance(raw, dict):
            raise ConfigError(f"{path or 'the file'} is {_shown(raw)}; it must be an object")
        self._prefix = f"{path}." if path else ""
        self._raw: dict[str, object] = raw
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        self._read.add(name)
        return self._raw.get(name) is not None

    def section(self, name: str) -> "Fields":
        return Fields(self._prefix + name, self._get(name))

    def integer(self, name: str) -> int:
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str) -> float:
        value = self._get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(name, value, "a number")
        return float(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._get(name)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(name, value, "a list of integers")
        return tuple(value)

    def strings(self, name: str) -> list[str]:
        value = self._get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, value, "a list of strings")
        return value

    def expect(self, fixed: Mapping[str, object]) -> None:
        """Each field must be there with exactly this value."""
        for name, wanted in fixed.items():
            value = self._get(name)
            if value != wanted or type(value) is not type(wanted):
                raise self._wrong(name, value, f"{_shown(wanted)}, all that is supported")

    def neutral(self, allowed: Mapping[str, tuple[object, ...]]) -> None:
        """Each field may be absent, or have one of the values that change nothing."""
        for name, values in allowed.items():
            self._read.add(name)
            if name in self._raw and self._raw[name] not in values:
                raise self._wrong(name, self._raw[name], f"absent or {_shown(values[0])}")

    def skip(self, *names: str) -> None:
        """These fields may be there and mean nothing here."""
        self._read.update(names)

    def unread(self) -> tuple[str, ...]:
        """Full names of the fields that nothing asked for, in file order."""
        return tuple(self._prefix + name for name in self._raw if name not in self._read)

    def _get(self, name: str) -> object:
        self._read.add(name)
        if name not in self._raw:
            raise ConfigError(f"{self._prefix}{name} is missing")
        return self._raw[name]

    def _wrong(self, name: str, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"{self._prefix}{name} is {_shown(value)}; it must be {wanted}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
