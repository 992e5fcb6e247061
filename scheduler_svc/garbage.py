"""Python's cyclic garbage collector, kept out of the way of steps.

Left to itself it runs in the middle of a step once enough objects were made, and takes longer than the
step. What a scheduler drops has no cycles and is freed at once without it, so it only has to look now and
then, at moments when nobody waits: young objects while the worker computes, everything while idle.
"""

import gc

STEPS_BETWEEN = 64
IDLE_NS = 60 * 10**9


class Garbage:
    """From its making on, the collector runs only when told to."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # modules, classes and what else lives as long as the process
        gc.disable()
        self._steps = 0
        self._idle_due_ns = 0

    def after_step(self) -> None:
        """The next plan is on its way."""
        self._steps += 1
        if self._steps % STEPS_BETWEEN == 0:
            gc.collect(1)

    def when_idle(self, now_ns: int) -> None:
        """No step is under way."""
        if now_ns >= self._idle_due_ns:
            gc.collect()
            self._idle_due_ns = now_ns + IDLE_NS
