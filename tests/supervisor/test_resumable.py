"""The output of `phalanx run` survives what ends a run, and is never mixed with that of other prompts."""

import json
from pathlib import Path

import pytest

from phalanx.protocol.errors import ConfigError
from phalanx.supervisor.resumable import Results, digest

INPUTS = [digest(line) for line in (b'{"prompt": "a"}', b'{"prompt": "b"}\n')]


def row(position: int, index: int = 0, error: str | None = None) -> dict[str, object]:
    return {"position": position, "index": index, "text": "x", "error": error}


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, INPUTS) as results:
        assert results.done == set()
        results.add(row(1))
        results.add(row(0, error="no"))
    with Results(path, INPUTS) as results:
        assert (results.done, results.failed) == ({(1, 0)}, 1)


@pytest.mark.parametrize("torn", [b"{", b'{"position": 0, "index": 0, "in', b"\xff\x00"])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, INPUTS) as results:
        results.add(row(1))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with Results(path, INPUTS) as results:
        assert results.done == {(1, 0)}
        results.add(row(0))
    assert path.read_bytes().startswith(whole)
    assert [json.loads(line)["position"] for line in path.read_text().splitlines()] == [1, 0]


def test_results_of_other_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, INPUTS) as results:
        results.add(row(1))
    before = path.read_bytes()
    for inputs in (INPUTS[:1], INPUTS[::-1]):
        with pytest.raises(ConfigError, match="line 1 belongs to other prompts"):
            Results(path, inputs)
    path.write_bytes(b'{"hello": 1}\n')
    with pytest.raises(ConfigError, match="line 1 is no result"):
        Results(path, INPUTS)
    path.write_bytes(before)
    with pytest.raises(ConfigError, match="cannot read"):
        Results(tmp_path, INPUTS)
