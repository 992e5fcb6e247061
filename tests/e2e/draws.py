"""Seeds of what every run of the tests draws anew. They stand in the names of the tests."""

import os
import random
import time

NONE = "none"


def seed_of_run(variable: str) -> int:
    """That of the environment variable, which repeats a run; else one that nobody has used before."""
    # The processes of one run of pytest-xdist have to draw the same.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", time.time_ns())
    return int(os.environ.get(variable, random.Random(run).randrange(1_000_000)))


def drawn(variable: str, count: int, of: int) -> list[int]:
    """The positions that this run draws; none if the environment variable says "none"."""
    if os.environ.get(variable) == NONE:
        return []
    return random.Random(seed_of_run(variable)).sample(range(of), count)
