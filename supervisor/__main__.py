"""`python -m phalanx.supervisor --run-dir DIR`: run the node whose configuration is saved there."""

import sys
from pathlib import Path

import click

from phalanx.protocol.config import load_config, parse_config
from phalanx.protocol.errors import ConfigError, ExitCode
from phalanx.supervisor.lock import NodeBusy
from phalanx.supervisor.main import run_node


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
    except NodeBusy as error:
        print(error, file=sys.stderr)
        code = ExitCode.UNHEALTHY
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = ExitCode.BAD_INPUT
    sys.exit(code)


main()
