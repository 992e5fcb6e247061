"""The wheel must hold what the checkout holds (setuptools does not recurse into sub-packages)."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SHIPPED = {"tests", "build", "dist"}


def test_every_folder_with_init_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    on_disk = {
        "phalanx." + ".".join(init.parent.relative_to(ROOT).parts)
        for init in ROOT.glob("[!.]*/**/__init__.py")
        if init.relative_to(ROOT).parts[0] not in NOT_SHIPPED
    }
    assert on_disk | {"phalanx"} == listed
