"""Where things that can be made again are kept between runs."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/phalanx, else ~/.cache/phalanx. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base if base else Path.home() / ".cache") / "phalanx"
