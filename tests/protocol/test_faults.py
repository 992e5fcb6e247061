"""Faults on purpose, seen from the process that makes them: exactly those that were asked for, so often."""

import ast
import random
import signal
from pathlib import Path

import pytest
import zmq

from phalanx.protocol import faults, link
from phalanx.protocol.codec import encode
from phalanx.protocol.failpoints import NAMES, failpoint, kind_of
from phalanx.protocol.fault_table import Fault, FaultRow
from phalanx.protocol.faults import Faults, InjectedFault, type_of
from phalanx.protocol.messages import Ping, Tokens, Welcome

ROOT = Path(__file__).resolve().parents[2]
MS = 1_000_000
PING = encode(Ping("x"))


class Bench:
    """One process's row and what it does, with time and kills that are only noted."""

    def __init__(self, *wrong: Fault, row: FaultRow | None = None) -> None:
        self.row = row or FaultRow(memoryview(bytearray(8192)))
        if row is None:
            self.row.write(wrong)
        self.now_ns = 1
        self.slept: list[float] = []
        self.killed: list[int] = []
        self.faults = Faults(
            self.row, random.Random(3), lambda: self.now_ns, self.slept.append, self.killed.append
        )


def test_nothing_is_looked_at_unless_enabled() -> None:
    assert faults.active is None
    failpoint("worker.step.after_commit")
    faults.check_disk("journal")


def test_every_name_is_a_call_in_the_code_and_every_call_has_a_name() -> None:
    called: dict[str, set[str]] = {}
    for path in ROOT.glob("[!.]*/**/*.py"):
        if path.relative_to(ROOT).parts[0] in ("tests", "build"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "failpoint":
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        called.setdefault(part.value, set()).add(path.relative_to(ROOT).parts[0])
    assert set(called) == set(NAMES)
    folders = {"worker": "worker_svc", "scheduler": "scheduler_svc", "kvstore": "kvstore_svc"}
    folders |= {"eplb": "eplb_svc", "gateway": "services", "tokenizer": "services"}
    for name, where in called.items():
        assert where == {folders.get(kind_of(name), kind_of(name))}, name


def test_a_failpoint_acts_from_the_nth_time_on_and_so_often() -> None:
    bench = Bench(Fault(4, "failpoint", "worker.load.after", count=2, nth=3))
    for _ in range(7):
        bench.faults.failpoint("worker.load.after")
        bench.faults.failpoint("worker.load.before")
    assert bench.killed == [signal.SIGKILL] * 2
    assert bench.row.count(4) == 7


def test_one_that_killed_its_process_does_not_kill_the_next() -> None:
    first = Bench(Fault(0, "failpoint", "worker.load.after", count=1))
    first.faults.failpoint("worker.load.after")
    second = Bench(row=first.row)
    second.faults.failpoint("worker.load.after")
    assert (first.killed, second.killed) == ([signal.SIGKILL], [])


def test_actions_of_a_failpoint() -> None:
    def point(action: str, ms: int = 0) -> Bench:
        bench = Bench(Fault(0, "failpoint", "worker.load.after", ms=ms, action=action))  # type: ignore[arg-type]
        bench.faults.failpoint("worker.load.after")
        return bench

    assert point("stop").killed == [signal.SIGSTOP]
    assert point("sleep", 250).slept == [0.25]
    with pytest.raises(InjectedFault, match=r"worker\.load\.after"):
        point("raise")


def test_a_row_that_is_written_anew_counts_for_the_next_event() -> None:
    bench = Bench()
    assert bench.faults.fates(PING, True) == [(0, PING)]
    bench.row.write([Fault(0, "drop")])
    assert bench.faults.fates(PING, True) == []
    bench.row.write([])
    assert bench.faults.fates(PING, True) == [(0, PING)]


def test_a_fault_ends_with_its_time_and_its_count() -> None:
    bench = Bench(Fault(0, "drop", until_ns=50), Fault(1, "duplicate", count=1))
    assert bench.faults.fates(PING, True) == []
    bench.now_ns = 50
    assert bench.faults.fates(PING, True) == [(0, PING), (0, PING)]
    assert bench.faults.fates(PING, True) == [(0, PING)]


def test_only_messages_of_the_type_are_hit() -> None:
    bench = Bench(Fault(0, "drop", "Tokens"))
    tokens = encode(Tokens(0, 1, 1))
    assert [type_of(f) for f in (tokens, PING, encode(Welcome(1)), b"", b"\xff" * 9)] == [
        "Tokens",
        "Ping",
        "Welcome",
        "",
        "",
    ]
    assert bench.faults.fates(tokens, True) == [] and bench.faults.fates(PING, True) != []


def test_rate_is_a_share() -> None:
    bench = Bench(Fault(0, "drop", rate=0.25))
    left = sum(bool(bench.faults.fates(PING, True)) for _ in range(4000))
    assert 2800 < left < 3200 and bench.row.count(0) == 4000 - left


def test_every_flipped_bit_breaks_the_seal() -> None:
    sealed = link.seal(PING)
    assert link.unseal(sealed) == PING
    for at in range(len(sealed)):
        for bit in range(8):
            wrong = sealed[:at] + bytes([sealed[at] ^ 1 << bit]) + sealed[at + 1 :]
            assert link.unseal(wrong) is None
    assert link.unseal(b"") is None


def test_corruption_spares_frames_without_a_seal() -> None:
    bench = Bench(Fault(0, "corrupt"))
    assert bench.faults.fates(PING, False) == [(0, PING)]
    ((_, damaged),) = bench.faults.fates(link.seal(PING), True)
    assert link.unseal(damaged) is None


def test_what_is_held_back_leaves_and_arrives_in_its_time() -> None:
    bench = Bench(Fault(0, "delay", ms=20))
    left: list[bytes] = []
    assert bench.faults.leave(PING, True, lambda frame: left.append(frame) is None)
    assert bench.faults.arrive("socket", b"peer", PING, True) == []
    assert left == [] and bench.faults.wait_ms(400) == 21
    bench.now_ns += 20 * MS
    assert bench.faults.flush() == ["socket"]
    assert left == [PING]
    assert bench.faults.due("socket") == [(b"peer", PING)] and bench.faults.due("socket") == []
    assert bench.faults.wait_ms(400) == 400 and bench.faults.flush() == []


def test_a_full_disk_says_so() -> None:
    bench = Bench(Fault(0, "diskfull", count=1))
    with pytest.raises(OSError, match="no space left"):
        bench.faults.check_disk("journal")
    bench.faults.check_disk("journal")


def test_sealed_and_plain_peers_talk_to_one_socket(tmp_path: Path) -> None:
    router = link.bind_router(f"ipc://{tmp_path}/s", 1 << 20)
    peers = [link.connect_dealer(f"ipc://{tmp_path}/s", name) for name in ("a#1", "plain", "")]
    before = link.damaged
    try:
        for peer in peers:
            assert link.send(peer, PING)
            assert router.poll(20_000)
            ((identity, frame),) = link.receive_from(router, 9)
            assert frame == PING
            assert link.send_to(router, identity, PING) and peer.poll(20_000)
            assert link.receive(peer, 9) == [PING]
        peers[0].send(PING, zmq.NOBLOCK)  # from the outside, without its seal
        assert router.poll(20_000) and link.receive_from(router, 9) == []
        assert link.damaged == before + 1
    finally:
        for socket in (router, *peers):
            socket.close()
