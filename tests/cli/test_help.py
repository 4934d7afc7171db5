"""The help of every command in a terminal of 80 columns: complete, and broken at the ends of lines alone."""

import inspect
import re
from itertools import pairwise

import generated
import typer
from kit.tables import for_rows
from typer.testing import CliRunner

from coterie.cli.program import cli


def commands(group, before=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))
        elif command.add_help_option:
            yield (*before, name), command


COMMANDS = dict(commands(typer.main.get_command(cli)))


def test_the_page_of_commands_is_current():
    assert generated.COMMANDS.read_text() == generated.commands(), "make settings"


def plain(text):
    """The words of a text, without boxes."""
    return " ".join(re.sub("[│─╭╮╰╯*`]", " ", text).split())


@for_rows("words", COMMANDS)
def test_nothing_is_missing_and_no_line_ends_early(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    shown = CliRunner().invoke(cli, [*words, "--help"]).output
    command = COMMANDS[words]
    assert [parameter.name for parameter in command.params if not parameter.help] == []
    for paragraph in inspect.cleandoc(command.help).split("\n\n"):
        assert plain(paragraph) in plain(shown)
    unbroken = plain(shown).replace(" ", "")
    for parameter in command.params:
        assert [word for word in plain(parameter.help or "").split() if word not in unbroken] == []
    lines = [line.strip() for line in shown.splitlines()]
    for paragraph in inspect.cleandoc(command.help).split("\n\n"):
        last = plain(paragraph).split()[-1]
        for line, following in pairwise(lines):
            if line and plain(line) in plain(paragraph) and not line.endswith(last) and following:
                assert len(line) + 1 + len(following.split()[0]) > 78
