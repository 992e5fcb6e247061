"""What `phalanx bench kernels` says of a figure, without the GPU that it takes to measure one."""

import pytest
import torch

from phalanx.bench.kernels import __main__ as program
from phalanx.bench.kernels.harness import Ceilings, Figure

LIMITS = Ceilings(copy_bytes_per_s=4e12, gemm_flops_per_s=8e14)


def test_the_limit_is_the_one_that_is_reached_first() -> None:
    moving, computing = LIMITS.limit(4e6, 1e6), LIMITS.limit(4e6, 8e9)
    assert (moving.us, moving.ceiling, moving.unit) == (1.0, 4000.0, "GB/s")
    assert (computing.us, computing.ceiling, computing.unit) == (10.0, 800.0, "TFLOP/s")


def test_a_row_has_what_the_contract_says() -> None:
    row = program._row(Figure("experts", "24 pairs", 4.0, LIMITS.limit(8e6), goal=0.6))
    named = {"kernel": "experts", "shape": "24 pairs", "us": 4.0}
    limit = {"achieved": 2000.0, "ceiling": 4000.0, "unit": "GB/s", "ratio": 0.5}
    assert {key: row[key] for key in named | limit} == named | limit
    assert row["met"] is False


def test_the_conditions_have_what_the_contract_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = program._conditions(LIMITS)
    assert (found["device"], found["copy_gbps"], found["gemm_tflops"]) == ("a GPU", 4000, 800.0)
