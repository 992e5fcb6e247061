"""`python -m phalanx.supervisor --run-dir DIR`: run the node whose configuration is saved there."""

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import click

from phalanx.protocol.arena import sweep
from phalanx.protocol.config import load_config, node_name, parse_config
from phalanx.protocol.errors import ConfigError, ExitCode, PhalanxError
from phalanx.supervisor.lock import write_failure
from phalanx.supervisor.run import run_node

_AGAIN_S = 0.2


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), required=True)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Read the configuration from here instead; it is saved once the run directory is ours.",
)
@click.option(
    "--owner-fd", type=int, help="Read end: when it closes, stop and remove the run directory."
)
def main(run_dir: Path, config: Path | None, owner_fd: int | None) -> None:
    orphaned = threading.Event()
    if owner_fd is not None:
        os.set_inheritable(owner_fd, False)
        threading.Thread(target=_follow, args=(owner_fd, orphaned), daemon=True).start()
    try:
        code = run_node(parse_config(config) if config else load_config(run_dir))
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = ExitCode.BAD_INPUT
    except PhalanxError as error:
        print(error, file=sys.stderr)
        code = ExitCode.UNHEALTHY
    except KeyboardInterrupt:  # before the node was there to obey it
        code = ExitCode.OK
    except Exception as error:  # noqa: BLE001  top of the process; our children end with us
        traceback.print_exc()
        write_failure(run_dir, ExitCode.INTERNAL, f"the supervisor crashed: {error!r}")
        code = ExitCode.INTERNAL
    if orphaned.is_set():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the second one may still come
        sweep(node_name(run_dir))  # the token log, which was for the next node here
        shutil.rmtree(run_dir, ignore_errors=True)
    sys.exit(code)


def _follow(owner_fd: int, orphaned: threading.Event) -> None:
    """Interrupt this process, twice so that it stops at once, when its owner is gone."""
    while os.read(owner_fd, 1):
        pass
    orphaned.set()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_AGAIN_S)


main()
