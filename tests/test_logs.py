"""The log that apps write: JSON where it is asked for, and the line of a round, which is read back."""

import io
import json
import logging
import math
import subprocess
import sys

import pytest
from commands import document

from coterie import logs

LINE = {"round": 3, "epsilon": 1.23456, "seconds": 0.5, "histogram": [1.0]}
REPLIES = {"asked": 10, "accepted": 7, "dropped": {"late": 1, "norm": 2}}


@pytest.fixture
def flower(monkeypatch):
    """Flower's logger with one console handler, as it was afterwards."""
    from flwr.supercore.logger import ConsoleHandler

    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", [ConsoleHandler(stream=io.StringIO())])
    monkeypatch.setattr(logger, "level", logging.INFO)
    return logger


def written(line, rounds=80, as_json=False):
    text, known = logs.round_line(line, rounds)
    record = logging.makeLogRecord({"msg": text, "levelname": "INFO", **known})
    return logs.JsonFormatter(run="17").format(record) if as_json else f"\x1b[92mINFO \x1b[0m:      {text}"


def test_json_lines_say_what_is_known(flower, monkeypatch, capsys):
    monkeypatch.setenv("COTERIE_LOG", "json")
    logs.install(run="1", node="2")
    logs.install(run="18446744073709551615", client=4)
    flower.warning("reply of %s\tdropped", 4, extra={"reason": "it came ☃", "round": None, "secret": "key"})
    try:
        raise ValueError("broken")
    except ValueError as error:
        flower.error("failed", exc_info=error, extra={"epsilon": math.inf})
    flower.debug("not at this level")
    first, second = (document(line) for line in capsys.readouterr().err.splitlines())
    moment = first.pop("time")
    assert (moment[10], moment[-6:]) == ("T", "+00:00")
    known = {"run": "18446744073709551615", "client": 4}
    assert first == {"level": "WARNING", "message": "reply of 4\tdropped", "reason": "it came ☃", **known}
    assert second["epsilon"] is None
    assert second["exception"].endswith("ValueError: broken")


@pytest.mark.parametrize("value", [None, "", "text", "jsn"])
def test_other_logs_stay_text(flower, monkeypatch, value):
    monkeypatch.delenv("COTERIE_LOG", raising=False)
    if value is not None:
        monkeypatch.setenv("COTERIE_LOG", value)
    (handler,) = flower.handlers
    logs.install(run="1")
    assert flower.handlers == [handler]
    said = handler.stream.getvalue()
    assert ("COTERIE_LOG = 'jsn': must be json or text" in said) if value == "jsn" else said == ""


def test_a_log_file_stays_as_it_is(flower, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COTERIE_LOG", "json")
    file = logging.FileHandler(tmp_path / "log")
    flower.addHandler(file)
    flower.handlers[0].setLevel(logging.ERROR)
    logs.install()
    flower.warning("hello")
    file.close()
    assert ((tmp_path / "log").read_text(), capsys.readouterr().err) == ("hello\n", "")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"epsilon": 1.235}),
        ({"accuracy": 0.5}, {"epsilon": 1.235, "accuracy": 0.5}),
        ({"epsilon": math.inf, "replies": REPLIES}, {"epsilon": math.inf, "dropped": 3}),
        ({"accuracy": 1.0, "replies": REPLIES | {"dropped": {}}}, {"epsilon": 1.235, "accuracy": 1.0, "dropped": 0}),
    ],
)
def test_what_is_written_of_a_round_is_read_back(as_json, changes, expected):
    found = logs.read_rounds(written(LINE | changes, as_json=as_json))
    found["epsilon"] = round(found["epsilon"], 3)
    assert found == {"round": 3, "rounds": 80, "accuracy": None, "dropped": None} | expected


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_holds_much_else(as_json):
    def noise(text):
        record = logging.makeLogRecord({"msg": text, "levelname": "INFO", "round": 9})
        return logs.JsonFormatter().format(record) if as_json else text

    rounds = [
        LINE | {"round": 1, "accuracy": 0.25, "replies": REPLIES},
        LINE | {"round": 2, "replies": REPLIES | {"dropped": {}}},
    ]
    log = [
        noise("Starting"),
        "{",
        '{"round": 8}',
        "round 7/9: epsilon",
        *(written(line, as_json=as_json) for line in rounds),
    ]
    told = {"round": 2, "rounds": 80, "accuracy": 0.25, "dropped": 3}
    assert logs.read_rounds("\n".join(log)).items() >= told.items()
    log.append(noise("5 replies could not be used"))
    assert logs.read_rounds("\n".join(log)).items() >= (told | {"dropped": 5}).items()
    assert logs.read_rounds("") is logs.read_rounds(noise("Starting")) is None


def test_a_client_that_logs_needs_nothing_for_it():
    code = "import sys, coterie.logs; print(*sorted({'flwr', 'numpy', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_fields_are_no_attributes_of_records():
    assert not set(logs.FIELDS) & logging.makeLogRecord({}).__dict__.keys()
    assert json.loads(logs.JsonFormatter().format(logging.makeLogRecord({"msg": "x"})))["message"] == "x"
