"""What a step costs, learnt from the steps themselves, and how many rows fit into a time. Pure.

time = a + b * rows + c * context, where context is the sum over rows of the tokens that each may read:
weights are read once (a), every row is multiplied (b) and attends to what precedes it (c). Fitted by
recursive least squares; a step makes what is known of steps like it count less, and of no others. So
hours of equal steps do not wipe out what a long prompt has taught.
"""

import numpy as np

FORGET = 0.98  # weight of the past of such steps at each step
STEPS_MIN = 8  # steps before the estimate is used
UNIT = np.array([1.0, 1e-2, 1e-5])  # scales of constant, rows and context, so that the fit is sound
RIDGE = 1e-3  # keeps what was never varied at zero
GROWTH = (
    2  # a step has at most so many times the rows of the widest one seen: no leap into the dark
)


class StepCost:
    def __init__(self) -> None:
        self._information = RIDGE * np.eye(3)
        self._fitted = np.zeros(3)  # in units of UNIT; may be negative where little is known
        self._weights = np.zeros(3)  # us per constant, row, token of context
        self._steps = 0
        self._widest = 0

    def observe(self, rows: int, context: int, us: int) -> None:
        """A step with so many rows took `us`; 0: its worker does not say."""
        if us <= 0:
            return
        x = np.array([1.0, rows, context]) * UNIT
        seen = self._information @ x
        self._information -= (1 - FORGET) / float(x @ seen) * np.outer(seen, seen)
        self._information += np.outer(x, x)
        self._fitted += np.linalg.solve(self._information, x * (us - float(x @ self._fitted)))
        self._weights = np.maximum(self._fitted * UNIT, 0.0)
        self._steps += 1
        self._widest = max(self._widest, rows)

    @property
    def known(self) -> bool:
        return self._steps >= STEPS_MIN

    def predict_us(self, rows: int, context: int) -> float:
        return float(self._weights @ (1.0, rows, context))

    def rows_within(self, us: float, rows: int, context: int, start: int, most: int) -> int:
        """How many rows of a prompt, from position `start` on, a step with `rows` and `context` already
        in it can take without exceeding `us`; 0 to `most`, and no leap beyond what was seen."""
        low, high = 0, max(0, min(most, GROWTH * self._widest - rows))
        while low < high:
            count = (low + high + 1) // 2
            more = count * start + count * count // 2
            if self.predict_us(rows + count, context + more) <= us:
                low = count
            else:
                high = count - 1
        return low
