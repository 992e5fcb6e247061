"""Whether the passes over the rows run compiled (`_rows.c`) or in Python. The decisions are the same.

The compiled ones are built when the package is installed, if there is a C compiler. PHALANX_PASSES=python does
without them. `python -m phalanx.scheduler_svc.compiled` says which ones would run.
"""

import os
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).with_name("_rows.c")


def _find() -> tuple[ModuleType | None, str]:
    """The module, or none and why."""
    if (wanted := os.environ.get("PHALANX_PASSES", "compiled")) != "compiled":
        return None, f"PHALANX_PASSES={wanted}"
    try:
        from phalanx.scheduler_svc import _rows
    except ImportError:
        return None, "not built: was there no C compiler at `pip install`?"
    if SOURCE.exists() and os.stat(_rows.__file__).st_mtime < SOURCE.stat().st_mtime:
        return None, "built from an older source: `pip install -e .` again"
    return _rows, ""


ROWS, WHY_NOT = _find()


def which() -> str:
    """For people."""
    return "compiled" if ROWS is not None else f"Python ({WHY_NOT})"


if __name__ == "__main__":
    print(which())
