"""The memory plan of a node that has just become ready, as a table for people."""

from rich.table import Table

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.rundir import read_plans


def memory_plan(config: NodeConfig) -> Table | None:
    """A column for every rank; None when no rank told its plan (the null device has none)."""
    plans = read_plans(config.run_path)
    if not plans:
        return None
    table = Table("memory", *(f"rank {seat}" for seat in plans))
    for name in next(iter(plans.values())):
        table.add_row(name, *(plan.get(name, "") for plan in plans.values()))
    return table
