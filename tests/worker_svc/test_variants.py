"""No step of a rank that serves asks for a variant of a kernel which the warm-up did not, nor does
it in a group that changed: none is compiled late."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


def test_serving_asks_for_no_other_variant() -> None:
    program = Path(__file__).with_name("variants.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", str(program)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kernels"] > 25  # it did look at launches
    assert found["late"] == []
    assert found["of a group alone"] > 0  # more ranks and other slots do ask for more
