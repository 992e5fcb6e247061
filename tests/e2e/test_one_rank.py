"""A node of one rank: its worker falls, nobody is there to take over, and its streams go on all the same."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.node import Node, assert_whole, others, tokens, wait_for
from phalanx.protocol.limits import RESTARTS_MAX
from phalanx.protocol.messages import Sampling
from phalanx.services.client import Spec
from phalanx.services.gateway.suspects import FALLS_MAX

pytestmark = [pytest.mark.process, pytest.mark.soak]

POISON = 666

# Read by every Python that starts: a process of this node dies over a request with that seed, where it takes it in.
_BUG = """
import importlib.util, os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            kind = getattr(module, {kind!r})
            right = getattr(kind, {method!r})

            def dies(self, one):
                if one.sampling.seed == {seed}:
                    os.kill(os.getpid(), signal.SIGKILL)
                return right(self, one)

            setattr(kind, {method!r}, dies)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("name", "module", "kind", "method"),
    [
        ("worker-0", "phalanx.worker_svc.slots", "Slots", "admit"),
        ("scheduler-0", "phalanx.scheduler_svc.rank", "Rank", "enqueue"),
    ],
    ids=["worker", "scheduler"],
)
def test_a_request_over_which_a_process_dies_ends_alone(
    start_node: Callable[..., Node],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: str,
    kind: str,
    method: str,
) -> None:
    bug = _BUG.format(module=module, kind=kind, method=method, seed=POISON)
    (tmp_path / "sitecustomize.py").write_text(bug)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    node = start_node(1, "--device", "null")
    good = [Spec("The sea", Sampling(seed=n, max_tokens=900, ignore_eos=True)) for n in range(5)]
    poison = Spec("The sea", Sampling(seed=POISON, max_tokens=900, ignore_eos=True))
    fault_free = node.run(good)
    found = node.run([*good[:3], poison, *good[3:]])
    reason, ids, _ = found.pop((3, 0))
    assert (reason, ids) == ("error", ())
    assert [found[key] for key in sorted(found)] == [fault_free[n, 0] for n in range(5)]
    node.wait_healthy()
    process = node.process(name)
    assert process is not None and process.restarts == FALLS_MAX + 1 <= RESTARTS_MAX
    assert node.run(good) == fault_free
    assert_whole(node)


def test_the_only_worker_falls_twice_and_no_token_changes(start_node: Callable[..., Node]) -> None:
    node, requests = start_node(1), others(6)
    fault_free = tokens(node.generate(requests))
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(tokens(node.generate(requests))))
    thread.start()
    for _ in range(2):
        wait_for(lambda: node.running() > 0, 60, "running requests")
        os.kill(node.pids()["worker-0"], signal.SIGKILL)
        wait_for(lambda: node.running() == 0, 10, "the rank has lost them")
    thread.join(240)
    assert got and got[0] == fault_free
    node.wait_healthy()
    assert_whole(node)
