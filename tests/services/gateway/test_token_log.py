"""The token log: what a gateway leaves to its successor, as a file and as what the successor does with it."""

import os
import uuid
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from gateway_desk import T0, Desk, texts

from phalanx.protocol.arena import SHM, TOKENS, arena_name, names, sweep
from phalanx.protocol.digests import tokens_digest
from phalanx.protocol.log import flush_log, setup_logging
from phalanx.protocol.messages import (
    Attach,
    Final,
    Hello,
    Resend,
    Sampling,
    SequenceInfo,
    TokenLogprobs,
    Tokens,
    TokensItem,
    Usage,
    Welcome,
)
from phalanx.protocol.topology import Seat, Topology
from phalanx.services.gateway import token_log
from phalanx.services.gateway.entries import (
    Entry,
    Finish,
    Note,
    Placed,
    Produced,
    Recovered,
    Scored,
    Stamp,
)
from phalanx.services.gateway.streams import Stream
from phalanx.services.gateway.token_log import TokenLog, beginning, frame, notes_in, recall

R = "r" * 32
MEMBERS = Topology(2, (Seat(0, 1, 1, "member"), Seat(1, 1, 1, "member")), b"", "f1")


def piece(offset: int, *ids: int, rid: str = R, index: int = 0) -> Produced:
    return Produced(rid, index, offset, array("i", ids).tobytes())


def entry(sampling: Sampling | None = None, fingerprint: str = "f1", n: int = 1) -> Entry:
    sampling = sampling or Sampling(seed=1, max_tokens=9)
    prompt = array("i", [5]).tobytes()
    return Entry(R, prompt, sampling, n, True, "k", b"", "tiny", fingerprint)


# --- the file ---


@pytest.fixture
def node() -> Iterator[str]:
    name = f"tokens{uuid.uuid4().hex[:8]}"
    yield name
    for path in SHM.glob(f"ph-{name}*"):
        path.rmdir() if path.is_dir() else path.unlink()


def log_of(node: str, tmp_path: Path) -> TokenLog:
    (tmp_path / "logs").mkdir(exist_ok=True)
    return TokenLog(node, setup_logging(tmp_path, "gateway", 1, "info"))


def kill(log: TokenLog) -> None:
    """Its process is gone, and its locks with it."""
    log.close(keep=True)


def test_the_next_gateway_reads_what_the_last_one_wrote(node: str, tmp_path: Path) -> None:
    first = log_of(node, tmp_path)
    assert first.read() is None
    notes: list[Note] = [Stamp("f1"), Placed(R, 0, 1, 2, 3), Scored(R, 0, b"abcdefgh"), piece(0, 7)]
    first.write([], lambda: notes[:1], 0)
    first.write(notes[1:3], list, 1)
    first.write([], list, 2)
    first.write(notes[3:], list, 3)
    kill(first)
    assert sweep(node, keep=TOKENS) == []
    second = log_of(node, tmp_path)
    assert second.read() == notes
    second.write([], lambda: notes[3:], 4)  # all that is still of use: the old one goes
    assert names(node) == [arena_name(node, TOKENS, 2)]
    second.close(keep=True)
    third = log_of(node, tmp_path)
    assert third.read() == notes[3:]
    third.write([], list, 5)
    third.close(keep=False)
    assert names(node) == []


def test_a_file_that_has_grown_is_replaced_by_what_is_still_of_use(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_log, "GROWTH_BYTES", 2000)
    log, sizes = log_of(node, tmp_path), []
    for at in range(400):
        log.write([piece(at, 7)], lambda at=at: [piece(0, *[7] * at), piece(at, 7)], at)  # type: ignore[misc]
        (name,) = names(node)
        sizes.append((SHM / name).stat().st_size)
    assert max(sizes) < 2 * 1700 + 2000 + 100
    assert sum(b < a for a, b in pairwise(sizes)) > 3
    kill(log)
    notes = log_of(node, tmp_path).read()
    assert notes is not None
    (told,) = recall([Recovered(entry())], notes)
    desk = Desk(told, seats=0)
    assert desk.core._lives.requests[R].streams[0].tokens == [7] * 400


def test_what_is_torn_or_damaged_ends_it(node: str, tmp_path: Path) -> None:
    log = log_of(node, tmp_path)
    log.write([], lambda: [Stamp("f1")], 0)
    for at in range(3):
        log.write([piece(at, at)], list, at)
    kill(log)
    whole = (SHM / names(node)[0]).read_bytes()
    one = len(frame([piece(0, 0)]))
    for cut in range(len(whole)):
        complete = max(0, len(whole) - cut) // one if cut > len(whole) - one else 3 - -(-cut // one)
        found = [n for n in notes_in(whole[: len(whole) - cut]) if isinstance(n, Produced)]
        assert found == [piece(at, at) for at in range(complete)], cut
    for bit in range(8 * (len(whole) - 2 * one), 8 * (len(whole) - one)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        found = [n for n in notes_in(bytes(broken)) if isinstance(n, Produced)]
        assert found == [piece(0, 0)], bit
    assert not list(notes_in(b"PHXTOK0\n" + whole[8:])) and not list(notes_in(b""))


def test_full_memory_costs_the_log_and_nothing_else(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(node, tmp_path)
    log.write([], list, 0)
    write = os.write

    def some(fd: int, data: bytes) -> int:
        return write(fd, data[:-3])

    monkeypatch.setattr(os, "write", some)
    log.write([piece(0, 7)], list, 0)
    assert names(node) == []  # others need the room, and half of it helps nobody
    log.write([piece(1, 7)], list, 10)
    assert names(node) == []
    monkeypatch.undo()
    (SHM / arena_name(node, TOKENS, 1)).write_bytes(b"what an earlier one left")
    log = log_of(node, tmp_path)
    monkeypatch.setattr(token_log, "KEEP_FREE_BYTES", 1 << 60)
    log.write([piece(2, 7)], list, token_log.AGAIN_NS)
    assert names(node) == []
    monkeypatch.undo()
    log.write([piece(3, 7)], lambda: [piece(0, 7, 7, 7, 7)], 2 * token_log.AGAIN_NS)
    kill(log)
    assert log_of(node, tmp_path).read() == [piece(0, 7, 7, 7, 7)]
    flush_log(5)
    told = (tmp_path / "logs" / "gateway.log").read_text()
    assert told.count("no token log") == 2  # once each


def test_what_others_put_there_is_no_log(node: str, tmp_path: Path) -> None:
    (SHM / arena_name(node, TOKENS, 1)).mkdir()
    (SHM / arena_name(node, TOKENS, "x")).write_bytes(b"abc" * 100)
    log = log_of(node, tmp_path)
    assert log.read() == []
    log.write([], lambda: [piece(0, 7)], 0)
    kill(log)
    assert log_of(node, tmp_path).read() == [piece(0, 7)]


def test_beyond_the_bound_the_youngest_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_log, "FIRST_BYTES_MAX", 1000)
    some = [piece(0, at) for at in range(100)]
    kept = list(notes_in(b"".join(beginning(some, frame_bytes=100))))
    assert 0 < len(kept) < 50 and kept == some[: len(kept)]


def test_the_bound_is_one_of_bytes_however_much_a_note_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand streams with log-probabilities were one frame of half a gigabyte."""
    monkeypatch.setattr(token_log, "FIRST_BYTES_MAX", 1 << 20)
    large = [Produced(R, 0, 0, b"", bytes(100_000)), Scored(R, 0, bytes(100_000))]
    assert (1 << 20) <= len(b"".join(beginning(large * 500))) < (1 << 20) + 300_000


def long_stream(number: int, tokens: int) -> Stream:
    made = Stream(entry(Sampling(seed=1, max_tokens=10**6, logprobs=0)), 0, number)
    grow(made, tokens)
    return made


def grow(stream: Stream, count: int) -> None:
    first = len(stream.tokens)
    stream.tokens += range(first, first + count)
    stream.logprobs += [TokenLogprobs(-float(first + at)) for at in range(count)]


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3, 5, 8, 11, 30])
def test_the_next_file_is_made_beside_the_streams(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int
) -> None:
    """A little of it a turn, while they go on; whenever the gateway dies, all that it knew is there."""
    monkeypatch.setattr(token_log, "TURN_BYTES", 200_000)
    monkeypatch.setattr(token_log, "GROWTH_BYTES", 1000)
    log, stream = log_of(node, tmp_path), long_stream(1, 90_000)
    old = (SHM / arena_name(node, TOKENS, 0)).open("wb")  # of the gateway before
    old.write(b"PHXTOK1\n" + frame(stream.note()))
    old.close()
    log = log_of(node, tmp_path)
    before, turns = 0, 0
    while log.write(stream.note(), stream.note_all, turns) and turns < killed_after:
        now = sum((SHM / name).stat().st_size for name in names(node)[1:])
        assert now - before < 300_000, "more than a turn may take"
        before, turns = now, turns + 1
        grow(stream, 7)
    assert (turns == killed_after) == (killed_after < 8)
    for _ in range(3 * (killed_after == 30)):  # the same of one that has grown
        grow(stream, 50_000)
        log.write(stream.note(), stream.note_all, turns)
        grow(stream, 5)
        log.write(stream.note(), stream.note_all, turns)
    notes = log_of(node, tmp_path).read()
    assert notes is not None
    (told,) = recall([Recovered(stream.entry)], notes)
    again = long_stream(2, 0)
    again.recall(told.produced)
    assert again.tokens == stream.tokens and again.logprobs == stream.logprobs
    log.close(keep=False)
    assert names(node) == [], "nor what was kept until the new one is whole"


def test_what_others_need_of_dev_shm_is_not_for_the_log(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grew until nothing was left, and a rank that came back found no room."""
    log = log_of(node, tmp_path)
    log.write([], list, 0)
    assert log.write([piece(0, 7)], list, 1) is False
    (name,) = names(node)
    real = os.statvfs(SHM)
    few = (token_log.KEEP_FREE_BYTES - 1) // real.f_frsize

    def little(path: Path) -> os.statvfs_result:
        return os.statvfs_result((*real[:4], few, *real[5:]))

    monkeypatch.setattr(os, "statvfs", little)
    log.write([], list, 2)
    assert names(node) == [name], "nothing is added"
    log.write([piece(1, 7)], list, 3)
    assert names(node) == []


# --- what the next gateway does with it ---


def desk_after(*notes: Note, sampling: Sampling | None = None, n: int = 1) -> Desk:
    """A gateway whose predecessor left this, before any scheduler has spoken."""
    desk = Desk(*recall([Recovered(entry(sampling, n=n))], notes), seats=0)
    desk.core.on_topology(MEMBERS, 0)
    desk.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    return desk


def test_a_sequence_whose_scheduler_is_gone_goes_on_elsewhere_at_once() -> None:
    """Which starts at the same time as the gateway, and could tell nothing."""
    desk = desk_after(Placed(R, 0, 0, 1, 1), piece(0, 10, 11))
    desk.scheduler(1)
    assert not desk.submits()
    desk.core.on_topology(Topology(4, (Seat(0, 1, 2, "member"), MEMBERS.seats[1]), b"", "f1"), 0)
    desk.turn()
    ((peer, submit),) = desk.submits()
    assert peer == b"scheduler-1#1" and submit.resumed
    assert submit.outputs == array("i", [10, 11]).tobytes()
    desk.asks(Attach(1, R, (1,), (tokens_digest(0, (10,)),)))
    desk.decodes()
    desk.produces(peer, submit, 2, 12)
    desk.decodes()
    assert texts(desk.told()) == "[11][12]"


@pytest.mark.parametrize(
    "seat", [Seat(0, 2, 1, "member"), Seat(0, 1, 1, "lost"), Seat(0, 0, 0, "absent")]
)
def test_nor_is_a_scheduler_waited_for_that_lost_the_worker(seat: Seat) -> None:
    desk = desk_after(Placed(R, 0, 0, 1, 1), piece(0, 10, 11))
    desk.scheduler(1)
    assert not desk.submits()
    desk.core.on_topology(Topology(4, (seat, MEMBERS.seats[1]), b"", "f1"), 0)
    desk.turn()
    assert [peer for peer, _ in desk.submits()] == [b"scheduler-1#1"]


def test_what_nobody_was_given_is_placed_at_once() -> None:
    desk = desk_after(Stamp("f1"))
    desk.scheduler(1)
    ((_, submit),) = desk.submits()
    assert submit.outputs == b""


def test_a_scheduler_that_lives_is_asked_and_its_sequence_adopted() -> None:
    desk = desk_after(Placed(R, 0, 0, 1, 1), piece(0, 10, 11))
    desk.scheduler(1)
    outputs = array("i", [10, 11, 12]).tobytes()
    desk.scheduler(0, 1, SequenceInfo(R, 0, 33, outputs, None))
    assert (b"scheduler-0#1", Resend(R, 0, 33, 3)) in desk.bus
    desk.passes(4_000)  # it says nothing: it is asked after, and told again what it shall run
    assert {(peer, submit.attempt) for peer, submit in desk.submits()} == {(b"scheduler-0#1", 33)}


def test_one_that_has_other_tokens_than_the_log_is_not_adopted() -> None:
    desk = desk_after(Placed(R, 0, 0, 1, 1), piece(0, 10, 11))
    desk.scheduler(0, 1, SequenceInfo(R, 0, 33, array("i", [10, 9, 12]).tobytes(), None))
    ((_, submit),) = desk.submits()
    assert submit.outputs == array("i", [10, 11]).tobytes()


def test_idle_schedulers_are_told_of_a_new_gateway() -> None:
    """They would ask within a second; whoever knew another one introduces itself on hearing of this."""
    desk = desk_after()
    desk.passes(100)
    peers = {peer for peer, message in desk.bus if message == Welcome(7)}
    assert {b"scheduler-0#1", b"scheduler-1#1"} <= peers
    desk.scheduler(0)
    desk.clear()
    desk.passes(100)
    assert [p for p, m in desk.bus if isinstance(m, Welcome)] == [b"scheduler-1#1"]


def test_logprobs_go_on_where_they_were() -> None:
    """A scheduler that has the tokens from another one never had any of them."""
    sampling = Sampling(seed=1, max_tokens=9, logprobs=0)
    before = Desk(seats=1)
    rid = before.start(sampling)
    ((peer, submit),) = before.submits()
    right = (TokenLogprobs(-1.0), TokenLogprobs(-2.0))
    item = TokensItem(rid, 0, submit.attempt, 0, (10, 11), logprobs=right)
    before.says(peer, Tokens(0, 1, 1, (item,)))
    notes = before.core.take_notes()
    assert list(before.core.all_notes())[1:] == [n for n in notes if not isinstance(n, Stamp)]
    accepted = before.core._lives.requests[rid].entry
    after = Desk(*recall([Recovered(accepted)], notes), seats=0)
    after.core.on_topology(MEMBERS, 0)
    after.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    after.scheduler(0)  # which has forgotten it
    ((peer, submit),) = after.submits()
    assert submit.outputs == array("i", [10, 11]).tobytes()
    item = TokensItem(rid, 0, submit.attempt, 2, (12,), logprobs=(TokenLogprobs(-3.0),))
    after.asks(Attach(1, rid))
    after.decodes()
    after.says(peer, Tokens(int(peer[10:11]), 1, 1, (item,)))
    after.decodes()
    deltas = after.told()[1:]
    assert [p for d in deltas for p in d.logprobs] == [*right, TokenLogprobs(-3.0)]  # type: ignore[union-attr]


def test_prompt_scores_come_before_tokens_from_the_log_as_well() -> None:
    desk = desk_after(piece(0, 10), sampling=Sampling(seed=1, max_tokens=9, prompt_logprobs=0))
    assert desk.core._lives.requests[R].streams[0].tokens == [
        10
    ]  # a prompt of one token has no records
    long = array("i", [5, 6, 7]).tobytes()
    other = Entry(
        R, long, Sampling(seed=1, max_tokens=9, prompt_logprobs=0), 1, True, "k", b"", "t", "f1"
    )
    for scores, tokens in ((b"\0" * 8, []), (b"\0" * 16, [10])):
        desk = Desk(*recall([Recovered(other)], [Scored(R, 0, scores), piece(0, 10)]), seats=0)
        (stream,) = desk.core._lives.requests[R].streams
        assert (stream.num_scores, stream.tokens) == (len(scores) // 8, tokens)


def test_what_ended_undelivered_is_told_without_any_rank() -> None:
    final = Final(R, 0, 2, "stop", Usage(1, 2), digest=tokens_digest(0, (10, 11)))
    one = Recovered(entry(), {0: final})
    desk = Desk(*recall([one], [Placed(R, 0, 0, 1, 1), piece(0, 10, 11, 12)]), seats=0)
    desk.says(T0, Hello("tokenizer-0", "tokenizer", 1))
    desk.asks(Attach(1, R, (1,), (tokens_digest(0, (10,)),)))
    desk.decodes()
    told = desk.told()[1:]
    assert texts(told) == "[11]" and told[-1] == final
    assert not [op for op in desk.ops if isinstance(op, Finish)]  # the journal has it


def test_what_ended_with_more_tokens_than_the_log_has_is_made_again_from_there() -> None:
    final = Final(R, 0, 3, "stop", Usage(1, 3), digest=tokens_digest(0, (10, 11, 12)))
    desk = Desk(*recall([Recovered(entry(), {0: final})], [piece(0, 10, 11)]))
    desk.asks(Attach(1, R))
    ((peer, submit),) = desk.submits()
    assert submit.outputs == array("i", [10, 11]).tobytes() and submit.sampling.max_tokens == 3
    desk.produces(peer, submit, 2, 12, finish="length")
    desk.decodes()
    assert texts(desk.told()) == "[10][11][12]"


def test_what_is_delivered_leaves_the_log() -> None:
    desk = Desk(seats=1)
    desk.start()
    ((peer, submit),) = desk.submits()
    desk.produces(peer, submit, 0, 10, finish="length")
    desk.decodes()
    assert isinstance(desk.told()[-1], Final)
    assert len(list(desk.core.all_notes())) == 3  # it may still be on its way to the client
    desk.passes(11_000)
    assert list(desk.core.all_notes()) == [Stamp("f1")]


def test_other_numerics_than_the_log_tells_continue_nothing() -> None:
    """The journal was not told of the fingerprint in time."""
    one = Recovered(entry(fingerprint=""))
    desk = Desk(*recall([one], [Stamp("f0"), piece(0, 10)]))
    desk.asks(Attach(1, R))
    final = desk.told()[-1]
    assert isinstance(final, Final) and "f0" in final.error and not desk.submits()


def test_the_log_of_another_life_of_the_node_is_of_no_harm() -> None:
    """Requests that the journal does not know any more."""
    notes = [piece(0, 1, rid="f" * 32), Placed("f" * 32, 0, 0, 1, 1)]
    (told,) = recall([Recovered(entry())], notes)
    assert told == Recovered(entry(), placed={})


def test_where_the_journal_has_the_tokens_there_is_no_other_log() -> None:
    desk = Desk(seats=1, logged=True)
    desk.start()
    ((peer, submit),) = desk.submits()
    desk.produces(peer, submit, 0, 10)
    assert not desk.core.take_notes() and not list(desk.core.all_notes())
