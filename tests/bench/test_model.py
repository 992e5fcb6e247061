"""The model's benchmark reports what docs/cli.md promises, compares the two paths it says, and leaves
the process exact."""

import json
import subprocess

import pytest
import torch

from e2e.node import PHALANX
from phalanx.bench import model
from phalanx.kernels.reference import rows
from phalanx.kernels.reference.rows import are_rows_exact, exact_rows, matmul_rows

FIELDS = {"prefill_tokens_per_s", "decode_tokens_per_s", "invariance_cost"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.process
@pytest.mark.soak
def test_the_command_prints_one_document() -> None:
    command = [*PHALANX, "bench", "model", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert figures.keys() >= FIELDS | {"host", "cores", "versions", "torch", "cpu"}
    assert figures["prefill_tokens_per_s"] > figures["decode_tokens_per_s"] > 0
    # Loose: the goal of 1.3 is for a quiet machine.
    assert 0.7 < figures["invariance_cost"] < 2.0
    assert [row["rows"] for row in figures["rows"]] == [512, 8]


def test_both_paths_compute_the_same_model() -> None:
    with torch.inference_mode():
        workload = model.Workload()
        try:
            for step in (workload.prefill, workload.decode):
                exact = step()
                exact_rows(False)
                fast = step()
                exact_rows(True)
                assert torch.equal(step(), exact)
                # Random weights amplify; a different model would not correlate at all.
                both = torch.stack((fast.flatten(), exact.flatten()))
                assert torch.corrcoef(both)[0, 1] > 0.9
        finally:
            exact_rows(True)


def test_a_failing_step_leaves_the_process_exact() -> None:
    def step() -> torch.Tensor:
        if not are_rows_exact():
            raise RuntimeError("in the fast part")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="fast part"):
        model._measure(step, 1, 1)
    assert are_rows_exact()


def test_without_exactness_a_row_depends_on_its_company() -> None:
    """The negative control of everything that is exact: the switch is what makes it so."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((64, 512), generator=generator)
    weights = [torch.randn((n, 512), generator=generator) for n in (24, 96, 256)]
    try:
        exact_rows(False)
        assert rows.padded(9) == 9
        assert not all(torch.equal(matmul_rows(x[:3], w), matmul_rows(x, w)[:3]) for w in weights)
    finally:
        exact_rows(True)
    assert all(torch.equal(matmul_rows(x[:3], w), matmul_rows(x, w)[:3]) for w in weights)
