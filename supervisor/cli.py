"""The command line: `phalanx COMMAND`. Loads only what the chosen command needs, so that it starts fast."""

import importlib
import os
import sys
from importlib.metadata import version

import click

from phalanx.protocol.errors import ConfigError, ExitCode, PhalanxError
from phalanx.supervisor.commands.group import Group

# Command -> module of supervisor/commands that defines it. A module is imported when its command runs.
_COMMANDS = {
    "up": "node",
    "down": "node",
    "status": "status",
    "epochs": "epochs",
    "scale": "change",
    "restart": "change",
    "generate": "generate",
    "chat": "chat",
    "run": "run",
    "demo": "demo",
    "queues": "look",
    "requests": "look",
    "logs": "look",
    "kv": "look",
    "eplb": "look",
    "metrics": "metrics",
    "doctor": "doctor",
    "inspect": "model",
    "inject": "inject",
    "replay": "replay",
    "chaos": "chaos",
    "bench": "bench",
    "tune": "tune",
}


class LazyGroup(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"phalanx.supervisor.commands.{_COMMANDS[cmd_name]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "show_default": True,
    },
    epilog="\b\nExamples:\n  phalanx up --ranks 2 --detach\n  phalanx generate 'Hello there'\n  phalanx status\n  phalanx down",
)
@click.version_option(version("phalanx-serve"), prog_name="phalanx")
def cli() -> None:
    """Serve DeepSeek-V4.1-class models: any rank may fall, no token changes."""


def main() -> None:
    """Run a command; every error of ours becomes one line on standard error and an exit code."""
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)  # Ctrl-C, as shells report it
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.BAD_INPUT)
    except ConfigError as error:
        _fail(error, ExitCode.BAD_INPUT)
    except PhalanxError as error:
        _fail(error, getattr(error, "exit_code", ExitCode.UNHEALTHY))
    except Exception as error:  # the top of the program: one line unless asked for more
        if os.environ.get("PHALANX_TRACEBACK"):
            raise
        print(
            f"phalanx: internal error: {type(error).__name__}: {error}"
            " (PHALANX_TRACEBACK=1 shows where)",
            file=sys.stderr,
        )
        sys.exit(ExitCode.INTERNAL)
    else:
        sys.exit(code)  # what a command gave to ctx.exit, or None


def _fail(error: PhalanxError, code: ExitCode) -> None:
    print(f"phalanx: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
