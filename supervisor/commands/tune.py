"""`phalanx tune`: measures on this GPU which settings of the kernels are fastest, and writes their table."""

import json
from pathlib import Path

import click

from phalanx.supervisor.commands.bench import KERNEL_PARTS, in_process
from phalanx.supervisor.commands.common import console


@click.command()
@click.argument("parts", nargs=-1, metavar="[PART]...", type=click.Choice(KERNEL_PARTS))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the table goes; kernels/triton/configs.json is what the engine reads.",
)
def tune(parts: tuple[str, ...], out: Path) -> None:
    """Find the kernels' settings for this GPU, in minutes. Settings are part of the numerics fingerprint.

    PART as in `phalanx bench kernels`.
    """
    table = in_process("kernels", "tune", *parts)
    out.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    console.print(f"{sum(map(len, table.values()))} settings of {len(table)} operations: {out}")
