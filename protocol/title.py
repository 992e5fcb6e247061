"""What `ps` shows of a fork: arguments of its own, not those of the process that waited for its turn."""

import ctypes
from collections.abc import Mapping
from pathlib import Path

_ARG_START = (
    45  # fields of proc(5)'s stat behind the name: where the arguments begin in our memory, and end
)


def show_arguments(values: Mapping[str, object], but: str) -> None:
    """Put these values behind their options, and leave the flag `but` out, where the kernel reads the arguments.
    Nothing happens where they would not fit, or the kernel does not say where that is."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return
    start, end = map(int, fields[_ARG_START : _ARG_START + 2])
    for option, value in values.items():
        if option.encode() in words[:-1]:
            words[words.index(option.encode()) + 1] = str(value).encode()
    shown = b"".join(word + b"\0" for word in words if word != but.encode())
    if start and len(shown) <= end - start:
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
