"""One copy of the checkpoint's shards in shared memory, which outlives every worker. No torch here.

The supervisor makes the file and holds its lock; a process of its own, `python -m
phalanx.worker_svc.host_weights`, fills it once the node is ready, so that no start waits for it. The
arena's header is written last, after the copy was compared with what was read: a copy that was cut
short, or is wrong, has no header and is never taken. Workers map it privately, like the files: all
ranks share its pages, and nobody can change them.

Payload: the shards, each from a page on, then the manifest (JSON), then its length (u64).
"""

import hashlib
import json
import mmap
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from phalanx.protocol.arena import HEADER_BYTES, SHM, Arena, arena_name, write_header
from phalanx.protocol.config import load_config
from phalanx.protocol.errors import ArenaError, ExitCode, NoRoom, PhalanxError
from phalanx.worker_svc.model.memory import available_bytes, shown_bytes
from phalanx.worker_svc.model.weights_hash import small_files, weights_hash

KIND = "weights"
_CHUNK = 8 << 20
_PAGE = 4096


class Manifest(msgspec.Struct, frozen=True):
    weights: str  # weights_hash of the checkpoint that this is a copy of
    small: str  # sha256 of its small files, which are not copied
    shards: dict[str, tuple[int, int]]  # file name -> offset in the payload, bytes


@dataclass(frozen=True)
class HostWeights:
    """A whole copy, mapped. `shards` are private views by file name."""

    weights: str
    shards: dict[str, memoryview]

    @classmethod
    def find(cls, node: str, model_dir: Path) -> "HostWeights | None":
        """The node's copy; None while there is none, or when it is of another checkpoint."""
        try:
            fd = os.open(SHM / arena_name(node, KIND, 0), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            data = _payload(fd)
            manifest = _manifest(data)
        except (ArenaError, msgspec.DecodeError):
            return None
        finally:
            os.close(fd)
        if manifest.small != hashlib.sha256(small_files(model_dir)).hexdigest():
            return None
        views = {name: data[at : at + count] for name, (at, count) in manifest.shards.items()}
        return cls(manifest.weights, views)


def _payload(fd: int) -> memoryview:
    """Raises ArenaError unless the header, which is written last, is there."""
    Arena.check_header(fd)
    private = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE, as the files are mapped
    whole = mmap.mmap(fd, 0, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return memoryview(whole)[HEADER_BYTES:]


def _manifest(data: memoryview) -> Manifest:
    length = int.from_bytes(data[-8:], "little")
    return msgspec.json.decode(data[-8 - length : -8], type=Manifest)


# ---------------------------------------------------------------- filling it


def fill(fd: int, model_dir: Path) -> int:
    """Copy the checkpoint's shards into the empty file `fd`. Returns the bytes taken.

    Raises:
        NoRoom: it would take more than half of what is free.
        OSError: a file cannot be read, or the room was taken meanwhile.
        ArenaError: the copy is not what was read.
    """
    paths = sorted(model_dir.glob("*.safetensors"))
    shards: dict[str, tuple[int, int]] = {}
    at = 0
    for path in paths:
        size = path.stat().st_size
        shards[path.name] = (at, size)
        at = -(-(at + size) // _PAGE) * _PAGE
    blank = Manifest("0" * 64, "0" * 64, shards)
    nbytes = at + len(msgspec.json.encode(blank)) + 8
    _check_room(HEADER_BYTES + nbytes)
    os.posix_fallocate(fd, 0, HEADER_BYTES + nbytes)
    mapping = mmap.mmap(fd, HEADER_BYTES + nbytes)
    data = memoryview(mapping)[HEADER_BYTES:]
    held = {name: data[at : at + size] for name, (at, size) in shards.items()}
    for path in paths:
        _copy(path, held[path.name])
    small = hashlib.sha256(small_files(model_dir)).hexdigest()
    made = msgspec.json.encode(Manifest(weights_hash(model_dir, held), small, shards))
    data[-8 - len(made) : -8] = made
    data[-8:] = len(made).to_bytes(8, "little")
    write_header(mapping, nbytes, "supervisor")
    return HEADER_BYTES + nbytes


def _check_room(need: int) -> None:
    stat = os.statvfs(SHM)
    free = min(stat.f_bavail * stat.f_frsize, available_bytes())
    if need > free // 2:
        raise NoRoom(
            f"the checkpoint needs {shown_bytes(need)}, {shown_bytes(free)} are free in memory and"
            f" {SHM}, of which half is left to others: workers read the files instead"
        )


def _copy(path: Path, into: memoryview) -> None:
    """Raises ArenaError when what arrived is not what was read."""
    digest, at = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while at < len(into) and (count := file.readinto(into[at : at + _CHUNK])):
            digest.update(into[at : at + count])
            at += count
    if at < len(into):
        raise ArenaError(f"{path} has become shorter while it was copied")
    if hashlib.sha256(into).digest() != digest.digest():
        raise ArenaError(f"the copy of {path} in shared memory is not what was read")


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), required=True)
@click.option("--fd", type=int, required=True, help="The file, made and locked by the supervisor.")
def main(run_dir: Path, fd: int) -> None:
    """Fill the node's weight arena; says what came of it in one line of JSON."""
    os.nice(19)  # the node serves meanwhile
    started = time.monotonic()
    try:
        nbytes = fill(fd, load_config(run_dir).model_path)
    except (OSError, PhalanxError) as error:
        _say({"held": False, "reason": str(error)})
        sys.exit(ExitCode.UNHEALTHY)
    _say({"held": True, "bytes": nbytes, "s": round(time.monotonic() - started, 3)})


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
