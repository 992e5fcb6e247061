"""How long a node takes from nothing to ready, and where the time goes."""

from typing import Any

import msgspec

from phalanx.supervisor.commands.node import private_node


def run(model: str, ranks: int) -> dict[str, Any]:
    """Start and stop a private node. Returns `ready_s` and the phases of each process."""
    with private_node(model, ranks) as (_, status):
        return {
            "ready_s": status.ready_s,
            "model": model,
            "ranks": ranks,
            "rows": msgspec.to_builtins(status.phases),
        }
