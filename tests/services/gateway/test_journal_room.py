"""On a full disk the journal may have room in its own files: what is accepted there counts like everything else."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from services.gateway.test_journal import LOG, entry

from phalanx.services.gateway.journal import Journal

_IN_THE_LAST_ROOM = """
import os, resource, signal, sqlite3, sys
sys.path[:0] = {paths!r}
from test_journal import entry, open_journal
from phalanx.services.gateway.entries import Accept
from pathlib import Path
path = Path(sys.argv[1])
journal = open_journal(path)
for number in range(1, 100):
    journal.write([Accept(entry(number))], 1000.0)
journal._open().execute("PRAGMA wal_checkpoint(RESTART)")  # as SQLite does by itself after 1000 pages
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
full = path.with_name(path.name + "-wal").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
try:
    while True:
        number += 1
        journal.write([Accept(entry(number))], 1000.0)
        print(number, flush=True)
except sqlite3.OperationalError:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_what_is_accepted_into_the_last_room_of_a_full_disk_survives_kill_9(tmp_path: Path) -> None:
    """The log has room of its own after a checkpoint. A gateway that has not failed yet may use it."""
    path, here = tmp_path / "j.sqlite", Path(__file__).parent
    script = _IN_THE_LAST_ROOM.format(paths=[str(here), str(here.parents[1])])
    command = [sys.executable, "-P", "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    last = max(map(int, done.stdout.split()))
    assert last > 110, "some were accepted"
    journal = Journal(path, 10**12, LOG)
    kept = [one.entry.request_id for one in journal.load(1000.0)]
    journal.close()
    assert sorted(kept) == sorted(entry(number).request_id for number in range(1, last + 1))
