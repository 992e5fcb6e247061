"""A GPU's progress is seen layer by layer while the host waits for it, and one that hangs shows none."""

import pytest
import torch

from phalanx.worker_svc.marks import Marks, event_mark


class Reached:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def synchronize(self) -> None:
        self._log.append(f"reached {self._name}")


def test_a_sign_of_life_after_each_mark() -> None:
    log: list[str] = []
    names = iter("abcdef")
    marks = Marks(lambda: log.append("alive"), lambda: Reached(log, next(names)))
    marks.layer()
    marks.begin()  # that step was abandoned
    marks.layer()
    marks.layer()
    del log[:]
    marks.wait()
    assert log == ["reached b", "alive", "reached c", "alive"]
    marks.wait()
    assert len(log) == 4


def test_nothing_runs_behind_a_host_that_computes_itself() -> None:
    signs: list[None] = []
    marks = Marks(lambda: signs.append(None), None)
    marks.layer()
    marks.wait()
    assert len(signs) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_marks_of_a_gpu_come_one_after_the_other() -> None:
    """Its work takes long enough that the host is through with launching before the first mark."""
    signs: list[int] = []
    done = [torch.cuda.Event() for _ in range(3)]
    marks = Marks(lambda: signs.append(sum(event.query() for event in done)), event_mark)
    x = torch.ones((8192, 8192), device="cuda")
    for event in done:
        for _ in range(20):
            x = x @ x * 1e-4
        event.record()
        marks.layer()
    assert signs[-1] < 3
    del signs[:]
    marks.wait()
    assert signs[-1] == 3 and signs == sorted(signs)
