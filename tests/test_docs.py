"""The documents name files that exist, commands and keys that the code has, and are easy to read anywhere."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from phalanx.protocol.config import NodeConfig
from phalanx.supervisor.cli import cli

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINE_CHARS_MAX = 120
# Of notes that were never part of the project: nobody who reads it could look them up.
FOREIGN = ("seed document", "contract.md", "design.md", "[seed]", "[port]")

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"(?<![\w./-])((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|toml))(?![\w/])")
_FOLDER = re.compile(r"`((?:[\w.-]+/)+)`")
_COMMAND = re.compile(r"`phalanx ([a-z]+)(?: ([a-z]+))?")
_SECTION = re.compile(r"model\.md(?: sections?)? ([A-G](?:\.\d)?)")


def prose(document: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of what stands outside code fences."""
    fenced = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line
    assert not fenced, f"{document}: a code fence is not closed"


def anchors(document: Path) -> set[str]:
    headings = [line.lstrip("#").strip() for _, line in prose(document) if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for number, line in prose(document):
        for link in _LINK.findall(line):
            if "://" in link:
                continue
            name, _, anchor = link.partition("#")
            target = document.parent / name if name else document
            assert target.is_file(), f"{document.name}:{number}: {link}"
            assert not anchor or anchor in anchors(target), f"{document.name}:{number}: {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    for number, line in enumerate(document.read_text().splitlines(), 1):
        without_links = _LINK.sub("", line)
        for name in (*_FILE.findall(without_links), *_FOLDER.findall(without_links)):
            known = (ROOT / name).exists() or name.startswith("inference/")  # the official code's
            assert known, f"{document.name}:{number}: {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_fit_a_window(document: Path) -> None:
    for number, line in prose(document):
        table = line.lstrip().startswith("|")
        assert table or len(line) <= LINE_CHARS_MAX, f"{document.name}:{number}: {len(line)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_private(document: Path) -> None:
    text = document.read_text().lower()
    assert [words for words in FOREIGN if words in text] == []


def test_the_readme_leads_to_every_document() -> None:
    links = set(_LINK.findall(DOCUMENTS[0].read_text()))
    assert {f"docs/{document.name}" for document in DOCUMENTS[1:]} <= links


def test_commands_are_those_of_the_command_line() -> None:
    """Each command stands in README and docs/cli.md; and none stands anywhere that does not exist."""
    commands = {name: cli.get_command(None, name) for name in cli.list_commands(None)}  # type: ignore[arg-type]
    for document in DOCUMENTS:
        for name, _ in _COMMAND.findall(document.read_text()):
            assert name in commands, f"{document.name}: phalanx {name}"
    reference = (ROOT / "docs/cli.md").read_text()
    readme = DOCUMENTS[0].read_text()
    for name, command in commands.items():
        parts = getattr(command, "commands", {"": command})
        for part, leaf in parts.items():
            full = f"{name} {part}".strip()
            assert f"`{full}" in reference, f"docs/cli.md lacks {full}"
            table = readme[readme.index("| command |") : readme.index("Every command but")]
            assert all(re.search(rf"\b{word}\b", table) for word in full.split()), full
            for option in leaf.params:
                long = [word for word in option.opts if word.startswith("--")]
                assert all(word in reference for word in long), f"docs/cli.md lacks {full} {long}"


def test_configuration_has_every_key_with_its_default() -> None:
    rows = re.findall(
        r"^\| `([\w.]+)` \| `([^|]*)` \|",
        (ROOT / "docs/configuration.md").read_text(),
        re.MULTILINE,
    )
    told = {key: json.loads(default) for key, default in rows}
    real: dict[str, object] = {}
    for key, value in msgspec.json.decode(msgspec.json.encode(NodeConfig())).items():
        inner = value.items() if isinstance(value, dict) else ()
        real |= {f"{key}.{name}": default for name, default in inner} or {key: value}
    assert told == real


def test_the_example_configuration_is_accepted() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    msgspec.json.decode(example, type=NodeConfig).check()


def test_sections_that_the_code_points_to() -> None:
    headings = {
        line.lstrip("#").split()[0].rstrip(".")
        for _, line in prose(ROOT / "docs/model.md")
        if line.startswith("#")
    }
    sources = [p for p in ROOT.rglob("*.py") if ".venv" not in p.parts and "build" not in p.parts]
    found = {name for path in sources for name in _SECTION.findall(path.read_text())}
    assert found and found <= headings, found - headings
