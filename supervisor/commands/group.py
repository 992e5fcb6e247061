"""A command that has commands."""

import click

_SENTENCE_MAX = 1_000  # characters


class Group(click.Group):
    """Tells the whole first sentence of each command: click would cut it where the line ends."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, c.get_short_help_str(_SENTENCE_MAX)) for name, c in commands if c]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
