"""Who dies again and again leaves nothing in shared memory: names and bytes stay what they were."""

import os
import signal

import pytest

from e2e.field import Field
from e2e.node import wait_for
from phalanx.protocol.arena import SHM

pytestmark = pytest.mark.process
DEATHS = 3


@pytest.mark.parametrize(
    "victim",
    [
        "scheduler-1",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("worker-1", "gateway", "tokenizer-0", "kvstore", "eplb")
        ),
    ],
)
def test_what_crashes_does_not_pile_up_in_shared_memory(control: Field, victim: str) -> None:
    node = control.healthy_node(*[victim] * DEATHS)

    def kinds() -> list[str]:
        return sorted(name.rsplit("-", 2)[1] for name in node.names())

    def nbytes() -> int:
        return sum((SHM / name).stat().st_size for name in node.names() if "-tokens-" not in name)

    before, size, most = kinds(), nbytes(), [0]

    def crash() -> None:
        for _ in range(DEATHS):
            found = node.process(victim)
            assert found is not None
            os.kill(found.pid, signal.SIGKILL)

            def back(dead: int = found.pid) -> bool:
                most[0] = max(most[0], len(node.names()))
                now = node.process(victim)
                return now is not None and now.pid != dead and now.state == "ready"

            wait_for(back, 60, f"another {victim}")

    assert node.run(control.specs, crash) == control.fault_free
    node.wait_healthy()
    wait_for(lambda: kinds() == before, 20, "as many names as before")
    assert nbytes() == size
    assert most[0] <= len(before) + 4, "nor in between: what belonged to one that is gone"
