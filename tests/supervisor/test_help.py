"""`--help` tells everything: every option has a word, and no command's sentence is cut."""

from collections.abc import Iterator

import click
from click.testing import CliRunner

from phalanx.supervisor.cli import cli


def commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, *path, name)


ALL = list(commands(cli))


def test_every_option_of_every_command_says_what_it_does() -> None:
    options = [
        (*path, option.opts[0], option.help)
        for path, command in ALL
        for option in command.params
        if isinstance(option, click.Option)
    ]
    assert len(options) > 100
    assert [option for option in options if not option[-1]] == []


def test_the_list_of_commands_is_told_whole() -> None:
    groups = [(path, command) for path, command in ALL if isinstance(command, click.Group)]
    assert len(groups) == 4
    for path, group in groups:
        shown = CliRunner().invoke(cli, [*path, "--help"]).output
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None and command.help is not None
            sentence = (
                " ".join(command.help.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
            )
            assert f"{name} {sentence}" in " ".join(shown.split()), name
