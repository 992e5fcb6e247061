"""`python -m phalanx.supervisor --run-dir DIR`: run the node whose configuration is saved there."""

import sys
import traceback
from pathlib import Path

import click

from phalanx.protocol.config import load_config, parse_config
from phalanx.protocol.errors import ConfigError, ExitCode, PhalanxError
from phalanx.supervisor.main import run_node, write_failure


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), required=True)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Read the configuration from here instead; it is saved once the run directory is ours.",
)
def main(run_dir: Path, config: Path | None) -> None:
    try:
        code = run_node(parse_config(config) if config else load_config(run_dir))
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = ExitCode.BAD_INPUT
    except PhalanxError as error:
        print(error, file=sys.stderr)
        code = ExitCode.UNHEALTHY
    except Exception as error:  # noqa: BLE001  top of the process; our children end with us
        traceback.print_exc()
        write_failure(run_dir, ExitCode.INTERNAL, f"the supervisor crashed: {error!r}")
        code = ExitCode.INTERNAL
    sys.exit(code)


main()
