"""What a user types: the outcome, the output and the exit status of every command."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from kit.commands import TINY, assert_refused, document, lines, settings, tree
from kit.tables import for_rows
from safetensors.numpy import load_file

from coterie.datasets import DATASETS
from coterie.fields.settings import flat
from coterie.models import GANS, MODELS
from coterie.server import SETTINGS, RunFolder
from coterie.strategies.registry import STRATEGIES

RUN_FOLDER = ["SHA256SUMS", "checkpoint", "config.toml", "diagnostics.json", "diagnostics.jsonl", "ledger.jsonl"]
RUN_FOLDER += ["local.json", "metrics.jsonl", "models"]
RUN_FOLDER += ["privacy.json", "report.html", "result.json"]


# ---- run --------------------------------------------------------------------------------------------------


def test_run_prints_one_json_document_and_leaves_a_run_folder(coterie, tmp_path):
    status, out, err = coterie("run", *settings(), "--out", "here", "--json")
    assert status == 0, err
    result = document(out)
    folder = tmp_path / "here"
    assert sorted(file.name for file in folder.iterdir()) == RUN_FOLDER
    exact = result.pop("diagnostics")
    assert document((folder / "diagnostics.json").read_text()) == exact
    assert 0 <= exact["accuracy"] <= 1
    assert document((folder / "result.json").read_text()) == result
    assert (result["rounds"], result["certified"], result["out"]) == (2, True, "here")
    assert 0 < result["epsilon"] <= 8
    assert document((folder / "privacy.json").read_text())["certified"] is True
    stored = tomllib.loads((folder / "config.toml").read_text())["config"]
    stored = {name.rpartition(".")[2]: value for name, value in flat(stored).items()}
    assert {**stored, "groups": int(stored["groups"])}.items() >= TINY.items()
    models = sorted(file.name for file in (folder / "models").iterdir())
    assert models == ["cluster-0.safetensors", "cluster-1.safetensors"]
    assert "round    2/2" in err  # people read there while standard output carries JSON
    page = (folder / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")


def test_run_for_people_and_a_default_folder(coterie, tmp_path):
    status, out, _ = coterie("run", *settings(strategy="fedavg", clusters=1), "--seed", 3)
    assert status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("fedavg-digits-")
    assert f"runs/{folder.name}" in out
    assert "round    2/2" in out
    assert "seed" in out  # not certified, and why


def test_config_file_then_set_then_options(coterie, tmp_path):
    (tmp_path / "keys.toml").write_text(
        "\n".join(f"{k} = {json.dumps(v)}" for k, v in {**TINY, "rounds": 1, "seed": 1, "lr": 0.1}.items())
    )
    words = ("--config", "keys.toml", "--set", "rounds=5", "--rounds", 2, "--set", "seed=2", "--seed", 3)
    words += ("--device", "cpu")
    status, out, err = coterie("run", *words, "--out", "first", "--json")
    assert status == 0, err
    assert (document(out)["rounds"], document(out)["seed"]) == (2, 3)
    stored = tomllib.loads((tmp_path / "first" / "config.toml").read_text())["config"]
    assert (stored["training"]["lr"], stored["training"]["device"]) == (0.1, "cpu")
    # a run folder's own config.toml starts the same run again
    status, out, err = coterie("run", "--config", "first/config.toml", "--out", "second", "--json")
    assert status == 0, err
    first, second = (load_file(tmp_path / run / "models" / "cluster-1.safetensors") for run in ("first", "second"))
    assert all(np.array_equal(values, second[name]) for name, values in first.items())


def test_a_note_is_shown_once(coterie, caplog):
    status, _, err = coterie("run", *settings(rounds=1, delta=0.01), "--json")
    note = "delta = 0.01 exceeds 1/(10 clients)"
    assert (status, err.count(note) + caplog.text.count(note)) == (0, 1)


@for_rows(
    ("words", "parts"),
    [
        (["--set", "samplin-rate=1"], ["'samplin-rate'", "'sampling-rate'"]),
        (["--epsilon", "two"], ["epsilon = 'two'"]),
        (["--clients", "4000", "--set", "samples-per-client=0"], ["clients", "1400"]),
        (["--strategy", "fedagv"], ["strategy = 'fedagv'", "did you mean 'fedavg'"]),
        (["--set", "rounds"], ["--set rounds", "key=value"]),
        (["--set", "dataset=mnist", "--data-dir", "nowhere"], ["mnist", "nowhere"]),
        (["--set", "dataset=mnist"], ["mnist", "--data-dir"]),
        (["--set", "dataset=nowhere:data"], ["nowhere:data"]),
        (["--set", "model=nowhere:net"], ["nowhere:net"]),
        (["--set", "model=lenet"], ["lenet"]),  # too small an image
        (["--set", "rounds=1000", "--set", "epsilon=1e-9"], ["epsilon", "no noise reaches"]),
        (["--config", "none.toml"], ["none.toml"]),
        (["--config", "."], ["cannot be read"]),
        (["--config", "broken.toml"], ["broken.toml", "not valid TOML"]),
        (["--config", "binary.toml"], ["binary.toml"]),
        (["--config", "number.toml"], ["number.toml"]),
        (["--engine", "cloud"], ["--engine cloud", "local", "ray"]),
        (["--set", "ray-address=localhost:6379"], ["ray-address was removed", "RAY_ADDRESS"]),
        (["--set", "kfed.device-failures=1"], ["unknown setting", "did you mean 'one-shot.device-failures'"]),
        (["--resume"], ["resume requires", "out"]),
        (["--out", "letters"], ["letters", "not an empty folder"]),
        (["--out", "broken.toml"], ["broken.toml"]),
        (["--out", "broken.toml/run"], ["broken.toml"]),
        (["--out", "letters", "--resume"], ["letters", "no run"]),
        (["--out", "elsewhere", "--resume"], ["elsewhere", "no run"]),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(coterie, tmp_path, words, parts):
    (tmp_path / "broken.toml").write_text("rounds = ")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "number.toml").write_text("config = 3")
    (tmp_path / "letters").mkdir(exist_ok=True)
    (tmp_path / "letters" / "love.txt").write_text("dear")
    before = tree(tmp_path)
    assert_refused(coterie("run", *settings(), *words), *parts)
    assert tree(tmp_path) == before


def test_a_device_that_is_not_there_is_refused_before_anything_is_made(coterie, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert_refused(coterie("run", *settings(), "--device", "cuda"), "device", "cuda")
    assert tree(tmp_path) == {}


def test_a_run_folder_is_not_used_twice_nor_resumed_with_other_settings(coterie, tmp_path):
    assert coterie("run", *settings(rounds=1), "--out", "run")[0] == 0
    before = tree(tmp_path)
    again = ["run", *settings(rounds=1), "--out", "run"]
    assert_refused(coterie(*again), "run", "--resume")
    assert_refused(coterie("run", "--out", "run", "--resume", "--set", "epsilon=9"), "epsilon was 8.0, now 9.0")
    assert_refused(coterie("run", "--out", "run", "--resume", "--seed", "3"), "seed was 'auto', now 3")
    holder = RunFolder.resume(tmp_path / "run", {})
    try:
        assert_refused(coterie(*again, "--resume"), "run/ledger.jsonl is in use by another process")
    finally:
        holder.close()
    assert tree(tmp_path) == before
    assert coterie(*again, "--resume")[0] == 0  # the same settings are no change


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_say_how_to_continue(coterie, tmp_path, monkeypatch, number, ended):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in jobs of the background
    keep, before = RunFolder.round_finished, signal.getsignal(signal.SIGTERM)

    def interrupted(folder, line):
        keep(folder, line)
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "round_finished", interrupted)
        status, out, err = coterie("run", *settings(), "--out", "run", "--json")
    assert (status, out) == (ended, "")
    assert signal.getsignal(signal.SIGTERM) is before
    assert "--resume --out" in err
    assert "Traceback" not in err
    status, out, err = coterie("run", "--resume", "--out", "run", "--json")
    assert status == 0, err
    assert (document(out)["rounds"], document(out)["charges"]) == (2, 2)


# ---- kill -9 ----------------------------------------------------------------------------------------------


def kill_after(process, path, number):
    """Kill -9 as soon as ``path`` has so many lines."""
    try:
        for _ in range(60_000):
            if path.exists() and path.read_bytes().count(b"\n") >= number:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.002)
                break
        pytest.fail(f"{path} did not reach {number} lines; exit status {process.poll()}")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_kill_9_loses_no_charge_and_no_round(coterie, tmp_path):
    rounds = 16
    words = settings(clients=60, rounds=rounds, epsilon=4, evaluate_every=4, reseed_every=1)
    command = [sys.executable, "-m", "coterie.cli", "run", *words, "--out", "run"]
    folder, ledger = tmp_path / "run", tmp_path / "run" / "ledger.jsonl"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        kill_after(process, folder / "metrics.jsonl", random.Random(20240607).randrange(1, 12))
    before = ledger.read_text()
    before = before[: before.rfind("\n") + 1]  # a torn last line paid for nothing
    assert before
    assert not (folder / "result.json").exists()

    status, out, err = coterie("run", "--resume", "--out", "run", "--json")
    assert status == 0, err
    result = document(out)
    assert [line["round"] for line in lines(folder / "metrics.jsonl")] == list(range(1, rounds + 1))
    assert ledger.read_text().startswith(before)
    charges = lines(ledger)
    assert [line["charge"] for line in charges] == list(range(1, len(charges) + 1))
    assert rounds <= len(charges) <= rounds + 1
    assert {line["round"] for line in charges} == set(range(1, rounds + 1))
    assert (result["rounds"], result["charges"]) == (rounds, len(charges))
    guarantee = document((folder / "privacy.json").read_text())
    assert guarantee["certified"] is True
    assert guarantee["epsilon"] <= guarantee["epsilon_budget"] == 4.0


def own_files(folder, clients=3, side=4):
    """Of the clients of a simulation; the last one has test data of its own."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (clients, 40, side, side), np.uint8), np.arange(40) % 2
    folder.mkdir()
    for client in range(clients - 1):
        np.savez(folder / f"client-{client}.npz", x=x[client], y=y)
    (folder / "client-2").mkdir()
    np.savez(folder / "client-2" / "train.npz", x=x[2][:30], y=y[:30])
    np.savez(folder / "client-2" / "test.npz", x=x[2][30:], y=y[30:])
    own = {"dataset": "own", "input-shape": f"1x{side}x{side}", "num-classes": 2, "groups": 1, "samples-per-client": 0}
    return settings(clients=clients, **{"sampling-rate": 1, "privacy-unit": "none", **own}), ["--data-dir", folder]


def test_clients_of_a_simulation_may_have_files_of_their_own(coterie, tmp_path):
    words, place = own_files(tmp_path / "data")
    status, out, err = coterie("run", *words, *place, "--out", "run", "--json")
    assert status == 0, err
    result = document(out)
    assert (result["dataset"], result["rounds"], result["diagnostics"]["groups"]) == ("own", 2, 1)
    assert 0 <= result["diagnostics"]["accuracy"] <= 1
    assert (tmp_path / "run" / "report.html").exists()


def test_files_of_clients_that_are_not_there_or_broken_are_found_before_the_run(coterie, tmp_path):
    words, place = own_files(tmp_path / "data")
    before = tree(tmp_path)
    assert_refused(coterie("run", *words), "--data-dir DIR")
    assert_refused(coterie("run", *words, *place, "--set", "clients=4"), "no data for client 3 of 4", "clients = 4")
    assert_refused(coterie("run", *words, *place, "--set", "num-classes=1"), "client-0.npz", "a label is 1")
    (tmp_path / "data" / "client-2" / "test.npz").write_text("broken")
    assert_refused(coterie("run", *words, *place), "test.npz is not a numpy archive")
    (tmp_path / "data" / "client-2" / "test.npz").write_bytes(before["data/client-2/test.npz"])
    assert tree(tmp_path) == before


# ---- what there is ----------------------------------------------------------------------------------------


@for_rows(
    ("words", "names", "columns"),
    [
        (["strategies"], STRATEGIES, {"what", "paper", "privacy-unit"}),
        (["datasets"], {*DATASETS, "own"}, {"what", "shape", "classes", "how to get it"}),
        (["models"], {**MODELS, **GANS}, {"what", "source"}),
        (["run", "--keys"], SETTINGS, {"default", "allowed", "help"}),
    ],
)
def test_listings(coterie, tmp_path, words, names, columns):
    status, out, err = coterie(*words, "--json")
    assert (status, err) == (0, "")
    rows = document(out)
    assert set(rows) == set(names)
    assert all(columns <= set(row) for row in rows.values())
    if names is SETTINGS:
        assert {name: row["default"] for name, row in rows.items()} == {n: s.shown_default for n, s in names.items()}
    assert tree(tmp_path) == {}


# ---- usage -------------------------------------------------------------------------------------------------


@for_rows("words", [["frob"], ["run", "--frob"], ["run", "--seed", "x"], ["privacy", "noise", "--frob"]])
def test_wrong_usage_is_an_error_without_a_traceback(coterie, words):
    status, out, err = coterie(*words)
    assert (status, out) == (2, "")
    assert "Usage: coterie" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("name", [None, "state.safetensors"])
def test_a_full_disk_is_an_error_of_one_line(coterie, monkeypatch, number, name):
    def full(*_):
        raise OSError(number, os.strerror(number), name)

    monkeypatch.setattr(sys.modules["coterie.server.run"], "seal", full)
    status, _, err = coterie("run", *settings(rounds=1), "--out", "one")
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert (status, os.strerror(number) in line) == (1, True)
    assert line.endswith("make room; coterie run --resume --out RUN continues a run")
    assert "Traceback" not in err


def test_a_run_that_its_budget_ends_has_a_page(coterie, tmp_path):
    tight = ["clients=20", "rounds=6", "local-epochs=1", "noise-multiplier=1.0", "sampling-rate=1.0", "epsilon=5"]
    status, _, err = coterie("run", *(word for key in tight for word in ("--set", key)), "--seed", "1", "--out", "one")
    assert status == 1
    assert "the budget is exhausted" in err
    assert "Accuracy" in (tmp_path / "one" / "report.html").read_text()


def test_a_run_without_the_report_room_says_so(coterie, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "coterie.report.finished_run", None)
    status, out, err = coterie("run", *settings(rounds=1), "--seed", "1", "--out", "one")
    assert (status, err) == (0, "")
    assert "run folder one/   no report: " in out
    assert (tmp_path / "one" / "result.json").exists()


def test_a_report_lies_in_the_run_folder_wherever_it_is_asked_for(coterie, tmp_path):
    folder = tmp_path / "runs" / "one"
    assert coterie("run", *settings(rounds=1), "--out", folder)[0] == 0
    (folder / "report.html").unlink()
    status, out, _ = coterie("report", folder)
    assert (status, out.splitlines()[-1]) == (0, str(folder / "report.html"))
    assert (folder / "report.html").exists()
    assert not (tmp_path / "report.html").exists()
    assert coterie("report", folder, "--out", "here.html")[1].splitlines()[-1] == "here.html"


@pytest.mark.slow
def test_report_compares_runs(coterie, tmp_path):
    tiny = ["--set", "clients=20", "--set", "rounds=1", "--set", "local-epochs=1", "--seed", "1", "--json"]
    for name in ("one", "other"):
        assert coterie("run", *tiny, "--out", name)[0] == 0
    status, out, _ = coterie("report", "one", "other", "--out", "both.html")
    assert status == 0
    assert "note: other: seed 1 as in one" in out
    assert "* exact, from clients' data without noise: outside the guarantee" in out
    assert out.endswith("both.html\n")
    assert "2 runs compared" in (tmp_path / "both.html").read_text()
    status, out, err = coterie("report", "one", "other", "--json")
    assert (status, document(out)["report"]) == (0, "report.html")
    assert [row["repetitions"] for row in document(out)["rows"]] == [2]
    assert "report.html" in err
    assert_refused(coterie("report", "one", "other", "--csv", "-"), "--csv was removed: --json prints")
    status, out, _ = coterie("report", "one")
    assert status == 0
    assert "Accuracy" in out
    assert out.strip().endswith("one/report.html")
    assert_refused(coterie("report", "nowhere"), "nowhere")
    (tmp_path / "other" / "result.json").write_text("{")
    status, out, err = coterie("report", "one", "other", "--json")
    assert (status, len(document(out)["rows"])) == (1, 1)
    assert "left out: other: other/result.json is not valid JSON" in err
    (left_out,) = document(out)["left_out"]
    assert left_out["run"] == "other"
    (tmp_path / "other" / "result.json").unlink()
    (tmp_path / "other" / "ledger.jsonl").unlink()
    status, out, err = coterie("report", "one", "other")
    assert status == 1
    assert "left out: other: other/ledger.jsonl" in out


RECORDS = {"strategy": "rc-dpfl", "clients": 12, "groups": "2", "clusters": 2, "samples-per-client": 30, "rounds": 4}
RECORDS |= {"batch-size": 10, "local-epochs": 1, "epsilon": 20, "delta": 1e-3, "evaluate-every": 2, "clip-norm": 1.0}
RECORDS |= {"first-round-noise-ratio": 1}


def said(values):
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def test_a_run_at_record_level(coterie, tmp_path):
    status, out, err = coterie("run", *said(RECORDS), "--out", "one", "--json")
    assert status == 0, err
    result = document(out)
    assert result["certified"] is True
    assert 0 < result["epsilon"] <= 20
    assert result["notes"]["clusters"] == 2
    assert result["notes"]["switch_round"] in (1, 2)
    assert result["diagnostics"]["accuracy"] is not None
    assert not [key for key in result["diagnostics"] if key.startswith("client_")]  # exact numbers of single clients
    ledgers = sorted((tmp_path / "one" / "clients").glob("*.jsonl"))
    assert len(ledgers) == 12
    for ledger in ledgers:  # as much as the run says, each by its own count
        status, out, _ = coterie("budget", "show", ledger, "--json")
        assert {charge["round"] for charge in lines(ledger)} == {1, 2, 3, 4}
        assert document(out)["epsilon"] <= result["epsilon"] + 1e-9
    assert coterie("privacy", "check", "one")[0] == 0
    for file in (tmp_path / "one").glob("*.json*"):
        assert '"client_' not in file.read_text(), file


def test_a_run_at_record_level_resumes_with_what_it_found(coterie, tmp_path):
    whole = coterie("run", *said({**RECORDS, "seed": 3}), "--out", "whole", "--json")
    short = coterie("run", *said({**RECORDS, "seed": 3, "stop-after": 2}), "--out", "cut", "--json")
    assert whole[0] == short[0] == 0
    assert document(short[1])["rounds"] == 2
    assert len(document(whole[1])["diagnostics"]["client_accuracy"]) == 12  # a seeded run is a simulation
    from coterie.server import RunFolder

    folder = RunFolder.resume(tmp_path / "cut", {})
    assert folder.resumed.state["pi"].shape == (12, 2)
    assert folder.resumed.state["switch"][0] == document(whole[1])["notes"]["switch_round"]
    folder.close()


def modes(path):
    """Permissions of a folder and everything below, in octal."""
    return {str(p.relative_to(path)): f"{p.stat().st_mode & 0o777:o}" for p in [path, *path.rglob("*")]}


@for_rows("umask", [0o000, 0o077])
def test_a_run_folder_is_for_its_user_alone_unless_its_owner_shares_it(coterie, tmp_path, umask):
    out = tmp_path / f"made-{umask}" / "run"
    before = os.umask(umask)
    try:
        more = settings(strategy="fedper", clusters=1, evaluate="diagnostic", model="mlp-32", rounds=1)
        assert coterie("run", *more, "--out", out)[0] == 0
    finally:
        os.umask(before)
    found = modes(out)
    assert {"ledger.jsonl", "checkpoint/state.safetensors", "diagnostics.jsonl", "report.html"} < set(found)
    assert any(name.startswith("clients/") for name in found)
    assert found == {name: "700" if (out / name).is_dir() else "600" for name in found}
    subprocess.run(["chmod", "-R", "g+rX", out], check=True)
    shared = modes(out)
    assert set(shared.values()) == {"750", "640"}
    assert coterie("report", out, "--out", out / "report.html")[0] == 0
    assert modes(out) == shared
