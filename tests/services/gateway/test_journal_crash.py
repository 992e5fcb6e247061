"""The journal on a disk that drops, tears and reorders what was not synced: what was acknowledged is there."""

import random
import shutil
import sqlite3
from array import array
from pathlib import Path

import pytest

from phalanx.protocol.log import setup_logging
from phalanx.protocol.messages import Final, Sampling, Usage
from phalanx.services.gateway import journal as module
from phalanx.services.gateway.entries import Accept, Entry, Finish, Forget, Op, Produced, Stamp
from phalanx.services.gateway.journal import Journal
from sim.lossy_files import Connection, Event, Mark, RecordingVFS, acknowledged, crash, moments

# Of each request what it was, its ends, and the log of its tokens by (index, offset).
State = dict[str, tuple[Entry, dict[int, Final], dict[tuple[int, int], bytes]]]
BATCHES, CRASHES = 60, 300
TTL_S = 3600.0


def batches(rng: random.Random) -> list[list[Op]]:
    """What a gateway writes: requests begin, end and are forgotten, several at a time."""
    alive: list[str] = []
    logged: dict[tuple[str, int], int] = {}  # how many tokens of a sequence are in the log
    found = []
    for number in range(BATCHES):
        ops: list[Op] = []
        for at in range(rng.randint(1, 4)):
            if alive and rng.random() < 0.3:
                ops.append(Forget(alive.pop(rng.randrange(len(alive)))))
            elif alive and rng.random() < 0.5:
                rid, index = rng.choice(alive), rng.randrange(2)
                if rng.random() < 0.5:
                    ids, offset = rng.randbytes(4 * rng.randint(1, 90)), logged.get((rid, index), 0)
                    ops.append(Produced(rid, index, offset, ids, b"p"))
                    logged[rid, index] = offset + len(ids) // 4
                    continue
                ops.append(Finish(Final(rid, index, number, "length", Usage(1, number))))
            else:
                rid = f"{number:016x}{at:016x}"
                prompt = array("i", [rng.randrange(999) for _ in range(rng.choice([3, 900]))])
                sampling = Sampling(seed=number, max_tokens=9)
                entry = Entry(rid, prompt.tobytes(), sampling, 2, True, "", b"", "tiny", "f1")
                ops.append(Accept(entry))
                alive.append(rid)
        found.append([*ops, Stamp("f1")])
    return found


def after(state: State, ops: list[Op]) -> State:
    state = {rid: (entry, dict(ends), dict(log)) for rid, (entry, ends, log) in state.items()}
    for op in ops:
        match op:
            case Accept(entry):
                state[entry.request_id] = (entry, {}, {})
            case Produced():
                state[op.request_id][2][op.index, op.offset] = op.token_ids
            case Finish(final):
                state[final.request_id][1][final.index] = final
            case Forget(request_id):
                del state[request_id]
            case _:
                pass
    return state


def record(path: Path, story: list[list[Op]], *pragmas: str) -> list[Event]:
    """Write the story with the journal itself, and what it did to the files."""
    vfs = RecordingVFS()
    log = setup_logging(path.parent, "gateway", 1, "error")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda path, **_: Connection(path, *pragmas))
        journal = Journal(path, TTL_S, log)
        for number, ops in enumerate(story, 1):
            journal.write(ops, 1000.0 + number)
            vfs.events.append(Mark(number))
            if number % 25 == 0:  # another gateway
                journal.close()
                journal = Journal(path, TTL_S, log)
        journal.close()
    events = list(vfs.events)
    vfs.unregister()
    return events


def survives(folder: Path, files: dict[str, bytes], allowed: list[State]) -> bool:
    """Whether the next gateway finds one of the allowed states there, whole."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    journal = Journal(folder / "journal.db", TTL_S, setup_logging(folder, "gateway", 1, "error"))
    found = {
        one.entry.request_id: (
            one.entry,
            one.finals,
            {(piece.index, piece.offset): piece.token_ids for piece in one.produced},
        )
        for one in journal.load(1100.0)
    }
    journal.close()
    aside = list(folder.glob("*unreadable*"))
    return found in allowed and not aside


def lost(tmp_path: Path, seed: int, *pragmas: str) -> int:
    """Of many crashes, after how many something acknowledged was gone, or half of a batch there."""
    rng = random.Random(seed)
    story = batches(rng)
    (tmp_path / "logs").mkdir(exist_ok=True)
    events = record(tmp_path / "journal.db", story, *pragmas)
    states: list[State] = [{}]
    for ops in story:
        states.append(after(states[-1], ops))
    bad = 0
    for past in moments(events, CRASHES, rng):
        known = acknowledged(past)
        # The batch under way is there as a whole or not at all.
        bad += not survives(tmp_path / "crashed", crash(past, rng), states[known : known + 2])
    return bad


def test_what_was_acknowledged_is_there_after_any_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module.sqlite3 is sqlite3
    # Checkpoints are rare by default; often, so that many crashes meet one.
    assert lost(tmp_path, 1, "PRAGMA wal_autocheckpoint=8") == 0


def test_without_syncs_the_same_crashes_lose_something(tmp_path: Path) -> None:
    """The control: this file layer does lose what is not synced."""
    pragmas = ("PRAGMA wal_autocheckpoint=8", "PRAGMA synchronous=OFF")
    assert lost(tmp_path, 1, *pragmas) > CRASHES // 4
