"""What a step costs, learnt from the steps themselves, and how many rows fit into a time. Pure.

time = a + b * rows + c * context, where context is the sum over rows of the tokens that each may read:
weights are read once (a), every row is multiplied (b) and attends to what precedes it (c). Fitted by
least squares over all steps, older ones counting less and less.
"""

import numpy as np

FORGET = 0.98  # weight of the past at each step
STEPS_MIN = 8  # steps before the estimate is used
UNIT = np.array([1.0, 1e-2, 1e-5])  # scales of constant, rows and context, so that the fit is sound
RIDGE = 1e-3  # keeps what was not varied at zero


class StepCost:
    def __init__(self) -> None:
        self._normal = np.zeros((3, 3))
        self._right = np.zeros(3)
        self._weights = np.zeros(3)  # us per constant, row, token of context
        self._steps = 0

    def observe(self, rows: int, context: int, us: int) -> None:
        """A step with so many rows took `us`; 0: its worker does not say."""
        if us <= 0:
            return
        x = np.array([1.0, rows, context]) * UNIT
        self._normal = FORGET * self._normal + np.outer(x, x)
        self._right = FORGET * self._right + us * x
        self._steps += 1
        ridge = RIDGE * np.eye(3) * max(1.0, float(np.trace(self._normal)) / 3)
        fitted = np.linalg.solve(self._normal + ridge, self._right) * UNIT
        self._weights = np.maximum(fitted, 0.0)

    @property
    def known(self) -> bool:
        return self._steps >= STEPS_MIN

    def predict_us(self, rows: int, context: int) -> float:
        return float(self._weights @ (1.0, rows, context))

    def rows_within(self, us: float, rows: int, context: int, start: int, most: int) -> int:
        """How many rows of a prompt, from position `start` on, a step with `rows` and `context` already
        in it can take without exceeding `us`; 0 to `most`."""
        low, high = 0, most
        while low < high:
            count = (low + high + 1) // 2
            more = count * start + count * count // 2
            if self.predict_us(rows + count, context + more) <= us:
                low = count
            else:
                high = count - 1
        return low
