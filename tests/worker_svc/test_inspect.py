"""The figures of the full model, from its configuration alone, are the published ones."""

import json
from pathlib import Path

import pytest

from phalanx.worker_svc.model.fields import ConfigError
from phalanx.worker_svc.model.inspect import inspect_model, main, render
from phalanx.worker_svc.model.shards import read_header

FULL = Path(__file__).parent / "full_config.json"
TINY = Path(__file__).parents[1] / "golden" / "tiny-a"


def test_the_full_model_has_the_published_numbers() -> None:
    model = inspect_model(FULL)
    assert model.total_params == 763_205_315_794
    assert model.tensors == 96_085
    assert model.payload_bytes == 510_286_023_000
    assert model.bytes_by_dtype == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }
    parts = model.params_by_part
    assert round(parts["engram_table"] / 1e9, 2) == 196.61
    assert round(parts["draft"] / 1e9, 2) == 14.23
    assert round(parts["vision"] / 1e9, 3) == 0.485
    assert round(model.active_params / 1e9, 1) == 15.5


def test_cache_sizes_of_the_full_model() -> None:
    model = inspect_model(FULL)
    assert model.kv_bytes_per_token == 890
    assert model.block_bytes == 114_048
    assert model.window_ring_bytes == 70_752
    assert model.slot_bytes == 43 * 70_752 + 3 * 4_096 + 32  # rings, pairs, padding to 64
    assert not model.complete and model.vision


def test_a_checkpoint_is_counted_as_its_files_hold_it() -> None:
    model = inspect_model(TINY)
    stored = [
        entry for file in TINY.glob("model-*.safetensors") for entry in read_header(file).values()
    ]
    assert model.complete
    assert model.tensors == len(stored)
    assert model.payload_bytes == sum(entry.end - entry.begin for entry in stored)


def test_people_see_the_numbers_too() -> None:
    text = render(inspect_model(FULL))
    for part in ("763,205,315,794", "96,085 tensors", "475.2 GiB", "890 bytes a token", "114,048"):
        assert part in text


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        inspect_model(tmp_path)


def test_the_command_prints_one_document_or_one_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["inspect", str(FULL), "--json"])
    main()
    assert json.loads(capsys.readouterr().out)["total_params"] == 763_205_315_794
    monkeypatch.setattr("sys.argv", ["inspect", "/nowhere/config.json"])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    assert end.value.code == 2 and captured.out == ""
    assert "cannot read /nowhere/config.json" in captured.err
