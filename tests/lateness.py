"""How late this machine wakes a sleeper just now: the yardstick for bounds on time in tests of real processes.

A bound in milliseconds says as much of the machine's load as of the code. What waits and is woken (the
supervisor, a worker) is late by what this thread, beside it, is late; so a bound is ten times the code's own
period together with that.
"""

import threading
import time
from types import TracebackType
from typing import Self

_SLEEP_S = 0.003


class Lateness:
    """Measures from `with` on until the end of it."""

    def __init__(self) -> None:
        self._late_ms: list[float] = [0.0]
        self._over = False
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        self._thread.join()

    def _measure(self) -> None:
        while not self._over:
            start = time.perf_counter()
            time.sleep(_SLEEP_S)
            self._late_ms.append((time.perf_counter() - start - _SLEEP_S) * 1000)

    def bound_ms(self, period_ms: float) -> float:
        """For something that happens every `period_ms` on a machine without load: nine of ten are far within."""
        late_ms = sorted(self._late_ms)[len(self._late_ms) * 9 // 10]
        return 10 * (period_ms + late_ms)
