"""Which weights a checkpoint holds, as one string. No torch here."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

_WHOLE_BYTES = 1 << 30  # shards are hashed whole up to this sum
_SAMPLE_BYTES = 1 << 16  # of each tenth of a larger shard, besides its header
_SMALL = ("config.json", "tokenizer.json")


def weights_hash(model_dir: Path, held: Mapping[str, memoryview] | None = None) -> str:
    """Hash of config.json, tokenizer.json and the shards.

    Checkpoints above 1 GiB are not read whole: headers, sizes and samples of every shard are.

    Args:
        held: The shards' bytes by file name, if they are in memory; the files are not looked at then.
    """
    digest = hashlib.sha256(small_files(model_dir))
    names = sorted(held) if held is not None else [p.name for p in _shards(model_dir)]
    sizes = [len(held[n]) if held is not None else (model_dir / n).stat().st_size for n in names]
    whole = sum(sizes) <= _WHOLE_BYTES
    for name, size in zip(names, sizes, strict=True):
        digest.update(f"{name}:{size}".encode())
        if held is not None:
            _add(digest, held[name], whole)
        else:
            _add_file(digest, model_dir / name, size, whole)
    return digest.hexdigest()


def small_files(model_dir: Path) -> bytes:
    """The files of a checkpoint that are read at every start."""
    return b"".join((model_dir / name).read_bytes() for name in _SMALL)


def _shards(model_dir: Path) -> list[Path]:
    return sorted(model_dir.glob("*.safetensors"))


def _spans(header: int, size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of what is hashed of a large shard."""
    samples = [(size * part // 10, _SAMPLE_BYTES) for part in range(10)]
    return [(8, header), *samples]


def _add(digest: "hashlib._Hash", shard: memoryview, whole: bool) -> None:
    if whole:
        digest.update(shard)
        return
    header = int.from_bytes(shard[:8], "little")
    for at, count in _spans(header, len(shard)):
        digest.update(shard[at : at + count])


def _add_file(digest: "hashlib._Hash", path: Path, size: int, whole: bool) -> None:
    with path.open("rb") as file:
        if whole:
            digest.update(file.read())
            return
        header = int.from_bytes(file.read(8), "little")
        for at, count in _spans(header, size):
            file.seek(at)
            digest.update(file.read(count))
