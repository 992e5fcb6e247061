"""A fingerprint names everything that changes numbers, and nothing else."""

import shutil
from pathlib import Path

import pytest

from phalanx.worker_svc.fingerprint import numerics_fingerprint
from phalanx.worker_svc.model.truncation import Truncation
from phalanx.worker_svc.model.weights_hash import weights_hash

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"


def fingerprint(directory: Path = TINY, threads: int = 1, how: Truncation | None = None) -> str:
    return numerics_fingerprint(weights_hash(directory), "cpu", threads, how or Truncation())


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "elsewhere"))


def test_a_copy_elsewhere_is_the_same_model(copied: Path) -> None:
    assert fingerprint(copied) == fingerprint()


def test_one_bit_of_one_weight_makes_another(copied: Path) -> None:
    shard = copied / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert fingerprint(copied) != fingerprint()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_so_does_another_file_that_is_read(copied: Path, file: str) -> None:
    (copied / file).write_text((copied / file).read_text() + "\n")
    assert fingerprint(copied) != fingerprint()


def test_truncation_and_threads_are_part_of_it() -> None:
    found = {
        fingerprint(),
        fingerprint(threads=2),
        fingerprint(how=Truncation("mask", 140)),
        fingerprint(how=Truncation("compact", 140)),
        fingerprint(how=Truncation("compact", 256)),
    }
    assert len(found) == 5


def test_how_much_is_kept_does_not_matter_while_nothing_is_cut() -> None:
    assert fingerprint(how=Truncation("off", 140)) == fingerprint()
