"""Engram's token map equals the reference's, and survives a useless cache."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from phalanx.worker_svc.model.token_map import engram_token_map

TINY = Path(__file__).parents[1] / "golden" / "tiny-a"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "phalanx"


def test_it_equals_the_reference_and_is_kept(own_cache: Path) -> None:
    with safe_open(TINY / "expected.safetensors", "np") as arrays:
        expected = arrays.get_tensor("engram.token_map")
    assert np.array_equal(engram_token_map(TINY / "tokenizer.json", 512), expected)
    [stored] = own_cache.iterdir()
    assert np.array_equal(np.load(stored), expected)
    assert np.array_equal(engram_token_map(TINY / "tokenizer.json", 512), expected)


def test_a_broken_cache_entry_is_made_again(own_cache: Path) -> None:
    expected = engram_token_map(TINY / "tokenizer.json", 512)
    [stored] = own_cache.iterdir()
    for content in (b"", b"junk", stored.read_bytes()[:200]):
        stored.write_bytes(content)
        assert np.array_equal(engram_token_map(TINY / "tokenizer.json", 512), expected)


def test_a_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert engram_token_map(TINY / "tokenizer.json", 512).max() == 205


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer.json"):
        engram_token_map(file, 8)
