"""Offline use: `phalanx run` goes on after kill -9, and `phalanx.LLM` leaves nothing behind however its script ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.node import PHALANX, Node, others, wait_for
from phalanx.protocol.arena import names

pytestmark = pytest.mark.process
_SCRIPT = """
import os, signal, sys
import phalanx

with phalanx.LLM("random-tiny") as llm:
    outputs = llm.generate(["Hello", [5, 6, 7], ""], max_tokens=4, seed=1, n=2)
    assert [len(output.sequences) for output in outputs[:2]] == [2, 2]
    assert outputs[0].text and len(outputs[1].token_ids) == 4
    try:
        outputs[2].text
    except phalanx.protocol.errors.PhalanxError as error:
        print(error, flush=True)
    assert llm.chat([{"role": "user", "content": "Hi"}], max_tokens=3, seed=2).text
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_a_killed_run_goes_on(node: Node, tmp_path: Path) -> None:
    prompts, out, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    requests = [*others(20), {"prompt": 5}]
    prompts.write_text("".join(json.dumps(request) + "\n" for request in requests))
    ask = [*PHALANX, "run", "--prompts", str(prompts), "--run-dir", str(node.run_dir)]
    child = subprocess.Popen([*ask, "--concurrency", "4", "--out", str(out)])
    wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") > 3, 60, "some results")
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = out.read_bytes()
    done = sum(
        not json.loads(line)["error"] for line in before[: before.rfind(b"\n") + 1].splitlines()
    )
    (summary,) = node("run", "--prompts", prompts, "--out", out, code=2)  # one line is no request
    assert summary["done_before"] == done < 20
    assert (summary["sequences"], summary["failed"]) == (20, 1)
    (again,) = node("run", "--prompts", prompts, "--out", out, code=2)
    assert (again["done_before"], again["tokens"]) == (20, 0)
    node("run", "--prompts", prompts, "--out", whole, code=2)

    def found(path: Path) -> dict[int, list[int]]:
        rows = map(json.loads, path.read_text().splitlines())
        return {row["position"]: row["token_ids"] for row in rows if not row["error"]}

    assert found(out) == found(whole)


def test_a_script_that_is_killed_takes_its_node_along(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    child = subprocess.run(
        [sys.executable, "-P", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert "the prompt is empty" in child.stdout
    left = [path.name for path in tmp_path.glob("ph*")]
    wait_for(lambda: not list(tmp_path.glob("ph*")), 20, "the run directory removed")
    for name in left:
        assert names(name) == []
