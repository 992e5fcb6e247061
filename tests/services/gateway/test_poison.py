"""A request over which gateways crash ends alone, and every other stream is as it would have been."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gateway_desk import Desk
from gateway_node import GatewayNode
from services.gateway.children.poisoned_gateway import POISON
from services.gateway.test_process import check, many

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import Attach, Delta, Final, Sampling, Usage
from phalanx.services.client import Spec
from phalanx.services.gateway.entries import Entry, Finish, Recovered
from phalanx.services.gateway.poison import CRASHES_MAX, crashes, given_up, note_crash
from phalanx.services.gateway.requests import Request

CHILDREN = Path(__file__).parent / "children"


def entry(request_id: str = "r" * 32) -> Entry:
    sampling = Sampling(seed=1, max_tokens=9)
    return Entry(request_id, b"\1\0\0\0", sampling, 2, True, "key", b"", "fake", "f1")


def fails(one: Request, other: int) -> None:
    raise ZeroDivisionError(other)


def crash(run_dir: Path, outer: Request, inner: Request | None) -> str:
    """One function handles a request, and another within it perhaps another one."""

    def handle(request: Request) -> None:
        if inner is None:
            raise ZeroDivisionError
        fails(inner, 3)

    try:
        handle(outer)
    except ZeroDivisionError as error:
        return note_crash(run_dir, error)
    raise AssertionError


def test_the_innermost_one_is_blamed(tmp_path: Path) -> None:
    first, second = Request(entry(), 0), Request(entry("s" * 32), 2)
    assert crash(tmp_path, first, None) == "r" * 32
    assert crash(tmp_path, first, second) == "s" * 32
    assert given_up(crashes(tmp_path)) == {}
    assert crash(tmp_path, second, first) == "r" * 32
    assert crashes(tmp_path) == {"s" * 32: 1, "r" * 32: 2}
    assert list(given_up(crashes(tmp_path))) == ["r" * 32]


def test_without_one_nobody_is(tmp_path: Path) -> None:
    assert note_crash(tmp_path, ZeroDivisionError()) == "" and crashes(tmp_path) == {}


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\0", b'{"a": "b"}'])
def test_a_damaged_file_blames_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gateway-fell.json").write_bytes(content)
    assert crashes(tmp_path) == {}


def test_the_file_stays_small(tmp_path: Path) -> None:
    for number in range(200):
        crash(tmp_path, Request(entry(f"{number:032x}"), 0), None)
    assert len(crashes(tmp_path)) == 64 and f"{199:032x}" in crashes(tmp_path)


def test_what_is_given_up_ends_on_disk_and_for_its_reader() -> None:
    ended = Final("r" * 32, 0, 3, "length", Usage(1, 3))
    desk = Desk(Recovered(entry(), {0: ended}), poison={"r" * 32: "it is given up"})
    ends = [op.final for op in desk.first_ops if isinstance(op, Finish)]
    assert [(final.index, final.code, final.error) for final in ends] == [
        (1, Code.INTERNAL, "it is given up")
    ]
    assert not desk.submits()
    desk.asks(Attach(4, "r" * 32, (3, 5)))
    finals = {final.index: final for final in desk.told() if isinstance(final, Final)}
    assert finals[0] == ended and (finals[1].offset, finals[1].error) == (5, "it is given up")
    desk.asks(Attach(5, "r" * 32, (1, 5)))  # what ended before is not made again either
    finals = {final.index: final for final in desk.told() if isinstance(final, Final)}
    assert (finals[0].offset, finals[0].error) == (1, "it is given up")
    assert not desk.submits()


@contextmanager
def restarting(node: GatewayNode) -> Iterator[None]:
    """Somebody starts the next gateway when one has crashed."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            if node.process is not None and node.process.poll() is not None:
                node.start()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.process
@pytest.mark.parametrize("method", ["extend", "recall"])
def test_gateways_fall_over_it_and_the_next_one_goes_on(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHILDREN), prepend=":")
    monkeypatch.setenv("PLANTED", method)
    specs = many(12, 40)
    with (
        GatewayNode(step_s=0.02, module="poisoned_gateway") as node,
        restarting(node),
        node.client() as client,
    ):
        bad = client.generate(Spec([POISON, 1], Sampling(seed=1, max_tokens=40)), timeout=60)
        if method == "recall":
            assert node.process is not None and isinstance(next(iter(bad)), Delta)
            node.process.kill()
        got = dict(client.generate_many(specs, timeout=60))
        for position, spec in enumerate(specs):
            check(spec, got[position])
        (result,) = bad.results()
        assert result.finish_reason == "error"
        assert f"{CRASHES_MAX} gateways crashed while they were at work on it" in result.error
        assert node.incarnation == CRASHES_MAX + 1 + (method == "recall")
