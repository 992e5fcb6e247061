"""How much memory this process may still take."""

from pathlib import Path


def available_bytes() -> int:
    """The smaller of what the kernel calls available and what the control group leaves."""
    return min(_machine_bytes(), _group_bytes())


def shown_bytes(count: int) -> str:
    """A size for people: 1.5 GiB, 12 MiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} B"


def _machine_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _group_bytes() -> int:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        # Page cache counts as used until the group needs the room.
        cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines()).get(
            "inactive_file", "0"
        )
    except (OSError, ValueError):
        return 1 << 62  # no control group, or not version 2: the machine's figure alone holds
    return 1 << 62 if limit == "max" else max(0, int(limit) - used + int(cache))
