"""What tests of the command share: a tiny run, and what an answer must look like."""

import json

import pytest

TINY = {
    "clients": 20,
    "clusters": 2,
    "groups": 2,
    "rounds": 2,
    "sampling-rate": 0.5,
    "local-epochs": 1,
    "samples-per-client": 10,
    "model": "linear",
}


def settings(**changes):
    """``--set`` for the tiny run with changes; an underscore in a name stands for a hyphen."""
    values = TINY | {key.replace("_", "-"): value for key, value in changes.items()}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def document(text):
    """The one JSON document that ``text`` is, without NaN and infinity."""
    return json.loads(text, parse_constant=pytest.fail)


def tree(path):
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def lines(path):
    """Of a file of JSON lines; a ledger's first line, which is no charge, is left out."""
    return [line for line in map(json.loads, path.read_text().splitlines()) if "ledger" not in line]


def assert_refused(answer, *parts):
    """One clear message, a failure to the shell, and nothing on standard output."""
    status, out, err = answer
    assert status not in (0, None)
    assert out == ""
    messages = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(messages) == 1, err
    assert "Traceback" not in err
    for part in parts:
        assert part in messages[0], messages[0]
