"""What every command prints with."""

import pytest

from coterie.cli import console


@pytest.mark.parametrize(("waited", "heard"), [(59.0, ["first"]), (61.0, ["first", "second"])])
def test_where_there_is_no_terminal_a_line_comes_now_and_then(monkeypatch, capsys, waited, heard):
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    say = console.now_and_then(console.console_for(False), 60.0)
    say("at once")
    now = 61.0
    say("first")
    now += waited
    say("second")
    assert capsys.readouterr().out.split() == heard
