"""Where a model fits is worked out from its sizes alone, and agrees with what loading it takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from forward_world import TINY

from e2e.node import PHALANX
from phalanx.worker_svc.devices import Devices, devices_at_hand
from phalanx.worker_svc.model.checkpoint import load_checkpoint
from phalanx.worker_svc.model.config import ModelConfig
from phalanx.worker_svc.model.fit import fits
from phalanx.worker_svc.model.footprint import all_slots
from phalanx.worker_svc.model.inspect import DeviceFits, render_fits

FULL = Path(__file__).parent / "full_config.json"
H200 = Devices("NVIDIA H200", False, 8, 139 << 30)


def test_the_full_model_needs_four_h200() -> None:
    found = fits(ModelConfig.load(FULL), H200)
    assert [fit.ranks for fit in found] == list(range(1, 9))
    assert [fit.fits for fit in found] == [False] * 3 + [True] * 5
    assert [fit.expert_slots for fit in found] == [384, 384, 192, 128, 96, 77, 64, 55]
    four = found[3]
    left = int((139 << 30) * 0.9) - four.weight_bytes - 64 * 3_054_656
    assert four.kv_bytes == left
    assert four.kv_tokens == (left // 114_048 - 1) * 128
    assert found[0].kv_bytes < 0 == found[0].kv_tokens


def test_cpu_ranks_share_one_memory() -> None:
    config = ModelConfig.load(TINY)
    found = fits(config, Devices("cpu", True, 1, 1 << 30))
    assert len(found) == 8
    one, four = found[0], found[3]
    assert one.shared_bytes == 2 * 512 * 128 * 2  # embedding and output matrix, bf16
    assert four.kv_bytes < (one.kv_bytes + one.weight_bytes) // 4
    assert four.weight_bytes < one.weight_bytes and four.expert_slots == 3


def test_loading_needs_the_memory_that_was_worked_out() -> None:
    """One byte less is refused."""
    config = ModelConfig.load(TINY)
    need = fits(config, Devices("cpu", True, 1, 1 << 30), 1)[0].weight_bytes
    slots = [range(count) for count in all_slots(config, config.n_routed_experts)]
    load_checkpoint(TINY, slots, memory_limit_bytes=need)
    with pytest.raises(ValueError, match="use more ranks, or a smaller model"):
        load_checkpoint(TINY, slots, memory_limit_bytes=need - 1)


def test_people_see_what_is_short_and_what_is_left() -> None:
    text = render_fits(DeviceFits(H200, fits(ModelConfig.load(FULL), H200)))
    assert "on 8 x NVIDIA H200 with 139.0 GiB free" in text
    assert "3 ranks, 192 experts a layer: 144.6 GiB of weights a rank, 19.7 GiB short" in text
    assert "4 ranks, 128 experts a layer: 99.8 GiB of weights a rank" in text
    cpu = Devices("cpu", True, 1, 64 << 30)
    text = render_fits(DeviceFits(cpu, fits(ModelConfig.load(FULL), cpu, 1)))
    assert "beside 271.4 GiB of page cache, read by all ranks" in text


def test_this_machines_memory_comes_first() -> None:
    first = devices_at_hand()[0]
    assert first.is_cpu and first.count == 1 and first.free_bytes > 1 << 28


@pytest.mark.process
def test_the_command_shows_it_for_any_memory() -> None:
    command = [*PHALANX, "inspect", str(FULL), "--memory", "139", "--ranks", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (line,) = done.stdout.splitlines()
    (found,) = json.loads(line)["devices"]
    assert found["devices"]["free_bytes"] == 139 << 30
    assert [fit["kv_tokens"] > 0 for fit in found["fits"]] == [False, False, False, True]
    wrong = subprocess.run([*PHALANX, "inspect", str(FULL), "--ranks", "0"], check=False)
    assert wrong.returncode == 2


def test_a_configuration_is_inspected_without_torch() -> None:
    if len(devices_at_hand()) > 1:
        pytest.skip("GPUs are asked for their memory through torch")
    probe = (
        "import sys, runpy; sys.argv = ['inspect', sys.argv[1], '--json'];"
        "runpy.run_module('phalanx.worker_svc.model.inspect', run_name='__main__');"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", probe, str(FULL)]
    assert subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
