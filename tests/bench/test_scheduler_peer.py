"""The peer of `bench scheduler`: asked in a process of its own, compared row by row, missed with a reason."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.bench import scheduler_peer
from phalanx.bench.scheduler_peer import compared, measure_peer
from phalanx.protocol.errors import PhalanxError

ROWS: list[dict[str, Any]] = [
    {"running": 16, "drafts": 0, "churn": 0.0, "cpu_p50_us": 100.0},
    {"running": 256, "drafts": 5, "churn": 0.05, "cpu_p50_us": 200.0},
]


def script(path: Path, body: str) -> Path:
    path.write_text(f"import json, sys\nasked = json.loads(sys.argv[1])\n{body}\n")
    return path


def test_ratios_are_of_cpu_time_row_by_row() -> None:
    peer = {"name": "vllm", "rows": [{"cpu_p50_us": 150.0}, {"cpu_p50_us": 5000.0}]}
    assert [row["ratio"] for row in compared(ROWS, peer)["rows"]] == [1.5, 25.0]


def test_the_peer_gets_the_same_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the library prints before does not matter."""
    body = (
        "print('a warning')\n"
        "rows = [{**case, 'cpu_p50_us': 300.0 + asked['steps']} for case in asked['cases']]\n"
        "print(json.dumps({'name': 'other', 'rows': rows}))"
    )
    monkeypatch.setattr(scheduler_peer, "SCRIPT", script(tmp_path / "peer.py", body))
    peer = measure_peer(ROWS, {"steps": 100}, sys.executable)["peer"]
    assert peer == {
        "name": "other",
        "rows": [
            {"running": 16, "drafts": 0, "churn": 0.0, "cpu_p50_us": 400.0, "ratio": 4.0},
            {"running": 256, "drafts": 5, "churn": 0.05, "cpu_p50_us": 400.0, "ratio": 2.0},
        ],
    }


def test_an_interpreter_that_cannot_do_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_peer, "SCRIPT", script(tmp_path / "peer.py", "import no_vllm"))
    with pytest.raises(PhalanxError, match="No module named 'no_vllm'"):
        measure_peer(ROWS, {}, sys.executable)
    with pytest.raises(PhalanxError, match="no/such/python"):
        measure_peer(ROWS, {}, "no/such/python")


def test_without_a_peer_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = measure_peer(ROWS, {}, None)
    assert answer["peer"] is None and "--peer-python" in answer["peer_missing"]
    json.dumps(answer)
