"""The systemd units: systemd accepts them, and what they start makes a deployment that trains."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from kit.documented import ROOT
from kit.servers import free_port, open_port, running, until

from coterie.deploy.bundles import seal, unseal
from coterie.deploy.certificates import create
from coterie.deploy.commands.server import CONNECTION, READY

BIN = Path(sys.executable).parent
UNITS = sorted((ROOT / "docker").rglob("*.service"))


def parsed(path):
    """A unit, with the values of keys that occur several times joined by a space."""
    unit = {}
    section = ""
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            unit[key] = f"{unit[key]} {value}" if key in unit else value
            assert section
    return unit


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_restarts_and_closes_what_it_does_not_need(path):
    unit = parsed(path)
    assert unit["ExecStart"].startswith("/opt/coterie/bin/")
    assert (unit["Restart"], unit["User"], unit["UMask"], unit["StateDirectoryMode"]) == (
        "always",
        "coterie",
        "0077",
        "0700",
    )
    assert (unit["ProtectSystem"], unit["NoNewPrivileges"], unit["CapabilityBoundingSet"]) == ("strict", "yes", "")
    assert unit["StartLimitIntervalSec"] == "0"
    assert unit["WantedBy"] == "multi-user.target"
    state = {f"%S/{folder}" for folder in unit["StateDirectory"].split()}
    for word in f"{unit['ExecStart']} {unit.get('Environment', '')}".replace("=", " ").split():
        assert not word.startswith("%S") or any(word.startswith(folder) for folder in state), word


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_units(tmp_path):
    for path in UNITS:
        text = path.read_text().replace("/opt/coterie/bin/", f"{BIN}/")
        (tmp_path / path.name.replace("@", "@3")).write_text(text)
        if "@" in path.name:
            (tmp_path / path.name).write_text(text)  # its instances are wanted by name
    names = sorted(str(path) for path in tmp_path.iterdir() if "@." not in path.name)
    done = subprocess.run(["systemd-analyze", "verify", *names], capture_output=True, text=True, timeout=60)
    told = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "coterie" in line]
    assert (done.returncode, told) == (0, []), done.stderr


def test_the_journal_has_a_limit():
    journal = configparser.ConfigParser()
    journal.optionxform = str
    journal.read(ROOT / "docker" / "journald.conf")
    assert dict(journal["Journal"]) == {"SystemMaxUse": "1G", "SystemMaxFileSize": "50M", "MaxRetentionSec": "90day"}


class Machine:
    """Starts units, with other paths, ports and variables."""

    def __init__(self, folder, stack, replaced):
        self.folder, self._stack, self._replaced = folder, stack, replaced

    def _changed(self, text, more):
        for old, new in {**more, **self._replaced}.items():
            text = text.replace(old, str(new))
        return text

    def start(self, name, instance="", **variables):
        unit = parsed(next(path for path in UNITS if path.stem == name))
        more = {"%i": instance, **{f"${{{key}}}": value for key, value in variables.items()}}
        own = dict(word.split("=", 1) for word in self._changed(unit.get("Environment", ""), more).split())
        own["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        words = self._changed(unit["ExecStart"], {**more, "$ARGS": variables.get("ARGS", "")}).split()
        for state in unit["StateDirectory"].split():
            (self.folder / self._changed(state, more)).mkdir(parents=True, exist_ok=True, mode=0o700)
        log = self.folder / f"{name}{instance}.log"
        return self._stack.enter_context(running(words, log, cwd=self.folder, **own)), log


@pytest.mark.slow
def test_the_units_are_a_deployment(tmp_path, monkeypatch):
    folder, bundle = tmp_path / "coterie" / "server", tmp_path / "node-0.coterie"
    control, fleet, runtime = free_port(), free_port(), free_port()
    pki = create(folder / "pki", 1, ["localhost"]).folder
    content, passphrase = seal(pki, 0, f"localhost:{fleet}")
    bundle.write_bytes(content)
    unseal(bundle, passphrase, tmp_path / "coterie" / "client-0")
    data, home = tmp_path / "data", folder / "flwr"
    data.mkdir()
    rng = np.random.default_rng(0)
    np.savez(data / "train.npz", x=rng.integers(0, 256, (40, 1, 4, 4), np.uint8), y=np.arange(40) % 2)
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.delenv("COTERIE_RUNS")
    with ExitStack() as stack:
        machine = Machine(tmp_path, stack, {"/opt/coterie/bin": BIN, "%S": tmp_path})
        server, server_log = machine.start("coterie-server", ARGS=f"--port={fleet} --control-port={control}")
        until(lambda: READY in server_log.read_text(), server, server_log)
        args = f"--isolation=process --port={runtime} --input-shape=1x4x4 --num-classes=2 --guarantee=trusted-server"
        client, log = machine.start("coterie-client@", "0", BUNDLE=bundle, DATA=data, ARGS=args)
        until(lambda: open_port(runtime), client, log)
        machine.start("coterie-superexec@", "0", PORT=runtime)
        settings = {"strategy": "fedavg", "rounds": 1, "data.dataset": "own", "data.clients": 1}
        settings |= {"data.input-shape": "1x4x4", "data.num-classes": 2, "privacy.privacy-unit": "none"}
        settings |= {"deployment.min-clients": 1, "evaluation.evaluate": "off", "aggregation.sampling-rate": 1.0}
        config = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        submit = [BIN / "flwr", "run", ROOT, CONNECTION, "--stream", "--run-config", config]
        done = subprocess.run(
            submit, capture_output=True, text=True, timeout=200, env=os.environ | {"FLWR_HOME": str(home)}
        )
        assert "results are in" in done.stdout, done.stdout + server_log.read_text() + log.read_text()
        assert server.poll() is None
    (run,) = (folder / "runs").glob("*/")
    assert tomllib.loads((run / "config.toml").read_text())["config"]["rounds"] == 1
