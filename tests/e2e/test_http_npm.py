"""The npm SDKs, unmodified, get what the Python ones get. Needs node and npm."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from e2e.node import Node, assert_whole, wait_for
from phalanx.services.tokenizer.core import DEFAULT_TOKENIZER

pytestmark = [
    pytest.mark.process,
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]
HERE = Path(__file__).parent
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def test_the_npm_sdks(start_node: Callable[..., Node], tmp_path: Path) -> None:
    install = ["npm", "install", "--silent", "openai", "@anthropic-ai/sdk"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=200)
    shutil.copy(HERE / "sdk.mjs", tmp_path)
    node = start_node(2, "--http", "0")
    found = json.loads(Path(node.run_dir, "http.json").read_text())
    base = f"http://{found['host']}:{found['port']}"
    tokenizer = Tokenizer.from_file(str(DEFAULT_TOKENIZER))
    forced = json.dumps(tokenizer.encode(CALL, add_special_tokens=False).ids)
    environment = os.environ | {"BASE": base, "FORCED": forced}
    done = subprocess.run(
        ["node", "sdk.mjs"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    got: dict[str, Any] = json.loads(done.stdout)
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    ours = client.chat.completions.create(
        model="random-tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=12,
        seed=5,
        n=3,
        extra_body={"thinking": {"type": "disabled"}},
    )
    assert got["whole"] == got["streamed"] == [c.message.content for c in ours.choices]
    assert got["logprobs"] == [12, 12, 12]
    assert got["tool"]["name"] == "weather"
    assert json.loads(got["tool"]["arguments"]) == {"city": "Paris"}
    assert got["cancelled"] and got["thought"]
    assert got["models"] == ["random-tiny"]
    wait_for(lambda: node.running() == 0, 20, "the request of a client that left")
    assert_whole(node)
