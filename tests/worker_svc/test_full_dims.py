"""The full model's dimensions load and compute on a small machine, exactly, and its large tables stay on
disk. One layer of each kind and eight experts: the rest of the full model repeats these."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.worker_svc.model.config import ModelConfig
from worker_svc import full_dims

# A busy machine is several times slower; its files, 5 GB, are made once.
pytestmark = [pytest.mark.soak, pytest.mark.timed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Removed at the end: it takes 5 GB."""
    scratch = Path(tempfile.mkdtemp(prefix="phalanx-full-"))
    try:
        full_dims.write(scratch / "model", seed=1)
        yield scratch / "model"
    finally:
        shutil.rmtree(scratch)


@pytest.fixture(scope="module")
def result(directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", full_dims.__file__, str(directory)]
    environment = os.environ | {
        "XDG_CACHE_HOME": str(directory.parent / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=500, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_table_is_sparse(directory: Path) -> None:
    table = (directory / full_dims.TABLE_FILE).stat()
    assert table.st_size > 384006168 * (256 + 8) > 100e9
    assert table.st_blocks * 512 < 8 << 20


def test_it_fits_a_small_machine(result: dict[str, Any]) -> None:
    assert result["peak_bytes"] < 12 << 30, result["seconds"]


def test_a_decode_row_equals_one_step_of_all_tokens(result: dict[str, Any]) -> None:
    assert result["logits"] == [1, 129280]
    assert result["same_as_one_step"]
    assert 0.1 < result["spread"] < 10


def test_engram_reads_the_rows_of_the_definition(result: dict[str, Any]) -> None:
    config = ModelConfig.parse(full_dims.config_json())
    expected = full_dims.table_rows(config, full_dims.TOKENS)
    assert result["engram_ids"] == expected[:9].tolist()
    assert expected.max() * 256 > 2**32
    # A row of zeros, which any other row is, would make the gate 1/2.
    assert all(abs(gate - 0.5) > 1e-4 for gate in result["engram_gates"])


def test_every_kind_of_layer_took_part(result: dict[str, Any]) -> None:
    # The last prompt token, at position 8, sees 4 pairs and 9 single entries.
    assert result["chosen"]["1"] == [0, 1, 2, 3] + [-1] * 6
    assert result["chosen"]["3"] == result["chosen"]["4"] == [*range(9), -1]
    assert result["candidates"] >= 9
    assert result["experts_used"] == [8] * 6
    assert all(0.05 < size < 2 for size in result["stream_rms"])


def test_the_draft_proposes_a_block(result: dict[str, Any]) -> None:
    assert len(result["drafts"]) == 5 and result["drafts_finite"]
    assert all(0 <= token < 129280 for token in result["drafts"])
