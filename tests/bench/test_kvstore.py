"""The KV store's benchmark gives every figure of docs/cli.md from a real, short run, and leaves nothing."""

from pathlib import Path

import pytest

from phalanx.bench.kvstore import run


@pytest.mark.process
def test_a_short_run_gives_all_figures_and_leaves_nothing(tmp_path: Path) -> None:
    figures = run(0.03, tmp_path / "scratch")
    for name in (
        "raw_write_gbps",
        "raw_read_gbps",
        "put_gbps",
        "get_gbps",
        "get_prompt_gbps",
        "put_p99_ms",
        "get_p99_ms",
    ):
        assert figures[name] > 0, name
    for peer in figures["peers"].values():
        assert set(peer) == {"put_gbps", "get_gbps"}
    assert list((tmp_path / "scratch").iterdir()) == []
