"""A checkpoint directory's tensors as mapped bytes, checked against what its configuration asks for.

No torch here. Nothing is read until asked for: a table of 100 GB costs address space, not memory.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.tensors import ITEM_BYTES, TensorSpec, tensor_specs

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER = 100 << 20
# Writable, as torch wants its buffers, yet private. Without MAP_NORESERVE (0x4000 on Linux; Python
# has no name for it) the kernel refuses a private mapping larger than the machine's memory.
_PRIVATE = mmap.MAP_PRIVATE | 0x4000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
Held = Mapping[str, memoryview]  # shards in memory, by file name
_SHOWN = 8  # names listed per kind of defect


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says what is wrong and where."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a shard; offsets count from the start of the file."""

    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int


class Shard:
    """One safetensors file, mapped privately: writes to the bytes never reach the file.

    `held` is the same bytes in memory, mapped privately too: the file is not looked at then.
    """

    def __init__(self, path: Path, held: memoryview | None = None) -> None:
        self.path = path
        if held is not None:
            header = held[: 8 + min(int.from_bytes(held[:8], "little"), _MAX_HEADER)]
            self.entries = _read_header(path, BytesIO(header), len(held))
            self._bytes = held
            return
        try:
            with path.open("rb") as file:
                self.entries = _read_header(path, file, path.stat().st_size)
                mapped = mmap.mmap(file.fileno(), 0, flags=_PRIVATE, prot=_READ_WRITE)
                self._bytes = memoryview(mapped)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def view(self, name: str) -> memoryview:
        entry = self.entries[name]
        return self._bytes[entry.begin : entry.end]

    def read_anew(self, name: str) -> bytearray:
        """The tensor's bytes as the file has them now; where it cannot be read, those in memory."""
        entry = self.entries[name]
        found = bytearray(entry.end - entry.begin)
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                count = os.preadv(fd, [found], entry.begin)
            finally:
                os.close(fd)
        except OSError:
            count = -1
        return found if count == len(found) else bytearray(self.view(name))

    def adopt(self, held: memoryview) -> None:
        """From now on take the bytes from there; they are the same."""
        assert len(held) == len(self._bytes)
        self._bytes = held


class Checkpoint:
    """An opened checkpoint: configuration, and every expected tensor found with its shape.

    `held` has shards that are in memory already, by file name: their files are not looked at.

    Raises:
        ConfigError: config.json is missing or unusable.
        CheckpointError: files or tensors are missing, unexpected or misshapen; all are named.
    """

    def __init__(self, directory: Path, held: Held | None = None) -> None:
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory with a checkpoint")
        self.directory = directory
        self.config = ModelConfig.load(directory)
        self.specs: Mapping[str, TensorSpec] = tensor_specs(self.config)
        index = _weight_map(directory)
        self._shards = shards = _open_shards(directory, index.values(), held or {})
        self._shard_of = {name: shards[file] for name, file in index.items()}
        _check(directory, self.specs, self._shard_of)

    @property
    def tokenizer(self) -> Path:
        return self.directory / "tokenizer.json"

    def view(self, name: str) -> memoryview:
        """The tensor's bytes, mapped."""
        return self._shard_of[name].view(name)

    def read_anew(self, name: str) -> bytearray:
        """The tensor's bytes, from its file. Safe in any thread, which a disk that hangs keeps."""
        return self._shard_of[name].read_anew(name)

    def adopt(self, held: Held) -> None:
        """Take the tensors from the same shards in memory from now on."""
        for name, shard in self._shards.items():
            if name in held:
                shard.adopt(held[name])


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file. Raises CheckpointError if it is not one."""
    with path.open("rb") as file:
        return _read_header(path, file, path.stat().st_size)


def _read_header(path: Path, file: BinaryIO, size: int) -> dict[str, Entry]:
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
    if length > min(size - 8, _MAX_HEADER):
        raise CheckpointError(f"{path} is not a safetensors file, or it is cut short")
    try:
        raw = json.loads(file.read(length))
        entries = {
            name: Entry(
                shape=tuple(int(side) for side in item["shape"]),
                dtype=str(item["dtype"]),
                begin=8 + length + int(item["data_offsets"][0]),
                end=8 + length + int(item["data_offsets"][1]),
            )
            for name, item in raw.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} has a broken header: {error!r}") from error
    for name, entry in entries.items():
        if not 8 + length <= entry.begin <= entry.end <= size:
            raise CheckpointError(
                f"{path} is cut short: {name} ends at {entry.end} of {size} bytes"
            )
    return entries


def _weight_map(directory: Path) -> dict[str, str]:
    index = directory / INDEX_NAME
    single = directory / SINGLE_NAME
    if not index.exists() and single.exists():
        return dict.fromkeys(read_header(single), SINGLE_NAME)
    try:
        raw = json.loads(index.read_bytes())["weight_map"]
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} has no weight_map: {error!r}") from error
    if not isinstance(raw, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in raw.values()
    ):
        raise CheckpointError(f"{index}: weight_map must map tensor names to plain file names")
    return raw


def _open_shards(directory: Path, files: Iterable[str], held: Held) -> dict[str, Shard]:
    names = sorted(set(files))
    absent = [name for name in names if name not in held and not (directory / name).is_file()]
    if absent:
        raise CheckpointError(f"{directory} lacks {_listed('shard file', absent)}")
    return {name: Shard(directory / name, held.get(name)) for name in names}


def _check(directory: Path, specs: Mapping[str, TensorSpec], found: Mapping[str, Shard]) -> None:
    """Raise one CheckpointError that names every kind of defect."""
    lost = [name for name, shard in found.items() if name not in shard.entries]
    stored = {name for shard in set(found.values()) for name in shard.entries}
    defects = [
        ("missing tensor", [name for name in specs if name not in found]),
        ("unexpected tensor", sorted((stored | found.keys()) - specs.keys())),
        ("tensor absent from the file the index names", lost),
        ("misshapen tensor", list(_misshapen(specs, found))),
    ]
    told = [_listed(kind, names) for kind, names in defects if names]
    if told:
        raise CheckpointError(f"{directory} does not match its config.json: " + "; ".join(told))


def _misshapen(specs: Mapping[str, TensorSpec], found: Mapping[str, Shard]) -> Iterable[str]:
    for name, spec in specs.items():
        entry = found[name].entries.get(name) if name in found else None
        if entry is None:
            continue
        if (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            have, want = f"{entry.dtype} {list(entry.shape)}", f"{spec.dtype} {list(spec.shape)}"
            yield f"{name} is {have}, expected {want}"
        elif entry.end - entry.begin != math.prod(spec.shape) * ITEM_BYTES[spec.dtype]:
            yield f"{name} has {entry.end - entry.begin} bytes, expected {spec.num_bytes}"


def _listed(kind: str, names: list[str]) -> str:
    rest = len(names) - _SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"{len(names)} {kind}{'s' if len(names) > 1 else ''} ({', '.join(names[:_SHOWN])}{more})"
