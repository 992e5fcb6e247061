"""What a step costs, learnt from the steps themselves, and how many rows fit into a time. Pure.

time = a + b * rows + c * context, where context is the sum over rows of the tokens that each may read:
weights are read once (a), every row is multiplied (b) and attends to what precedes it (c). Fitted by
recursive least squares; a step makes what is known of steps like it count less, and of no others. So
hours of equal steps do not wipe out what a long prompt has taught. A step only changes the sums; they are
solved when somebody asks.
"""

import numpy as np
import numpy.typing as npt

FORGET = 0.98  # weight of the past of such steps at each step
STEPS_MIN = 8  # steps before the estimate is used
ROWS_UNIT, CONTEXT_UNIT = 1e-2, 1e-5  # scales, so that the fit is sound
UNIT = np.array([1.0, ROWS_UNIT, CONTEXT_UNIT])
RIDGE = 1e-3  # keeps what was never varied at zero
# A step has at most so many times the rows of the widest one seen: no leap into the dark.
GROWTH = 2


class StepCost:
    def __init__(self) -> None:
        # Information matrix, upper triangle, and right side of the normal equations, in units of UNIT:
        # plain numbers, since a step has no time for a dozen calls of numpy.
        self._information = (RIDGE, 0.0, 0.0, RIDGE, 0.0, RIDGE)
        self._right = (0.0, 0.0, 0.0)
        self._solved: npt.NDArray[np.float64] | None = None  # None: to be solved anew
        self._steps = 0
        self._widest = 0

    def observe(self, rows: int, context: int, us: int) -> None:
        """A step with so many rows took `us`; 0: its worker does not say."""
        if us <= 0:
            return
        x, y = rows * ROWS_UNIT, context * CONTEXT_UNIT
        a, b, c, d, e, f = self._information
        u, v, w = (
            a + b * x + c * y,
            b + d * x + e * y,
            c + e * x + f * y,
        )  # what is known of such steps
        less = (1 - FORGET) / (u + v * x + w * y)
        self._information = (
            a - less * u * u + 1.0,
            b - less * u * v + x,
            c - less * u * w + y,
            d - less * v * v + x * x,
            e - less * v * w + x * y,
            f - less * w * w + y * y,
        )
        a, b, c = self._right
        less *= a + b * x + c * y
        self._right = a - less * u + us, b - less * v + us * x, c - less * w + us * y
        self._solved = None
        self._steps += 1
        self._widest = max(self._widest, rows)

    @property
    def _weights(self) -> npt.NDArray[np.float64]:
        """us per constant, row, token of context."""
        if self._solved is None:
            a, b, c, d, e, f = self._information
            information = np.array([[a, b, c], [b, d, e], [c, e, f]])
            fitted = np.linalg.solve(information, np.array(self._right))
            self._solved = np.maximum(fitted * UNIT, 0.0)  # negative where little is known
        return self._solved

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
