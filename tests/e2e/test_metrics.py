"""What Prometheus reads: true to the node, never hanging, and enough for every panel of the dashboard."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.node import PHALANX, Node, others
from phalanx.services.http.counts import Counts
from phalanx.services.http.quotas import Door, Quota
from phalanx.services.metrics import exposition

pytestmark = pytest.mark.process
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def read(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_every_outcome_is_accounted_for(node: Node) -> None:
    def gathered() -> dict[str, dict[tuple[str, ...], float]]:
        return read(exposition(node.run_dir).decode())

    before = gathered()
    node.generate([*others(6), {"prompt": "x", "n": 3, "max_tokens": 4, "ignore_eos": True}])
    after = gathered()
    accepted = after["phalanx_sequences_accepted_total"][()]
    finished = sum(after["phalanx_sequences_finished_total"].values())
    assert accepted == finished + after["phalanx_sequences_open"][()]
    assert accepted - before["phalanx_sequences_accepted_total"][()] == 9
    assert after["phalanx_healthy"] == {(): 1.0}
    assert set(after["phalanx_up"].values()) == {1.0}
    status: dict[str, Any] = node.status()
    assert {name for (name,) in after["phalanx_up"]} == {p["name"] for p in status["processes"]}
    for what in ("blocks", "slots"):
        free, total = (after[f"phalanx_scheduler_{part}_{what}"] for part in ("free", "total"))
        assert free == total and len(free) == len(status["ranks"])


def test_the_command_prints_the_same(node: Node) -> None:
    command = [*PHALANX, "metrics", "--run-dir", str(node.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert read(done.stdout).keys() == read(exposition(node.run_dir).decode()).keys()


def test_every_panel_of_the_dashboard_has_its_metrics(node: Node) -> None:
    counts = Counts(Door(1, 1, Quota(1, 1)))
    counted = counts.request("/v1/completions")
    counted.end()
    known = read(exposition(node.run_dir, counts.registry).decode()).keys()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len(panels) > 10
    for panel in panels:
        for target in panel["targets"]:
            named = re.findall(r"phalanx_\w+", target["expr"])
            assert named, target
            # A node that has planned nothing yet has no age of a plan.
            missing = set(named) - known - {"phalanx_eplb_plan_age_seconds", "phalanx_eplb_balance"}
            assert not missing, panel["title"]


def test_a_node_that_is_not_there_is_not_healthy(tmp_path: Path) -> None:
    assert read(exposition(tmp_path).decode()) == {"phalanx_healthy": {(): 0.0}}
