"""Versions that a client states, and which are too old."""

import re
import tomllib
from pathlib import Path

import pytest
from kit.tables import for_rows

from coterie import __version__
from coterie.client.identity import Client, identity_reply
from coterie.client.state import ClientError
from coterie.wire import versions as module
from coterie.wire.versions import LEAST, incompatible, stated_versions, versions

ROOT = Path(__file__).parents[2]


def test_the_oldest_versions_are_those_of_the_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    least = dict(re.match(r"([\w-]+)>=([\d.]+)", text).groups() for text in listed)
    assert {name: least[name] for name in LEAST} == LEAST


def test_this_environment_is_compatible_and_stated():
    assert incompatible() == ""
    assert versions().startswith(f"coterie {__version__}, flwr 1.")
    assert stated_versions(versions()) == versions()
    assert identity_reply(Client(3, "/state"))["reply"]["versions"] == versions()
    assert "versions" not in identity_reply(Client(3))["reply"]  # simulated


@pytest.mark.parametrize(
    ("name", "number", "good"),
    [
        ("torch", "2.9.0+cu128", True),
        ("torch", "2.10", True),
        ("torch", "3", True),
        ("torch", "2.8.1", False),
        ("torch", "1.13", False),
        ("opacus", "1.5.4", True),
        ("opacus", "1.5.4.dev1", True),
        ("opacus", "1.5.3", False),
        ("dp-accounting", "0.5.9", False),
        ("dp-accounting", "none", False),
        ("flwr", "1.4", False),
        ("flwr", "", False),
    ],
)
def test_an_incompatible_client_is_told_in_words(monkeypatch, name, number, good):
    monkeypatch.setattr(module, "version", lambda asked: number if asked == name else LEAST[asked])
    if good:
        assert incompatible() == ""
        return
    with pytest.raises(ClientError, match=f"^{name} {LEAST[name]} is needed, {number} is"):
        identity_reply(Client(3, "/state"))
    assert f"pip install 'flwr>={LEAST['flwr']}'" in incompatible()


def test_a_missing_library_is_named(monkeypatch):
    def missing(name):
        raise module.PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    assert "opacus 1.5.4 is needed, none is installed" in incompatible()
    assert versions().endswith("dp-accounting none")


@for_rows("value", [None, 1, "", "x" * 10_000, "a\nb", "\x1b[2J", "<script>", ["coterie 1"]])
def test_versions_that_a_hostile_node_states_are_not_logged(value):
    assert stated_versions(value) == ""
