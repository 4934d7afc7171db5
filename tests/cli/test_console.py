"""What every command prints with."""

import pytest

from coterie import progress
from coterie.cli import console


@pytest.mark.parametrize(("waited", "heard"), [(59.0, ["first"]), (61.0, ["first", "second"])])
def test_where_there_is_no_terminal_reports_are_throttled(monkeypatch, capsys, waited, heard):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    say = console.plain_progress(console.console_for(False), 60.0)
    say("at once")
    now = 61.0
    say("first")
    now += waited
    say("second")
    assert capsys.readouterr().out.split() == heard
