"""Bad input gets one clear error each, harms nothing else, and the node serves on."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import zmq

from e2e.node import PHALANX, Node
from e2e.plain_client import PlainClient

pytestmark = pytest.mark.process

GOOD = {"prompt": "Hello", "max_tokens": 4, "seed": 1, "ignore_eos": True}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "empty"),
    ({"prompt_token_ids": []}, "empty"),
    ({"prompt_token_ids": [5, 10**6]}, "1000000"),
    ({"prompt_token_ids": [-1]}, "-1"),
    ({"stop_token_ids": [10**9]}, "1000000000"),
    ({"logit_bias": {"99999999": 1.0}}, "99999999"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**31 - 1}, "2147483647"),
    ({"max_tokens": 10**18}, "1000000000000000000"),
    ({"prompt_token_ids": [10] * 9000}, "9000"),
    ({"prompt": "\ud800"}, "Unicode"),
    ({"model": "another"}, "another"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**53}, "seed"),
    ({"n": 0}, "n"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"prompt": 5}, "str"),
]


def test_each_bad_line_is_refused_and_its_neighbours_are_served(node: Node) -> None:
    lines = []
    for bad, _ in BAD:
        base = {k: v for k, v in GOOD.items() if k != "prompt" or "prompt_token_ids" not in bad}
        lines += [GOOD, {**base, **bad}]
    rows = run_file(node, lines)
    by_position = {row["position"]: row for row in rows}
    assert len(rows) == len(lines)
    good = {tuple(by_position[i]["token_ids"]) for i in range(0, len(lines), 2)}
    assert len(good) == 1 and len(next(iter(good))) == 4
    for i, (bad, expected) in enumerate(BAD):
        row = by_position[2 * i + 1]
        assert row["finish_reason"] == "error" and row["token_ids"] == [], bad
        assert expected in row["error"], (bad, row["error"])


def run_file(node: Node, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        return node("generate", "--prompts", file.name, code=2)


def test_garbage_lines_of_a_file(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "Hello", "max_tokens": 2}\n\xff\xfe\n[1]\n{"prompt"\n\n')
    rows = {row["position"]: row for row in node("generate", "--prompts", path, code=2)}
    assert len(rows) == 4 and len(rows[0]["token_ids"]) == 2
    assert "UTF-8" in rows[1]["error"] and "JSON" in rows[3]["error"]


def test_garbage_on_the_socket(node: Node) -> None:
    with PlainClient(node.run_dir) as client:
        for frame in (b"", b"\xc1", os.urandom(500), b"\x91" * 10_000, b"\x81\xa4type\xa8Generate"):
            client.socket.send(frame)
            assert client.receive()["type"] == "Error"
        client.socket.send_multipart([b"a", b"b", b"c"])
        assert client.receive()["type"] == "Error"
    with PlainClient(node.run_dir) as client:
        client.socket.setsockopt(zmq.SNDTIMEO, 5000)
        client.socket.send(bytes(100 << 20))  # the gateway drops the connection, and nothing else
    assert_serves(node)


def assert_serves(node: Node) -> None:
    (row,) = node.generate([GOOD])
    assert len(row["token_ids"]) == 4
    assert node.status()["healthy"]


@pytest.mark.parametrize(
    "arguments,code,text",
    [
        (["generate"], 2, "prompts"),
        (["generate", "--prompts", "/nonexistent"], 2, "/nonexistent"),
        (["up", "--ranks", "0"], 2, "ranks"),
        (["up", "--model", "/nonexistent"], 2, "/nonexistent"),
        (["status"], 3, "no node"),
        (["down"], 3, "no node"),
        (["queues"], 3, "no node"),
        (["generate", "Hi"], 3, "no node"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_exit_codes(tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    environment = {**os.environ, "PHALANX_RUN_DIR": str(tmp_path / "none")}
    command = [*PHALANX, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code and text in done.stderr, done.stderr


def test_a_second_node_in_the_same_place_is_refused(node: Node) -> None:
    node("up", "--ranks", 1, "--detach", code=4)
    assert_serves(node)
