"""A body that cannot be taken in is the client's mistake, and told in the words of the API that was called."""

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import structlog

from phalanx.protocol.config import HttpConfig
from phalanx.protocol.log import Logger
from phalanx.services.http import recipe
from phalanx.services.http.app import Server
from phalanx.services.http.counts import Counts
from phalanx.services.http.gate import Gate
from phalanx.services.http.keys import Keys
from phalanx.services.http.quotas import Door, Quota
from phalanx.services.http.tokens import Tokens

PATHS = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
)
BY_RECIPE = PATHS[:4]  # it takes less than JSON does
TOKENS = Tokens(None)
GOOD = (
    b'"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": [1], "max_tokens": 1'
)


def post(path: str, content: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    """Of a server that knows no gateway: what is not refused fails the test."""
    nobody: Any = None
    door = Door(1, 0, Quota(1, 0))
    server = Server(
        HttpConfig(max_body_bytes=1 << 20),
        nobody,
        Gate(door),
        Keys({}, {}),
        recipe.Model("m", 1, 8192, nobody, nobody),
        TOKENS,
        cast(Logger, structlog.get_logger()),
        Path("/nowhere"),
        Counts(door),
    )
    transport = httpx.ASGITransport(server.app(), raise_app_exceptions=False)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(ask())


def check(path: str, answer: httpx.Response, status: int, text: str) -> None:
    told = answer.json()
    assert (answer.status_code, told["error"]["type"]) == (
        status,
        "request_too_large"
        if status == 413 and path.startswith("/v1/messages")
        else "invalid_request_error",
    )
    assert text in told["error"]["message"]
    assert (told.get("type") == "error") is path.startswith("/v1/messages")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("depth", [900, 50_000])
def test_a_body_nested_too_deeply_is_refused(path: str, depth: int) -> None:
    content = b"{%b, " % GOOD + b'"tools": ' + b'[{"a":' * depth + b"1" + b"}]" * depth + b"}"
    check(path, post(path, content), 400, "nested too deeply")


@pytest.mark.parametrize("path", BY_RECIPE)
def test_so_is_one_that_only_the_recipe_finds_too_deep(path: str) -> None:
    content = b"{%b, " % GOOD + b'"tools": ' + b"[" * 130 + b"]" * 130 + b"}"
    check(path, post(path, content), 400, "depth of 128")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("digits", [30, 400, 5000])
def test_a_number_too_large_is_refused(path: str, digits: int) -> None:
    number = b"1" + b"0" * digits
    content = b"{%b, " % GOOD + b'"tokens": ["a"], "timeout": %b, "max_tokens": %b}' % (
        number,
        number,
    )
    answer = post(path, content)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_a_body_declared_too_large_is_refused_before_it_comes(path: str) -> None:
    async def content() -> Any:
        raise AssertionError("the body was waited for")
        yield b""

    answer = post(path, content(), {"content-length": "99999999999"})
    check(path, answer, 413, str(1 << 20))


@pytest.mark.parametrize("field", ["model", "timeout", "n", "prompt", "stop"])
def test_no_refusal_fails_at_what_it_would_show(field: str) -> None:
    deep = b"[" * 800 + b"]" * 800
    for path in PATHS:
        content = b'{%b, "tokens": [1.5], "%b": %b}' % (GOOD, field.encode(), deep)
        assert post(path, content).status_code < 500
