"""From a configuration to a running node, and to the exit code that it ends with."""

import time
from collections.abc import Callable, Sequence

from phalanx.protocol import arena, crowd, rundir
from phalanx.protocol.board import Board
from phalanx.protocol.config import NodeConfig
from phalanx.protocol.errors import ArenaError, ConfigError, ExitCode, PhalanxError
from phalanx.protocol.futex import check_processor
from phalanx.supervisor.events import Tell
from phalanx.supervisor.group import Placements
from phalanx.supervisor.lock import NodeBusy, NodeLock, forget_failure, write_failure
from phalanx.supervisor.main import Node, OnEvent
from phalanx.supervisor.placements import GroupPlacements, read_shape
from phalanx.supervisor.processes import ProcessSpec, process_table


def run_node(config: NodeConfig, on_event: OnEvent = lambda event: None) -> ExitCode:
    """Run the node in `config.run_dir` until it is told to stop; SIGTERM and SIGINT do that too.

    Why a node failed stands in RUN_DIR/failed.json: {"code", "reason"}.

    Args:
        config: `model_dir` is resolved. Saved to the run directory, where the children read it.
        on_event: told what happens as it happens, for a live display.

    Raises:
        NodeBusy: the run directory belongs to a live node.
        PhalanxError: the node cannot start: configuration, checkpoint, shared memory.
    """

    def placements() -> Placements:
        return GroupPlacements(*read_shape(config.model_path), config.ranks)

    keep = config.device != "null" and config.worker.host_weights
    return run_processes(config, process_table(config), placements, on_event, keep_weights=keep)


def run_processes(
    config: NodeConfig,
    table: Sequence[ProcessSpec],
    placements: Callable[[], Placements],
    on_event: OnEvent = lambda event: None,
    *,
    keep_weights: bool = False,
) -> ExitCode:
    """`run_node` for any table of processes."""
    crowd.raise_limit()
    check_processor()
    run_dir = rundir.prepare(config.run_path)
    beat_ns = _last_beat_ns(config.node)
    lock = NodeLock(run_dir, lambda text: on_event(Tell("waiting", text=f"for {text}")))
    rundir.forget_plans(run_dir)
    forget_failure(run_dir)
    try:
        config.check()
        _check_name_free(config)
        config.save_first()
        silent_ms = (time.monotonic_ns() - beat_ns) / 1e6 if beat_ns else 0.0
        node = Node(config, table, placements(), lock, on_event, silent_ms)
        if keep_weights:
            node.keep_weights(lock.children_fd)
        return node.run()
    except PhalanxError as error:
        bad_input = isinstance(error, ConfigError)
        write_failure(run_dir, ExitCode.BAD_INPUT if bad_input else ExitCode.UNHEALTHY, str(error))
        raise
    finally:
        arena.close_owned()  # an interrupt or a full /dev/shm comes at any line
        lock.release()


def _check_name_free(config: NodeConfig) -> None:
    """Two containers may share /dev/shm and have a run directory each at the same path."""
    # What was abandoned has just been swept, but for what the last gateway left to the next one.
    if alive := [n for n in arena.names(config.node) if arena.kind_of(n) != arena.TOKENS]:
        raise NodeBusy(
            f"a node of another run directory at the path {config.run_dir} is running (shared memory"
            f" {alive[0]} is in use), in another container: choose another --run-dir"
        )


def _last_beat_ns(node: str) -> int:
    """When a supervisor that died here was last at work, as its board says that nobody has swept yet; 0: unknown."""
    try:
        board = Board.attach(node)
    except ArenaError:
        return 0
    try:
        return board.supervisor_beat_ns
    finally:
        board.close()
