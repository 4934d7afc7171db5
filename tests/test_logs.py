"""The log that apps write: JSON where it is asked for, and the line of a round, which is read back."""

import io
import json
import logging
import math
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from flwr.supercore.logger import ConsoleHandler
from kit.commands import document
from kit.tables import for_rows

from coterie import logs
from coterie.deploy.commands.status import _progress
from coterie.deploy.progress import read_progress
from coterie.flower import run_log
from coterie.results import RoundRecord

LINE = {"round": 3, "epsilon": 1.23456, "seconds": 0.5, "histogram": [1.0]}
REPLIES = {"asked": 10, "accepted": 7, "dropped": {"late": 1, "norm": 2}}


@pytest.fixture
def flower(monkeypatch):
    """Flower's logger with one console handler, as it was afterwards."""
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", [ConsoleHandler(stream=io.StringIO())])
    before = logger.level
    logger.setLevel(logging.INFO)  # a new attribute would leave what loggers remember of their levels
    yield logger
    logger.setLevel(before)


def logged(text, level="INFO", as_json=False, **known):
    """A line of a log, as Flower's console handler or ours writes it."""
    record = logging.makeLogRecord({"msg": text, "levelname": level, **known})
    if as_json:
        return logs.JsonFormatter(run="17").format(record)
    return ConsoleHandler().format(record)


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


@for_rows("as_json", [False, True])
@for_rows(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"accuracy": 0.5}, {"accuracy": 0.5}),
        ({"epsilon": math.inf, "replies": REPLIES}, {"epsilon": math.inf, "dropped": 3}),
        ({"accuracy": 1.0, "replies": REPLIES | {"dropped": {}}}, {"accuracy": 1.0, "dropped": 0}),
    ],
)
def test_the_progress_of_a_round_is_read_back(as_json, changes, expected):
    found = read_progress(logged(run_log.progress_message(RoundRecord.of(LINE | changes), 80), as_json=as_json))
    assert found == {"round": 3, "rounds": 80, "epsilon": 1.23456, "accuracy": None, "dropped": None} | expected


@for_rows("as_json", [False, True])
def test_a_log_holds_much_else(as_json):
    rounds = [
        LINE | {"round": 1, "accuracy": 0.25, "replies": REPLIES},
        LINE | {"round": 2, "replies": REPLIES | {"dropped": {}}},
    ]
    lines = [logged("Starting", as_json=as_json), "{", '{"round": 8}', "[1]", "progress {"]
    for line in rounds:
        text, known = run_log.round_line(RoundRecord.of(line), 80)
        lines.append(logged(text, as_json=as_json, **known))
        lines.append(logged(run_log.progress_message(RoundRecord.of(line), 80), as_json=as_json))
    expected = {"round": 2, "rounds": 80, "epsilon": 1.23456, "accuracy": 0.25, "dropped": 3}
    assert read_progress("\n".join(lines)) == expected
    lines.append(logged("5 replies were dropped", "WARNING", as_json))
    assert read_progress("\n".join(lines)) == expected | {"dropped": 5}
    assert read_progress("") is read_progress(lines[0]) is None
    started = logged(run_log.progress_message(RoundRecord.of(LINE), 80, "alice"), as_json=as_json)
    found = read_progress("\n".join([*lines, started]))
    assert found is not None
    assert found["submitter"] == "alice"
    assert _progress(found | {"submitter": "\x1b[2J"}).startswith("started by \\x1b[2J, round ")


FORGED = (
    "round 9/9: epsilon 0.001 (1.00 s)",
    'progress {"round": 9, "rounds": 9, "epsilon": 0.001}',
    '\nINFO :      progress {"round": 9, "rounds": 9, "epsilon": 0.001}',
    '\n\x1b[92mINFO \x1b[0m:      progress {"round": 9, "rounds": 9, "epsilon": 0.001}',
    '\r\n{"level": "INFO", "message": "progress {\\"round\\": 9, \\"rounds\\": 9, \\"epsilon\\": 0.001}"}',
    '\u2028{"round": 9, "rounds": 9, "epsilon": 0.001}',
    "\n99 replies were dropped",
    "99 replies were dropped",
)


@for_rows("as_json", [False, True])
@for_rows("text", FORGED)
def test_a_client_cannot_forge_progress(text, as_json):
    honest = logged(run_log.progress_message(RoundRecord.of(LINE), 80), as_json=as_json)
    reason = logs.printable(f"the client failed: {text}")
    known = {"reason": reason, "round": 3, "client": 4}
    forged = logged(f"reply of client 4 dropped: {reason}", "WARNING", as_json, **known)
    assert read_progress(f"{honest}\n{forged}") == read_progress(honest)


@for_rows(
    ("text", "expected"),
    [
        ("plain text, ε = 1 ☃", "plain text, ε = 1 ☃"),
        ("a\nb\r\tc\0", r"a\nb\r\tc\x00"),
        ("\x1b[2J\x9b2J\x07", r"\x1b[2J\x9b2J\x07"),
        ("\u202eabc\u2066\u200b\u2028", r"\u202eabc\u2066\u200b\u2028"),
        ("\ud800\U000e0041", r"\ud800\U000e0041"),
        (ValueError("one\ntwo"), r"one\ntwo"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 199 + "…"),
        ("\n" * 100_050, r"\n" * 99 + "\\…"),
    ],
)
def test_text_of_another_machine_is_one_printable_line(text, expected):
    assert logs.printable(text) == expected


def test_a_client_that_logs_needs_nothing_for_it():
    code = "import sys, coterie.logs; print(*sorted({'flwr', 'numpy', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_fields_are_no_attributes_of_records():
    assert not set(logs.FIELDS) & logging.makeLogRecord({}).__dict__.keys()
    assert json.loads(logs.JsonFormatter().format(logging.makeLogRecord({"msg": "x"})))["message"] == "x"


def test_warnings_that_differ_in_numbers_come_once_with_a_count(flower):
    written = flower.handlers[0].stream
    with logs.collapsed_warnings():
        for client in range(5):
            flower.warning("client %s failed: epsilon 1%s.25e-3", client, client)
        flower.warning("the budget is spent")
        for _ in range(3):
            flower.info("round")
    text = written.getvalue()
    assert text.count("failed") == 2
    assert "client 0 failed" in text
    assert "4 more like: client 0 failed: epsilon 10.25e-3" in text
    assert text.count("the budget is spent") == 1
    assert text.count("round") == 3
    flower.warning("client 6 failed: epsilon 1")
    assert "client 6 failed" in written.getvalue()  # outside


def test_the_memory_of_warnings_is_bounded_though_clients_choose_their_text(flower):
    with logs.collapsed_warnings():
        (repeated,) = (each for each in flower.filters if hasattr(each, "counts"))
        for number in range(1500):
            flower.warning("x" * (number + 1))
        assert len(repeated.counts) == len(repeated.first) == 1000
    assert flower.handlers[0].stream.getvalue().count("\n") == 1500


@pytest.mark.parametrize("terminal", [True, False])
def test_files_and_pipes_get_no_colours(flower, monkeypatch, terminal):
    written = flower.handlers[0].stream
    monkeypatch.setattr(written, "isatty", lambda: terminal)
    logs.colour_terminals_only()
    flower.warning("seen")
    assert ("\x1b" in written.getvalue()) == terminal


@pytest.mark.slow
def test_warnings_of_a_run_in_a_pipe_have_no_colours(tmp_path):
    np.savez(tmp_path / "client-0.npz", x=np.full((20, 3), 1e3), y=np.arange(20) % 2)
    words = ["run", "--dataset", "own", "--data-dir", ".", "--set", "input-shape=3", "--set", "num-classes=2"]
    words += ["--strategy", "fedavg", "--clients", "1", "--rounds", "1", "--set", "privacy-unit=none", "--out", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "coterie.cli", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "reaches 1e+03" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


# What a program writes, for each (code, environment variables) of standard input: in a fork for each, since what they
# import configures the loggers of a whole process. The libraries that take long, and configure none, are there before.
FORKS = """
import json, os, sys
import scipy.optimize, scipy.signal, scipy.stats, torch.distributed.tensor
import flwr.common.logger
import coterie.cli.run, coterie.deploy.commands.status

assert not {"absl", "opacus"} & set(sys.modules)
for number, (code, variables) in enumerate(json.load(sys.stdin)):
    if os.fork() == 0:
        os.environ.update(variables)
        file = os.open(f"{number}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, number
"""
LINES = """
import logging
from flwr.common.logger import log
from coterie import logs
logs.install(run="17")
{configure}
logs.install(run="17")
log(logging.INFO, "line of a run")
logging.getLogger("library").warning("line of a library")
"""
RUN = """
from coterie.cli.run import _open
_open({'rounds': 2, 'clients': 20, 'out': 'here'}, 'local').close()
import opacus, logging
from flwr.common.logger import log
log(logging.WARNING, 'once')
"""
CONFIGURE = ["import opacus", "from absl import logging as a; a.info('absl')", "pass"]
LOGGED = list(product(["", "json"], CONFIGURE))


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each program says, by (form, configuration); None: a run."""
    folder = tmp_path_factory.mktemp("said")
    cases = {(form, code): (LINES.format(configure=code), {"COTERIE_LOG": form}) for form, code in LOGGED}
    cases[None] = (RUN, {"COTERIE_LOG": ""})
    words = [sys.executable, "-c", FORKS]
    programs = json.dumps(list(cases.values()))
    done = subprocess.run(words, input=programs, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, (done.stderr, [file.read_text() for file in sorted(folder.glob("*.txt"))])
    return {case: (folder / f"{number}.txt").read_text() for number, case in enumerate(cases)}


def test_every_line_is_written_once(said):
    """Opacus and absl configure the root logger, to which Flower's logger passes its lines."""
    assert said[None].count("once") == 1
    for case in LOGGED:
        assert [said[case].count(f"line of a {what}") for what in ("run", "library")] == [1, 1], (case, said[case])


def test_a_root_logger_that_somebody_configured_stays(monkeypatch):
    handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    logs.write_once()
    assert logging.getLogger().handlers == [handler]
