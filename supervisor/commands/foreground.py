"""`phalanx up` without --detach: the supervisor runs here and tells the terminal what happens."""

import os
import time
from collections.abc import Callable, Sequence

from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ExitCode
from phalanx.protocol.log import LOG_END_S, flush_log
from phalanx.protocol.messages import PhaseTime
from phalanx.supervisor.commands.aside import Aside
from phalanx.supervisor.commands.common import errors, print_json
from phalanx.supervisor.commands.node import http_address
from phalanx.supervisor.commands.plan import memory_plan
from phalanx.supervisor.events import Tell
from phalanx.supervisor.main import OnEvent
from phalanx.supervisor.run import run_node

_COLOURS = {"lost": "red", "failed": "red", "unhealthy": "yellow", "healthy": "green"}


_STDOUT, _STDERR = 1, 2


class Narrator:
    """Prints events as they come; progress of a start on one changing line. It waits for the terminal as long as
    that takes, so it belongs in a thread of its own."""

    def __init__(self, config: NodeConfig, as_json: bool) -> None:
        self._config, self._as_json = config, as_json
        self._started = time.monotonic()
        self._phases: dict[str, str] = {}
        self._spinner = errors.status("starting", spinner="dots")
        self._spins = errors.is_terminal and not as_json

    def __call__(self, event: Tell) -> None:
        if self._spins:
            self._spins = False
            self._spinner.start()
        if event.kind == "progress":
            done = f" {event.fraction:.0%}" if event.fraction >= 0 else ""
            self._phases[event.process] = f"{event.process}: {event.text}{done}"
            self._spinner.update(", ".join(self._phases.values()))
            return
        if event.kind == "ready":
            self._phases.pop(event.process, None)
        if event.kind == "node ready":
            self._spinner.stop()
            self._announce(event.phases)
        if not self._as_json:
            colour = _COLOURS.get(event.kind, "default")
            since = time.monotonic() - self._started
            errors.print(
                f"[dim]{since:8.2f}[/] [{colour}]{event.kind:10}[/] {event.process} {event.text}"
            )

    def close(self) -> None:
        self._spinner.stop()

    def _announce(self, phases: Sequence[PhaseTime]) -> None:
        config = self._config
        ready_s = round(time.monotonic() - self._started, 3)
        if self._as_json:
            ready = {"ready_s": ready_s, "ranks": config.ranks, "phases": phases}
            at = {"http": http_address(config)}
            print_json({"run_dir": config.run_dir, **ready, **at})
        else:
            errors.print(
                f"[bold]{config.model}[/] on {config.ranks} ranks in {config.run_dir};"
                " in another terminal: phalanx generate 'Hello'. Ctrl-C stops it."
            )
            if (plan := memory_plan(config)) is not None:
                errors.print(plan)


def run_in_foreground(
    config: NodeConfig, as_json: bool, run: Callable[[NodeConfig, OnEvent], ExitCode] = run_node
) -> ExitCode:
    """Run the node until it is told to stop; returns how it ended. What becomes of the terminal is nothing to it."""
    narrator = Narrator(config, as_json)
    narrate = Aside[Tell](narrator, narrator.close, _STDOUT if as_json else _STDERR)
    try:
        code = run(config, narrate)
    finally:
        all_told = narrate.close()
    if not all_told:
        # The terminal takes nothing, and the interpreter waits for its streams when it ends.
        flush_log(LOG_END_S)
        os._exit(code)
    return code
