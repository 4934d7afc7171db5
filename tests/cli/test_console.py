"""What every command prints with."""

import json

from kit.tables import for_rows

from coterie import logs
from coterie.cli import console


@for_rows(("waited", "heard"), [(59.0, ["first"]), (61.0, ["first", "second"])])
def test_where_there_is_no_terminal_reports_are_throttled(monkeypatch, capsys, waited, heard):
    now = 0.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    say = console.plain_progress(console.console_for(False), 60.0)
    say("at once")
    now = 61.0
    say("first")
    now += waited
    say("second")
    assert capsys.readouterr().out.split() == heard


@for_rows("words", [("datasets",), ("strategies",), ("models",), ("run", "--keys")])
def test_piped_output_is_not_cut(coterie, monkeypatch, words):
    monkeypatch.delenv("COLUMNS", raising=False)
    status, out, err = coterie(*words)
    assert status == 0, err
    rows = coterie(*words, "--json")[1]
    for name, row in json.loads(rows).items():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
        for value in row.values():
            assert value is None or " ".join(str(value).split()) in " ".join(line.split())


@for_rows("words", [("datasets",), ("strategies",), ("models",), ("run", "--keys"), ("bench",)])
@for_rows("columns", [80, 40])
def test_nothing_is_cut_or_broken_on_a_narrow_terminal(coterie, monkeypatch, words, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, err = coterie(*words)
    assert status == 0, err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for name, row in json.loads(coterie(*words, "--json")[1]).items():
        assert name in lines
        for head, value in row.items():
            text = "–" if value is None else " ".join(str(value).split())
            assert f"{head} {text}".strip() in lines


@for_rows(("columns", "expected"), [(40, ["name  value", "a     1", "[b]   x y"]), (9, None)])
def test_a_table_or_one_block_per_row(monkeypatch, capsys, columns, expected):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [["a", "1"], ["[b]", "x y"]]
    console.print_table(console.console_for(False), ["name", "value"], rows)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == (expected or ["a", "  value  1", "[b]", "  value  x y"])


def test_long_values_of_an_answer_are_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    digest = "a" * 200
    console.answer({"digest": digest}, False)
    assert "".join(capsys.readouterr().out.split()) == f"digest{digest}"
