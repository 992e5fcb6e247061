"""Tests against a real node with faults made on purpose.

In a `conftest.py`: `pytest_plugins = ["phalanx.testing.plugin"]`, and in a test:

    def test_a_lost_worker_changes_nothing(phalanx_node: Node) -> None:
        before = phalanx_node.run(SPECS)
        phalanx_node.failpoint("worker.step.after_commit", process="worker-1")
        assert phalanx_node.run(SPECS) == before
        phalanx_node.wait_healthy()
"""

from phalanx.testing.node import Node, assert_whole, wait_for

__all__ = ["Node", "assert_whole", "wait_for"]
