"""The law of a step's cost is found from the steps themselves, also when it changes."""

import random

import pytest

from phalanx.scheduler_svc.cost import STEPS_MIN, StepCost


def law(rows: int, context: int, slower: float = 1.0) -> int:
    return int(slower * (2000 + 15 * rows + 0.004 * context))


def taught(cost: StepCost, steps: int, slower: float = 1.0) -> StepCost:
    choose = random.Random(1)
    for _ in range(steps):
        rows = choose.choice((16, 16, 100, 300))
        context = rows * choose.randrange(100, 9000)
        cost.observe(rows, context, law(rows, context, slower))
    return cost


def test_predictions_are_close() -> None:
    cost = taught(StepCost(), 200)
    for rows, context in ((16, 20_000), (200, 200_000), (300, 2_000_000)):
        assert cost.predict_us(rows, context) == pytest.approx(law(rows, context), rel=0.15)


def test_it_follows_a_change() -> None:
    cost = taught(taught(StepCost(), 200), 200, slower=3.0)
    assert cost.predict_us(100, 300_000) == pytest.approx(law(100, 300_000, 3.0), rel=0.15)


def test_rows_within_a_time() -> None:
    cost = taught(StepCost(), 200)
    rows = cost.rows_within(6000, 16, 16_000, 1000, 4096)
    more = rows * 1000 + rows * rows // 2
    assert law(16 + rows, 16_000 + more) == pytest.approx(6000, rel=0.15)
    assert cost.rows_within(6000, 16, 16_000, 8000, 4096) < rows  # later rows read more
    assert cost.rows_within(1, 16, 16_000, 0, 4096) == 0
    assert cost.rows_within(1e9, 16, 16_000, 0, 400) == 400
    assert (
        cost.rows_within(1e9, 16, 16_000, 0, 4096) == 2 * 300 - 16
    )  # no leap beyond what was seen


def test_equal_steps_do_not_wipe_out_what_a_prompt_has_taught() -> None:
    cost = taught(StepCost(), 200)
    for _ in range(5000):
        cost.observe(16, 16_000, law(16, 16_000, 2.0))  # and the machine has become slower
    assert cost.predict_us(16, 16_000) == pytest.approx(law(16, 16_000, 2.0), rel=0.05)
    assert cost.predict_us(300, 900_000) > law(300, 900_000)


def test_nothing_is_claimed_early_or_from_silence() -> None:
    cost = StepCost()
    for _ in range(100):
        cost.observe(10, 100, 0)
    assert not cost.known
    assert taught(cost, STEPS_MIN).known
