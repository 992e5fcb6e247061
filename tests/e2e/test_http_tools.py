"""A public load generator and a public evaluation harness run against a node to their end.

They bring their own, large, dependencies: install `guidellm` and `lm-eval[api]` in an environment of their own and
put its `bin` on PATH; without them these tests are skipped.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.node import Node, assert_whole
from phalanx.services.tokenizer.core import DEFAULT_TOKENIZER

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
REQUESTS = 500
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_TASK = """
task: sea
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def served(start_node: Callable[..., Node]) -> Node:
    return start_node(2, "--http", "0")


@pytest.fixture(scope="module")
def base(served: Node) -> str:
    found = json.loads(Path(served.run_dir, "http.json").read_text())
    return f"http://{found['host']}:{found['port']}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder as transformers loads it."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(DEFAULT_TOKENIZER, folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def run(tool: str, *arguments: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run(
        [tool, *arguments],
        env=os.environ | _OFFLINE,
        capture_output=True,
        text=True,
        check=False,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_load_generator_has_no_error(
    served: Node, base: str, tokenizer: Path, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    words = [
        "the",
        "sea",
        "was",
        "calm",
        "and",
        "the",
        "harbour",
        "slept",
        "while",
        "old",
        "boats",
        "moved",
        "with",
        "the",
        "tide",
    ]
    with prompts.open("w") as file:
        for number in range(REQUESTS + 50):
            text = " ".join(words[(7 * number + 3 * at) % len(words)] for at in range(12))
            file.write(json.dumps({"prompt": f"{number} {text}"}) + "\n")
    run(
        "guidellm",
        "run",
        "--backend",
        f"kind=openai_http,target={base},model=random-tiny,request_format=/v1/completions",
        *("--profile", "kind=concurrent,streams=32"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=json_file,path={prompts}"),
        *("--output", f"kind=json,path={out}", "--disable-progress"),
    )
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert_whole(served)


def test_an_evaluation_harness_scores_its_choices(
    served: Node, base: str, tokenizer: Path, tmp_path: Path
) -> None:
    data, task = tmp_path / "sea.jsonl", tmp_path / "tasks" / "sea.yaml"
    task.parent.mkdir()
    task.write_text(_TASK.format(data=data))
    with data.open("w") as file:
        for number in range(24):
            row = {"question": f"The sea number {number} is", "choices": ["calm", "red", "seven"]}
            file.write(json.dumps(row | {"answer": number % 3}) + "\n")
    run(
        "lm_eval",
        *("--model", "local-completions", "--tasks", "sea", "--include_path", str(task.parent)),
        "--model_args",
        f"model=random-tiny,base_url={base}/v1/completions,tokenizer={tokenizer},num_concurrent=4",
        *("--output_path", str(tmp_path / "out")),
    )
    (report,) = (tmp_path / "out").rglob("results_*.json")
    assert 0 <= json.loads(report.read_text())["results"]["sea"]["acc,none"] <= 1
    assert_whole(served)
