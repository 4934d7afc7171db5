"""``coterie poc``: a deployment on this machine, with real processes in the slow tests."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from kit.servers import until
from kit.tables import for_rows

from coterie.deploy.trial import processes_of
from coterie.privacy import read_ledger

DONE = "Ctrl-C ends everything"
#: Settings of a run whose clients mask their updates.
MASKED = {"strategy": "ifca", "clusters": 2, "rounds": 2, "samples-per-client": 0, "privacy-unit": "client"}
MASKED |= {"mechanism": "secure", "epsilon": 50, "delta": 1e-3, "evaluate": "off"}
UNPROTECTED = {"strategy": "fedavg", "clusters": 1, "privacy-unit": "none", "samples-per-client": 0}
#: Three of ten clients drop out of every round: one before its vector is sent, two after it. One leaks in the last one.
DROPOUT = {"rounds": 2, "lost": [1], "gone": [4, 7], "leak": 2}
poc = import_module("coterie.deploy.commands.poc")  # the package has the function by this name


@pytest.fixture
def no_processes(monkeypatch):
    """Everything but the processes."""
    monkeypatch.setattr(poc, "_serve", lambda *_: None)


@pytest.fixture
def invoke(coterie):
    before = os.umask(0o077)
    os.umask(before)

    def call(*words):
        status, _, error = coterie("poc", *map(str, words))
        return status, error

    yield call
    os.umask(before)


def sites(folder, clients=2):
    for client in range(clients):
        (folder / f"client-{client}").mkdir(parents=True)
        np.savez(folder / f"client-{client}" / "train.npz", x=np.zeros((4, 1, 2, 2), np.uint8), y=np.arange(4) % 2)
    return folder


def test_a_folder_of_something_else_is_left_alone(tmp_path, no_processes, invoke):
    (tmp_path / "thesis.tex").write_text("x")
    assert "is not empty, and not of coterie poc" in invoke(tmp_path)[1]
    assert "is not empty, and not of coterie poc" in invoke(tmp_path / "thesis.tex")[1]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_second_start_keeps_clients_and_settings(tmp_path, no_processes, invoke):
    folder = tmp_path / "trial"
    assert invoke(folder, "--clients", 2, "--set", "rounds=5") == (0, "")
    assert "is a trial of 2 clients with digits" in invoke(folder, "--clients", 3)[1]
    assert "is a trial of 2 clients with digits" in invoke(folder, "--data-dir", tmp_path)[1]
    assert invoke(folder, "--clients", 2) == (0, "")
    assert invoke(folder, "--set", "local-epochs=1") == (0, "")
    settings = tomllib.loads((folder / "run.toml").read_text())
    assert (settings["rounds"], settings["training"]["local-epochs"]) == (5, 1)
    assert settings["data"]["samples-per-client"] == int(0.8 * 898)
    assert settings["deployment"]["min-clients"] == 2
    assert folder.stat().st_mode & 0o777 == 0o700


def test_own_data_are_counted_and_need_settings(tmp_path, no_processes, invoke):
    folder = tmp_path / "trial"
    data = sites(tmp_path / "sites", 4)
    assert "input-shape" in invoke(folder, "--data-dir", data)[1]
    shape = ["--set", "input-shape=1x2x2", "--set", "num-classes=2"]
    assert invoke(folder, *shape, "--set", "strategy=fedavg", "--set", "privacy-unit=none") == (0, "")
    assert json.loads((folder / "poc.json").read_text()) == {"clients": 4, "data-dir": str(data)}
    settings = tomllib.loads((folder / "run.toml").read_text())
    assert settings["data"] == {"dataset": "own", "clients": 4, "input-shape": "1x2x2", "num-classes": 2}
    assert "training" not in settings


def test_paths_of_settings_are_those_of_the_folder_that_they_are_given_in(tmp_path, no_processes, invoke, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sites(Path("sites"))
    Path("here").mkdir()
    Path("here/schema.toml").write_text("""
version = 1
label = {column = "ill", classes = ["no", "yes"]}
columns = [{name = "age", type = "number", mean = 55, scale = 15}]
""")
    Path("run.toml").write_text(
        'strategy = "fedavg"\nprivacy.privacy-unit = "none"\ndata.table-schema = "here/schema.toml"'
    )
    words = ["--data-dir", "sites", "--config", "run.toml", "--set", "model=linear"]
    assert invoke("trial", *words) == (0, "")
    trial = poc._Layout(tmp_path / "trial", 2, "sites")
    options = poc._declared(trial, has_budget=False)
    assert options[options.index("--schema") + 1] == str(tmp_path / "here" / "schema.toml")
    monkeypatch.chdir("here")
    assert invoke(tmp_path / "trial", "--set", "rounds=7") == (0, "")
    assert options == poc._declared(trial, has_budget=False)


@pytest.mark.parametrize(
    ("settings", "has_budget", "guarantee"),
    [
        *(({}, False, "trusted-server"), ({}, True, "record-level"), (UNPROTECTED, False, "trusted-server")),
        *((MASKED, False, "masked-sums"), (MASKED, True, "masked-sums")),
    ],
    ids=str,
)
def test_clients_declare_the_guarantee_of_the_run(tmp_path, no_processes, invoke, settings, has_budget, guarantee):
    folder = tmp_path / "trial"
    assert invoke(folder, "--clients", 10, *(f"--set={name}={value}" for name, value in settings.items())) == (0, "")
    words = poc._declared(poc._Layout(folder, 10, None), has_budget=has_budget)
    assert words[words.index("--guarantee") + 1] == guarantee


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--set", "dataset=digits"], "data.dataset = 'digits': must be 'own' in a trial"),
        (["--set", "clients=7"], "data.clients = '7': must be 3 in a trial of 3 clients"),
        (["--set", "rounds=0"], "rounds"),
        (["--set", "no-such=1"], "no-such"),
        (["--set", "rounds"], "must be key=value"),
        (["--config", "missing.toml"], "missing.toml cannot be read"),
        (["--epsilon", 8], "form one budget"),
        (["--data-dir", "missing"], "has no data of client 0"),
    ],
)
def test_wrong_settings_start_nothing(tmp_path, monkeypatch, invoke, words, error):
    monkeypatch.setattr(poc, "_complete", lambda *_: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)
    status, said = invoke(tmp_path / "trial", *words)
    assert status == 1
    assert error in said


def test_a_run_without_result_goes_on(tmp_path):
    layout = poc._Layout(tmp_path, 2, None)
    assert layout.unfinished() is None
    for number, name in enumerate(("b", "a")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
        os.utime(tmp_path / "runs" / name / "config.toml", (number, number))
    assert layout.unfinished() == tmp_path / "runs" / "a"
    (tmp_path / "runs" / "a" / "result.json").touch()
    assert layout.unfinished() is None


def start(folder, *words):
    """``coterie poc`` in a process; its log is beside the folder."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in jobs of the background
    log = folder.with_suffix(".log")
    with log.open("ab") as out:
        command = [sys.executable, "-P", "-m", "coterie.cli", "poc", str(folder), *map(str, words)]
        return subprocess.Popen(command, stdout=out, stderr=out), log


def end(process, number=signal.SIGINT):
    process.send_signal(number)
    return process.wait(60)


@pytest.mark.slow
def test_from_nothing_to_a_run_that_survives_a_kill(tmp_path):
    """The supervisor is killed and starts again; a killed client is named, and a killed SuperLink ends all."""
    folder = tmp_path / "trial"
    process, log = start(folder, "--clients", 2, "--set", "rounds=3", "--epsilon", 20, "--delta", 1e-4)
    began = time.monotonic()
    try:
        until(lambda: "round 1 of 3" in log.read_text(), process, log, 150)
        print(f"first round after {time.monotonic() - began:.1f} s")
        second, _ = start(folder)
        assert second.wait(60) == 1
        assert "is in use by another coterie poc" in log.read_text()
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while list(processes_of(folder)):
            assert time.monotonic() < deadline, "processes outlive their supervisor"
            time.sleep(0.2)
        process, log = start(folder, "--epsilon", 20, "--delta", 1e-4)
        until(lambda: DONE in log.read_text(), process, log, 150)

        def pid(text):
            """Of the supervisor's own child: numbers of processes begin again, so the lowest is not the first one."""
            (number,) = (
                number
                for number in processes_of(folder)
                if Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1] == str(process.pid)
                and text in Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ")
            )
            return number

        os.kill(pid("client-id=1"), signal.SIGKILL)
        until(lambda: "client-1 was ended by signal 9; the others go on" in log.read_text(), process, log, 30)
        os.kill(pid("coterie.cli server"), signal.SIGKILL)
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
    assert "goes on" in log.read_text()
    assert "error: server ended; the last lines of" in log.read_text()
    for written in (folder / "logs").glob("*.log"):
        assert "INFO:flwr:" not in written.read_text(), written  # each line once
    assert list(processes_of(folder)) == []
    (run,) = (folder / "runs").glob("*/")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((run / "result.json").read_text())["epsilon"] <= 8
    assert list((folder / "data").rglob(".coterie-budget.jsonl")) == []
    header, charges = read_ledger(folder / "clients" / "0" / "budget.jsonl")
    assert (header["epsilon"], {charge["round"] for charge in charges}) == (20, {1, 2, 3})
    others = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert {path.suffix for path in others} <= {".crt", ".pub", ".json"}, others


def superexecs_of(folder):
    """Ids of the SuperExecs of a trial, without what they fork, by what started them: client-I or server."""
    words = {number: Path(f"/proc/{number}/cmdline").read_text().split("\0") for number in processes_of(folder)}
    programs = {
        n for n, parts in words.items() if any(p.endswith(("deploy.superexec", "flower-superexec")) for p in parts)
    }
    found = {}
    for number in programs:
        parent = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        if parent in words.keys() - programs:
            client = re.search(r"client-id=(\d+)", " ".join(words[parent]))
            found[f"client-{client[1]}" if client else "server"] = number
    return found


def chains_of(folder, text):
    """Processes of a trial below the one whose command line has a text: each with its parents up to there."""
    parents, top = {}, None
    for number in processes_of(folder):
        with suppress(OSError):
            parents[number] = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
            words = Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ")
            top = number if text in words and "supernode" in words else top
    chains = {}
    for number in parents:
        chain = [number]
        while chain[-1] != top and chain[-1] in parents:
            chain.append(parents[chain[-1]])
        if top in chain[1:]:
            chains[number] = chain[: chain.index(top)]
    return chains


@pytest.mark.slow
def test_the_death_of_an_app_is_said_within_ten_seconds(tmp_path):
    """ClientApp, the process that forks it, a stopped SuperExec, ServerApp; the last one ends the trial."""
    folder = tmp_path / "trial"
    words = ["strategy=fedavg", "clusters=1", "rounds=400", "epsilon=500", "local-epochs=20", "batch-size=16"]
    process, log = start(folder, "--clients", 3, *(word for each in words for word in ("--set", each)))

    def stop(client, depth):
        """Stop a process below a SuperNode: 1, its SuperExec; 3, what forks; 5, a ClientApp of a template."""
        found = []

        def stopped():
            for number, chain in chains_of(folder, f"client-id={client} ").items():
                with suppress(OSError):  # a ClientApp can end meanwhile
                    if len(chain) == depth:
                        os.kill(number, signal.SIGSTOP)
                        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
                        found.extend([number] * (state == "T"))
            return bool(found)

        until(stopped, process, log, 60)
        return found[0]

    def said(name, text, seconds=10):
        until(lambda: text in (folder / "logs" / f"{name}.log").read_text(), process, log, seconds)

    try:
        until(lambda: "round 2 of 400" in log.read_text(), process, log, 200)
        os.kill(stop(0, 5), signal.SIGKILL)
        said("client-0", "the ClientApp of a message ended (signal SIGKILL): did the machine")
        os.kill(stop(1, 3), signal.SIGKILL)
        said("client-1", "the process that forks ClientApps ended (signal SIGKILL)")
        superexec = stop(2, 1)
        server = superexecs_of(folder)["server"]
        os.kill(server, signal.SIGSTOP)
        for name, number in (("client-2", superexec), ("server", server)):
            said(name, "the SuperExec has not asked for a task for 30 s", 45)
            os.kill(number, signal.SIGCONT)
            said(name, "the SuperExec asks again")
        for number in processes_of(folder):
            with suppress(OSError):
                if "flwr-serverapp" in Path(f"/proc/{number}/cmdline").read_text():
                    os.kill(number, signal.SIGKILL)
        said("server", "flwr-serverapp ended (signal SIGKILL)")
        assert process.wait(120) == 1
    finally:
        process.terminate()
        process.wait(60)
    assert "error: run ended" in log.read_text()


@pytest.mark.slow
def test_a_killed_superexec_is_named_within_ten_seconds(tmp_path):
    """That of the server is started again; a client ends with its own, and so does the trial."""
    folder = tmp_path / "trial"
    process, log = start(folder, "--clients", 2, "--set", "rounds=1", "--epsilon", 20, "--delta", 1e-4)
    try:
        until(lambda: DONE in log.read_text(), process, log, 200)
        first = superexecs_of(folder)
        os.kill(first["server"], signal.SIGKILL)
        until(lambda: superexecs_of(folder).get("server", first["server"]) != first["server"], process, log, 10)
        ended = "the SuperExec ended (signal SIGKILL)"
        assert f"{ended} and is started again" in (folder / "logs" / "server.log").read_text()
        os.kill(first["client-0"], signal.SIGKILL)
        assert process.wait(20) == 1
        assert f"{ended}, and so does this process" in log.read_text()
    finally:
        process.terminate()
        process.wait(60)


def memory_of(process):
    """The contents of the memory of a process of this user that are its own, without pages of zeros."""
    areas = re.findall(
        r"^(\w+)-(\w+) rw.*?^Anonymous: +(\d+) kB", Path(f"/proc/{process}/smaps").read_text(), re.M | re.S
    )
    with Path(f"/proc/{process}/mem").open("rb", 0) as memory:
        for begin, end in ((int(begin, 16), int(end, 16)) for begin, end, own in areas if own != "0"):
            with suppress(OSError, ValueError):
                memory.seek(begin)
                content = memory.read(end - begin)
                used = np.frombuffer(content, np.uint64).reshape(-1, 512).any(axis=1)
                changes = np.flatnonzero(np.diff(used, prepend=False, append=False)) * 4096
                yield from (content[first:last] for first, last in changes.reshape(-1, 2).tolist())


def seen(contents, **vectors):
    """Of which vectors eight consecutive integers, of every eighth place or the last ones, are in some contents.

    The last ones hold the counts of clusters, and so the client's label. Of 32 consecutive bytes, the first 24 hold
    eight that begin at a multiple of 16: only these are looked up.
    """
    parts, offsets = {}, {}
    for name, listed in vectors.items():
        for vector in listed:
            starts = (*range(0, len(vector) - 32, 32), len(vector) - 32)
            parts |= {vector[start : start + 32]: name for start in starts}
    for part in parts:
        for offset in range(16):
            offsets.setdefault(part[offset : offset + 8], set()).add(offset)
    possible = np.zeros(1 << 24, bool)
    possible[hashes(np.frombuffer(b"".join(offsets), "<u8"))] = True
    names = set()
    for content in contents:
        words = np.frombuffer(content, "<u8", count=len(content) // 8)[::2]
        for place in 16 * np.flatnonzero(possible[hashes(words)]):
            begins = (place - offset for offset in offsets.get(content[place : place + 8], ()))
            names |= {parts.get(content[begin : begin + 32]) for begin in begins if begin >= 0}
    return names - {None}


def hashes(words):
    """24 bits of each 64-bit word."""
    return (words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)


@for_rows("begin", range(20))
def test_what_is_seen(begin):
    vector = np.random.default_rng(1).integers(0, 256, 400, np.uint8).tobytes()
    content = bytes(begin) + vector[96:128] + bytes(50)
    assert seen([content], sent=[vector]) == {"sent"}
    assert seen([bytes(begin) + vector[-32:]], sent=[vector], other=[bytes(range(200))]) == {"sent"}
    assert seen([content], sent=[vector[4:]]) == set()


def is_uniform(vector):
    """Chi-square of the bytes of a vector; a uniform one fails once in 10^13, and real parameters have 0."""
    counts = np.bincount(np.frombuffer(vector, np.uint8), minlength=256)
    return scipy.stats.chisquare(counts).pvalue > 1e-13


class Watched:
    """What the clients of a deployment hide, and what its server has: see watched/sitecustomize.py."""

    def __init__(self, folder, path):
        self.folder, self.path = folder, path

    def vectors(self, ending, rounds, clients=range(10)):
        return [(self.path / f"{number}-{client}.{ending}").read_bytes() for number in rounds for client in clients]

    @property
    def files(self):
        """Of the server: run folder, logs, database and journal."""
        listed = [path for name in ("runs", "logs") for path in (self.folder / name).rglob("*") if path.is_file()]
        return [path.read_bytes() for path in (*listed, *self.folder.glob("superlink.db*"))]

    def memory(self, waits):
        """Of the ServerApp, which waits, and of the SuperLink."""
        commands = {number: Path(f"/proc/{number}/cmdline").read_bytes() for number in processes_of(self.folder)}
        (superlink,) = (number for number, command in commands.items() if b"coterie.cli\0server" in command)
        serverapp = int(waits.stem.partition("-")[2])
        assert serverapp in commands
        return [*memory_of(serverapp)], [*memory_of(superlink)]


@pytest.mark.slow
def test_ten_clients_mask_their_updates(tmp_path, monkeypatch):
    """The server's files and its memory hold masked vectors, and no integers of a client, whoever drops out."""
    folder, path = tmp_path / "trial", tmp_path / "watched"
    watched = Watched(folder, path)
    path.mkdir()
    (path / "plan.json").write_text(json.dumps(DROPOUT))
    monkeypatch.setenv("WATCHED", str(path))
    hook = str(Path(__file__).with_name("watched"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([hook, os.environ.get("PYTHONPATH", "")]))
    words = [f"--set={name}={value}" for name, value in MASKED.items()]
    process, log = start(folder, "--clients", 10, *words)
    others = [client for client in range(10) if client != DROPOUT["leak"]]
    sending = [client for client in others if client not in DROPOUT["lost"]]
    try:
        for number in (1, 2):
            until(lambda number=number: list(path.glob(f"{number}-*.waits")), process, log, 300)
            (waits,) = path.glob(f"{number}-*.waits")
            vectors = {
                "sent": watched.vectors("sent", [number], sending),
                "clear": watched.vectors("clear", [number], others),
                "lost": watched.vectors("sent", [number], DROPOUT["lost"]),
                "leaked": watched.vectors("clear", [number], [DROPOUT["leak"]]),
            }
            # A vector that is sent in the clear is found in all of them; the SuperLink has it in memory or on disk.
            expected = {"sent", "leaked"} if number == DROPOUT["rounds"] else {"sent"}
            serverapp, superlink = watched.memory(waits)
            assert (number, seen(serverapp, **vectors)) == (number, expected)
            in_files = seen(watched.files, **vectors)
            assert in_files - {"sent"} == expected - {"sent"}
            assert in_files | seen(superlink, **vectors) == expected
            waits.unlink()
        until(lambda: DONE in log.read_text(), process, log, 300)
        held = watched.files
        assert end(process) == 0
    finally:
        process.kill()
        process.wait()
    assert list(processes_of(folder)) == []
    (run,) = (folder / "runs").glob("*/")
    result, certificate = (json.loads((run / name).read_text()) for name in ("result.json", "privacy.json"))
    # What is added to the leaked vector is not a sum of clients: it is noticed, and not released.
    assert (result["rounds"], result["skipped_rounds"], certificate["certified"]) == (2, [2], True)
    assert not seen(held, clear=watched.vectors("clear", [1]) + watched.vectors("clear", [2], others))
    uniform = [is_uniform(vector) for vector in watched.vectors("sent", (1, 2))]
    assert [place for place, passed in enumerate(uniform) if not passed] == [10 + DROPOUT["leak"]]
    assert certificate["mechanism"] == "secure"
    for client in range(10):
        home = folder / "clients" / str(client)
        _, charges = read_ledger(home / f"client-{client}.ledger.jsonl")
        assert [(charge["round"], charge["sampler"]) for charge in charges] == [(one, "discrete") for one in (1, 2)]
        entries = [json.loads(line) for line in (home / f"client-{client}.audit.jsonl").read_text().splitlines()]
        steps = ["train.open", "train.masked", "train.survivors", "train.unmask"]
        reached = 2 if client in DROPOUT["lost"] else 3 if client in DROPOUT["gone"] else 4
        assert [entry["type"] for entry in entries if entry.get("round")] == 2 * steps[:reached]
        assert bool(list(home.glob("*.open-round"))) == (reached < 4)


@pytest.mark.slow
def test_a_client_that_does_not_start_ends_all_with_its_reason(tmp_path):
    data = sites(tmp_path / "sites")
    (data / "client-1" / "train.npz").write_bytes(b"damaged")
    folder = tmp_path / "trial"
    words = ["--data-dir", data, "--set", "strategy=fedavg", "--set", "input-shape=1x2x2", "--set", "num-classes=2"]
    process, log = start(folder, *words, "--set", "privacy-unit=none")
    try:
        assert process.wait(150) == 1
    finally:
        process.kill()
        process.wait()
    assert "client-1 ended" in log.read_text()
    assert "train.npz" in log.read_text()
    assert list(processes_of(folder)) == []
