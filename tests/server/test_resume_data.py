"""A resumed run has the data with which it began, wherever it is resumed; otherwise nothing is charged or changed."""

import gc
import json
import logging
import stat

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from kit.commands import tree
from kit.ray_nodes import ON_RAY
from kit.run_folders import run_in
from kit.tables import for_rows
from kit.toy_grids import Simulated

from coterie.datasets import DataError, own_federation
from coterie.engine.in_process import LocalGrid
from coterie.server import FolderError, RunError
from coterie.server.app import app, open_folder
from coterie.server.simulate import prepare, simulate

SETTINGS = {"strategy": "fedavg", "dataset": "own", "data-dir": "sites", "input-shape": "4", "num-classes": 2}
SETTINGS |= {"clients": 3, "clusters": 1, "model": "linear", "rounds": 4, "sampling-rate": 1, "local-epochs": 1}
SETTINGS |= {"out": "run"}


def site(path, seed):
    rng = np.random.default_rng(seed)
    np.savez(path, x=rng.normal(0, 1, (20, 4)).astype(np.float32), y=rng.integers(0, 2, 20))


def session(settings, rounds=None):
    """Open the folder as the command does, and run until ``rounds`` rounds are done."""

    def observe(record):
        if record.round == rounds:
            raise KeyboardInterrupt

    folder = open_folder(settings, ".", check=prepare)
    folder.on_metrics = observe
    return run_in(folder)


def resumed(path, **settings):
    return session({"resume": True, "out": str(path), **settings})


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the sites and a run of four rounds that was interrupted after two."""
    home = tmp_path / "home"
    (home / "sites").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for client in range(3):
        site(home / f"sites/client-{client}.npz", client)
    monkeypatch.chdir(home)
    with pytest.raises(KeyboardInterrupt):
        session(SETTINGS, rounds=2)
    return home


def test_a_relative_folder_is_named_again_from_another_directory(home, tmp_path, monkeypatch):
    before = tree(home / "run")
    (tmp_path / "elsewhere/sites").mkdir()  # another folder of the same name is not taken
    for client in range(3):
        site(tmp_path / f"elsewhere/sites/client-{client}.npz", 10 + client)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match=f"--data-dir {home}/sites") as caught:
        resumed(home / "run")
    assert "nothing was charged" in str(caught.value)
    assert tree(home / "run") == before
    assert resumed(home / "run", **{"data-dir": str(home / "sites")})["charges"] == 4
    assert 'data-dir = "sites"' in (home / "run/config.toml").read_text()


@pytest.mark.parametrize("named", ["data-dir", "COTERIE_DATA"])
def test_an_absolute_folder_holds_in_every_directory(home, tmp_path, monkeypatch, named):
    monkeypatch.setenv("COTERIE_DATA", str(home / "sites"))
    folder = {"data-dir": str(home / "sites") if named == "data-dir" else "auto"}
    with pytest.raises(KeyboardInterrupt):
        session({**SETTINGS, **folder, "out": "other"}, rounds=1)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resumed(home / "other")["charges"] == 4


def test_the_directory_may_have_another_name(home, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(home)
    monkeypatch.chdir(tmp_path / "link")
    assert resumed(home / "run")["charges"] == 4


CHANGES = {
    "flipped labels": (lambda sites: site(sites / "client-1.npz", 7), r"client-1\.npz changed"),
    "a lost site": (lambda sites: (sites / "client-2.npz").unlink(), "client[ -]2"),
    "an unreadable site": (lambda sites: (sites / "client-0.npz").write_bytes(b"PK"), r"client-0\.npz"),
    "another format": (lambda sites: (sites / "client-0.npz").rename(sites / "client-0.csv"), r"client-0\.csv"),
    "a moved folder": (lambda sites: sites.rename(sites.with_name("moved")), "client[ -]0"),
}


@pytest.mark.parametrize(("change", "named"), CHANGES.values(), ids=CHANGES)
def test_changed_data_are_refused_before_anything_changes(home, change, named):
    change(home / "sites")
    own_federation.cache_clear()  # of the first session, which was another process
    before = tree(home / "run")
    with pytest.raises(FolderError, match=named) as caught:
        resumed(home / "run")
    assert "--data-dir" in str(caught.value)
    assert "nothing was charged" in str(caught.value)
    assert tree(home / "run") == before


def test_a_moved_folder_is_named(home, tmp_path, monkeypatch):
    (home / "sites").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        session({"resume": True, "out": str(home / "run"), "data-dir": "moved"}, rounds=3)
    monkeypatch.chdir(tmp_path)
    assert resumed(home / "run")["charges"] == 4  # the new folder holds from now on


def test_a_named_folder_with_other_data_is_refused(home, tmp_path):
    (tmp_path / "others").mkdir()
    for client in range(3):
        site(tmp_path / f"others/client-{client}.npz", 10 + client)
    with pytest.raises(FolderError, match="not those with which the run began"):
        resumed(home / "run", **{"data-dir": str(tmp_path / "others")})
    assert resumed(home / "run")["charges"] == 4


def test_a_run_of_an_earlier_version_gets_its_fingerprints_on_resume(home):
    (home / "run/local.json").unlink()
    assert resumed(home / "run")["charges"] == 4
    assert len(json.loads((home / "run/local.json").read_text())["fingerprints"]) == 3


def test_fingerprints_stay_on_this_machine(home):
    resumed(home / "run")
    path = home / "run/local.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    digests = json.loads(path.read_text())["fingerprints"].values()
    for name, content in tree(home / "run").items():
        text = b"" if content is None or name == "local.json" else content
        assert not any(digest.encode() in text for digest in digests), name
        assert str(home).encode() not in text or name == "result.json", name


@for_rows("content", ["", "[]", "{"])
def test_a_damaged_file_is_named(home, content):
    (home / "run/local.json").write_text(content)
    with pytest.raises(FolderError, match=r"local\.json"):
        resumed(home / "run")


def flwr_run(folder):
    values = {**SETTINGS, "out": str(folder.path), "resume": True}
    folder.close()
    app(Simulated(3), Context(run_id=77, node_id=0, node_config={}, state=RecordDict(), run_config=values))


def on_ray(folder):
    try:
        simulate(folder, "ray")
    finally:
        gc.collect()  # Ray leaves files open


ENGINES = [simulate, flwr_run, pytest.param(on_ray, marks=ON_RAY)]


@pytest.mark.parametrize("run_with", ENGINES, ids=["in process", "flwr run", "ray"])
def test_data_that_vanish_during_a_run_end_it_before_the_next_charge(home, run_with, monkeypatch):
    def remove(record):
        if record.round == 2:
            (home / "sites").rename(home / "gone")

    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", logger.handlers[:])
    monkeypatch.setattr("coterie.server.app.run_log.round_line", lambda record, rounds: (remove(record) or "", {}))
    folder = open_folder({**SETTINGS, "out": "other"}, home, check=prepare)
    folder.on_metrics = remove
    with pytest.raises(DataError, match="sites, are missing; nothing was charged"):
        run_with(folder)
    folder.close()
    assert len((home / "other/ledger.jsonl").read_text().splitlines()) == 1 + 2
    (home / "gone").rename(home / "sites")
    assert resumed(home / "other")["charges"] == 4


@pytest.mark.parametrize("unit", ["client", "none"])
def test_without_a_registered_client_no_round_is_charged(home, unit):
    class Nobody(LocalGrid):
        def get_node_ids(self):
            return []

    settings = {**SETTINGS, "privacy-unit": unit, "out": "other", "registration-timeout": 0}
    folder = open_folder(settings, home, check=prepare)
    with pytest.raises(RunError, match="no client is registered after 0 s; nothing was charged"):
        run_in(folder, Nobody(3))
    assert len((home / "other/ledger.jsonl").read_text().splitlines()) == 1
    assert resumed(home / "other")["charges"] == 4
