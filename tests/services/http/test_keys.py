"""API keys: both ways to send one, and files that are wrong."""

from pathlib import Path

import pytest

from phalanx.protocol.errors import ConfigError
from phalanx.services.http.errors import HttpError
from phalanx.services.http.keys import ANYONE, Keys, read_keys
from phalanx.services.http.quotas import Quota

DEFAULT = Quota(10, 20)


def test_a_key_says_who_asks_and_how_much_he_may(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# teams\nred key-of-red 3 4\nblue key-of-blue 5\n\ngreen key-of-green # all\n")
    keys = read_keys(path, DEFAULT)
    assert keys.who({"authorization": "Bearer key-of-red"}) == "red"
    assert keys.who({"x-api-key": "key-of-blue"}) == "blue"
    assert keys.quotas == {"red": Quota(3, 4), "blue": Quota(5, 20), "green": DEFAULT}
    for headers in ({}, {"authorization": "Bearer wrong-key"}, {"authorization": "key-of-red"}):
        with pytest.raises(HttpError) as refused:
            keys.who(headers)
        assert refused.value.status == 401


def test_without_a_file_everyone_may_ask() -> None:
    assert Keys({}, {}).who({}) == ANYONE


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no key"),
        ("alone\n", "line 1: 1 words"),
        ("a key-of-a\nb short\n", "line 2: the key has 5 characters"),
        ("a key-of-a\na key-of-b\n", "line 2: .* there already"),
        ("a key-of-a\nb key-of-a\n", "line 2: .* there already"),
        ("a key-of-a many\n", "line 1: invalid literal"),
        ("a key-of-a 0\n", "RUNNING must be at least 1"),
        ("a key-of-a 1 2 3\n", "line 1: 5 words"),
    ],
)
def test_files_that_are_wrong_say_where(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_keys(path, DEFAULT)
