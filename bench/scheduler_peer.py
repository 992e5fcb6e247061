"""The same courses through another scheduler, in a process of its own, and how many times it takes as long.

vLLM is too large to be a dependency: it is measured where this interpreter, or the one that is named,
can import it.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from phalanx.protocol.errors import PhalanxError

SCRIPT = Path(__file__).with_name("scheduler_vllm.py")
TIMEOUT_S = 1800
NOT_HERE = "vLLM is not installed here; --peer-python names an interpreter that has it"


def measure_peer(
    rows: list[dict[str, Any]], course: dict[str, Any], python: str | None
) -> dict[str, Any]:
    """`peer` and, if it is null, `peer_missing`: why.

    Args:
        rows: Ours; they say what is measured and what it is compared with.
        course: Steps, prompts and answers, as the script wants them.
        python: An interpreter that has vLLM; None: this one, if it has.

    Raises PhalanxError when the named interpreter cannot do it.
    """
    if python is None:
        if importlib.util.find_spec("vllm") is None:
            return {"peer": None, "peer_missing": NOT_HERE}
        python = sys.executable
    cases = [{name: row[name] for name in ("running", "drafts", "churn")} for row in rows]
    return {"peer": compared(rows, _run(python, {"cases": cases, **course}))}


def _run(python: str, asked: dict[str, Any]) -> dict[str, Any]:
    command = [python, "-P", str(SCRIPT), json.dumps(asked)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PhalanxError(f"the peer's scheduler was not measured: {error}") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise PhalanxError(
            f"{python} could not measure the peer's scheduler: {done.stderr.strip()[-2000:]}"
        )
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def compared(rows: list[dict[str, Any]], peer: dict[str, Any]) -> dict[str, Any]:
    """The peer's figures, each row with `ratio`: its CPU time of a step over ours."""
    for ours, theirs in zip(rows, peer["rows"], strict=True):
        theirs["ratio"] = round(theirs["cpu_p50_us"] / ours["cpu_p50_us"], 2)
    return peer
