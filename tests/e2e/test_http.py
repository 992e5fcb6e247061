"""The SDKs people have, unmodified, against a live node: and a killed process is a pause they do not notice."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from lateness import Lateness
from tokenizers import Tokenizer

from e2e.node import PHALANX, Node, assert_whole, wait_for
from phalanx.services.tokenizer.core import DEFAULT_TOKENIZER

pytestmark = pytest.mark.process
MODEL = "random-tiny"
KEY, SMALL_KEY = "key-of-tests", "key-of-small"
HELLO: Any = [{"role": "user", "content": "Hello"}]
PLAIN: Any = {"thinking": {"type": "disabled"}}
TOKENIZER = Tokenizer.from_file(str(DEFAULT_TOKENIZER))


@pytest.fixture(scope="module")
def served(start_node: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory) -> Node:
    folder = tmp_path_factory.mktemp("http")
    keys, config = folder / "keys", folder / "config.json"
    keys.write_text(f"tests {KEY}\nsmall {SMALL_KEY} 1 0\n")
    http = {"keys_file": str(keys), "max_body_bytes": 100_000}
    config.write_text(json.dumps({"fault_injection": True, "http": http}))
    return start_node(2, "--http", "0", "--config", config)


@pytest.fixture(scope="module")
def base(served: Node) -> str:
    found = json.loads(Path(served.run_dir, "http.json").read_text())
    return f"http://{found['host']}:{found['port']}"


@pytest.fixture(scope="module")
def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def claude(base: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    more = {"max_tokens": 12, "seed": 5, "extra_body": PLAIN} | more
    return client.chat.completions.create(model=MODEL, messages=HELLO, **more)


def test_chat_is_the_same_streamed_and_not_and_alone(client: openai.OpenAI) -> None:
    whole = chat(client, n=3, logprobs=True, top_logprobs=2)
    texts, logprobs = ["", "", ""], [[], [], []]
    usage = None
    options = {"include_usage": True}
    for chunk in chat(
        client, n=3, logprobs=True, top_logprobs=2, stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs:
                logprobs[choice.index] += choice.logprobs.content or []
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert [len(entries) for entries in logprobs] == [12, 12, 12]
    assert usage == whole.usage and usage is not None
    assert usage.completion_tokens == 36
    assert chat(client).choices[0].message.content == texts[0]
    assert len(set(texts)) == 3


def test_thinking_is_told_apart(client: openai.OpenAI) -> None:
    forced = TOKENIZER.encode("Let me see.</think>Yes.", add_special_tokens=False).ids
    body = {"forced_token_ids": forced}
    message = chat(client, max_tokens=len(forced), extra_body=body).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Yes.")


def test_a_tool_call_is_parsed(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    markup = (
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls>"
    )
    forced = TOKENIZER.encode(markup, add_special_tokens=False).ids
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    body = PLAIN | {"forced_token_ids": forced}
    found = chat(client, tools=tools, max_tokens=len(forced), extra_body=body).choices[0].message
    (call,) = found.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    message = claude.messages.create(
        model=MODEL,
        max_tokens=len(forced),
        messages=[{"role": "user", "content": "Hello"}],
        tools=[{"name": "weather", "input_schema": schema}],  # type: ignore[list-item]
        extra_body=body,
    )
    (use,) = (block for block in message.content if block.type == "tool_use")
    assert (use.name, use.input) == ("weather", {"city": "Paris"})


def test_completions_of_texts_and_ids(client: openai.OpenAI) -> None:
    texts = ["Hello", "The sea"]
    ask: Any = {"model": MODEL, "max_tokens": 5, "seed": 3, "n": 2}
    many = client.completions.create(prompt=texts, logprobs=1, **ask)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    alone = client.completions.create(prompt=texts[1], echo=True, **ask)
    assert [c.text for c in alone.choices] == [texts[1] + c.text for c in many.choices[2:]]
    logprobs = many.choices[0].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or []) == many.choices[0].text
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(prompt=texts, stream=True, **ask):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in many.choices]
    assert many.usage is not None and many.usage.completion_tokens == 20


def test_a_prompt_is_scored(client: openai.OpenAI) -> None:
    text = "The sea was calm"
    ask: Any = {"model": MODEL, "echo": True, "logprobs": 1, "seed": 3}
    one = client.completions.create(prompt=text, max_tokens=2, **ask).choices[0]
    found = one.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs
    assert "".join(found.tokens) == one.text and one.text.startswith(text)
    assert found.token_logprobs[0] is None and all(p <= 0 for p in found.token_logprobs[1:])  # type: ignore[operator]
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    alone = client.completions.create(prompt=ids, max_tokens=0, **ask)
    assert alone.usage is not None and alone.usage.completion_tokens == 0
    scores = alone.choices[0].logprobs
    assert scores is not None and scores.token_logprobs == found.token_logprobs[: len(ids)]
    streamed: list[Any] = []
    for chunk in client.completions.create(prompt=text, max_tokens=2, stream=True, **ask):
        for choice in chunk.choices:
            streamed += (choice.logprobs.token_logprobs or []) if choice.logprobs else []
    assert streamed == found.token_logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_stop_string_is_told(client: openai.OpenAI, stream: bool) -> None:
    """Also where it begins in one token and ends in another, and where it never comes to its end."""
    forced = TOKENIZER.encode("one two</th three four", add_special_tokens=False).ids

    def said(*stop: str) -> tuple[str, str]:
        body = PLAIN | {"forced_token_ids": forced}
        found = chat(
            client, stop=list(stop), max_tokens=len(forced), extra_body=body, stream=stream
        )
        if not stream:
            choice = found.choices[0]
            return choice.message.content, choice.finish_reason
        text, reason = "", ""
        for chunk in found:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        return text, reason

    assert said("wo</") == ("one t", "stop")
    assert said("</think>", "never") == ("one two</th three four", "length")
    assert said("four") == ("one two</th three ", "stop")


def test_messages_and_responses(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    ask: Any = {"model": MODEL, "max_tokens": 8, "messages": HELLO, "extra_body": {"seed": 4}}
    message = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert final.content[0].thinking == message.content[0].thinking  # type: ignore[union-attr]
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 8
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO)
    assert counted.input_tokens == message.usage.input_tokens
    answer = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    assert answer.status == "incomplete" and answer.usage is not None
    assert answer.usage.output_tokens == 8


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": "other"}, 404, "'other' is not served here, 'random-tiny' is"),
        ({"messages": []}, 400, ""),
        ({"max_tokens": -1}, 400, ""),
        ({"max_tokens": 10**18}, 400, ""),
        ({"n": 65}, 400, "1 to 64"),
        ({"n": 2.5}, 400, "whole number"),
        ({"temperature": 3}, 400, "temperature"),
        ({"seed": 2**60}, 400, str(2**53 - 1)),
        ({"logit_bias": {"99999": 1}}, 400, "99999"),
        ({"stop_token_ids": [99999]}, 400, "99999"),
        ({"top_logprobs": 50, "logprobs": True}, 400, ""),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {}},
                }
            },
            400,
            "not supported yet",
        ),
        ({"response_format": {"type": "json_object"}}, 400, "json"),
        ({"timeout": "soon"}, 400, "number of seconds"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 413, "100000"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_hear_one_clear_error(
    base: str, fields: dict[str, Any], status: int, words: str, stream: bool
) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": stream} | fields
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
    answer = httpx.post(
        f"{base}/v1/chat/completions", content=json.dumps(body), headers=headers, timeout=60
    )
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"] == "mine"


def test_keys_quotas_deadlines_and_health(served: Node, base: str) -> None:
    url = f"{base}/v1/chat/completions"
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2000, "ignore_eos": True}
    assert httpx.post(url, json=body).status_code == 401
    assert httpx.get(f"{base}/v1/models", headers={"x-api-key": KEY}).status_code == 200
    small = {"authorization": f"Bearer {SMALL_KEY}"}
    with httpx.stream(
        "POST", url, json=body | {"stream": True}, headers=small, timeout=60
    ) as running:
        lines = running.iter_lines()  # kept: closing it would be leaving
        next(lines)
        refused = httpx.post(url, json=body, headers=small, timeout=60)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    # The client left: its request ends, and its place is free again.
    wait_for(lambda: served.running() == 0, 20, "the request of a client that left")
    left = 'phalanx_http_requests_total{path="/v1/chat/completions",status="499"} '
    wait_for(lambda: left in httpx.get(f"{base}/metrics", timeout=60).text, 20, "how it is counted")
    late = httpx.post(url, json=body, headers=small | {"x-request-timeout": "0.3"}, timeout=60)
    assert late.status_code == 504
    assert httpx.get(f"{base}/health").json()["healthy"] is True
    wait_for(lambda: served.running() == 0, 20, "the request that came too late")
    assert_whole(served)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("worker-1", signal.SIGKILL),
        ("scheduler-0", signal.SIGKILL),
        ("gateway", signal.SIGSTOP),  # killed, it has a successor before anyone could ask
        *(
            pytest.param(name, number, marks=pytest.mark.soak)
            for name in ("tokenizer-0", "kvstore", "eplb")
            for number in (signal.SIGKILL, signal.SIGSTOP)
        ),
        *(
            pytest.param(name, signal.SIGSTOP, marks=pytest.mark.soak)
            for name in ("worker-1", "scheduler-0")
        ),
    ],
)
def test_health_names_a_dead_or_stopped_process_within_a_second(
    served: Node, base: str, victim: str, number: signal.Signals
) -> None:
    born = served.process(victim)
    assert born is not None
    os.kill(born.pid, number)
    began = time.monotonic()
    try:
        with Lateness() as lateness:
            while (answer := httpx.get(f"{base}/health", timeout=10)).status_code != 503:
                assert answer.json()["healthy"]
                if time.monotonic() > began + 3:  # its successor served before anyone asked
                    now = served.process(victim)
                    assert now is not None and now.incarnation > born.incarnation
                    return
            named_ms = (time.monotonic() - began) * 1000
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(born.pid, signal.SIGCONT)
    assert named_ms < lateness.bound_ms(100)
    assert not answer.json()["healthy"] and victim in "; ".join(answer.json()["reasons"])
    served.wait_healthy()
    wait_for(lambda: httpx.get(f"{base}/health").status_code == 200, 20, "health says so")


async def fifty(base: str) -> list[str]:
    """The texts of fifty streams at once."""

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        text = ""
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=16, seed=number, stream=True, extra_body=PLAIN
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
        return text

    async with openai.AsyncOpenAI(
        base_url=f"{base}/v1", api_key=KEY, max_retries=0, timeout=120
    ) as client:
        return await asyncio.gather(*(one(client, number) for number in range(50)))


@pytest.fixture(scope="module")
def calm(base: str) -> list[str]:
    return asyncio.run(fifty(base))


@pytest.mark.parametrize("victim", ["worker", "gateway"])
def test_fifty_streams_do_not_notice(served: Node, base: str, calm: list[str], victim: str) -> None:
    async def with_a_kill() -> list[str]:
        streams = asyncio.create_task(fifty(base))
        while not served.running():
            await asyncio.sleep(0.02)
        await asyncio.to_thread(served, "inject", "kill", f"random:{victim}")
        return await streams

    assert all(calm)
    assert asyncio.run(with_a_kill()) == calm
    served.wait_healthy()


def test_a_node_that_stops_finishes_its_streams_and_refuses_others(
    start_node: Callable[..., Node],
) -> None:
    node = start_node(1, "--http", "0", "--inject")
    found = json.loads(Path(node.run_dir, "http.json").read_text())
    url = f"http://{found['host']}:{found['port']}/v1/chat/completions"
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 60, "ignore_eos": True, "seed": 1}
    probe = body | {"max_tokens": 1}
    calm = httpx.post(url, json=body, timeout=60).json()["choices"][0]["message"]
    node.inject("slow", "worker", ms=400)  # the stream is still there when others are refused
    stopping = None
    thought = ""
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as running:
        for line in running.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                thought += choice["delta"].get("reasoning_content") or ""
            if stopping is None and thought:
                down = [*PHALANX, "down", "--timeout", "90", "--run-dir", str(node.run_dir)]
                stopping = subprocess.Popen(down)
                wait_for(
                    lambda: httpx.post(url, json=probe, timeout=60).status_code == 503, 20, "503"
                )
                node.clear()
    assert thought == calm["reasoning_content"]
    assert stopping is not None and stopping.wait(120) == 0


def test_a_killed_server_comes_back_at_the_same_address(
    served: Node, base: str, client: openai.OpenAI
) -> None:
    served("inject", "kill", "http")

    def back() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{base}/health").status_code == 200
        return False

    wait_for(back, 30, "the HTTP server again")
    assert chat(client).choices[0].message.content
