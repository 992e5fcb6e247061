"""The latency benchmark counts gaps where they end, serves a prompt of 16,000 tokens, and fills in every field."""

import json
from pathlib import Path

import pytest

from phalanx.bench.latency import LONG_PROMPT, Streams, _long_model, run


def test_a_gap_counts_where_it_ends_and_within_its_stream() -> None:
    streams = Streams([[0, 1_000_000, 5_000_000], [2_000_000, 4_000_000, 9_000_000]])
    assert streams.gaps_ms(0, 10_000_000) == [1.0, 4.0, 2.0, 5.0]
    assert streams.gaps_ms(4_000_000, 9_000_000) == [4.0, 2.0]


def test_the_model_takes_the_long_prompt(tmp_path: Path) -> None:
    model = Path(_long_model("random-tiny", tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    assert config["text_config"]["max_position_embeddings"] > LONG_PROMPT
    assert (model / "tokenizer.json").read_bytes()


@pytest.mark.process
@pytest.mark.soak
def test_one_short_run() -> None:
    figures = run(streams=2, seconds=2.0)
    on, off = figures["rows"]
    assert (on["target_itl_ms"], off["target_itl_ms"]) == (figures["target_itl_ms"], 0.0)
    for row in (on, off):
        assert 0 < row["unloaded_p50_ms"] <= row["unloaded_p99_ms"]
        assert 0 < row["loaded_p50_ms"] <= row["loaded_p99_ms"] <= row["loaded_max_ms"]
        assert row["short_alone_ms"] > 0 and row["short_behind_ms"] > 0
