"""The operator of a deployment sets the roster of all runs."""

import pytest
from flwr.app import Context, RecordDict
from test_resume_deployed import SETTINGS, Deployed, clients  # noqa: F401

from coterie.deploy.certificates import create, sign_roster
from coterie.fields.settings import ConfigError
from coterie.server import app as server_app
from coterie.server.run import RunError


def test_a_deployed_run_uses_the_roster_of_its_operator(clients, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COTERIE_ROSTER", "operator/roster.json")
    context = Context(17, 0, {}, RecordDict(), run_config=SETTINGS)
    with pytest.raises(ConfigError, match=r"COTERIE_ROSTER: operator/ca.crt cannot be read"):
        server_app.app(Deployed(clients), context)


def test_a_deployed_run_refuses_an_older_roster_than_an_earlier_run_has_used(clients, tmp_path, monkeypatch):  # noqa: F811
    pki = create(tmp_path / "pki", 1, ["superlink"]).folder
    old = (pki / "roster.json").read_bytes()
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COTERIE_ROSTER", str(pki / "roster.json"))

    def run():
        context = Context(17, 0, {}, RecordDict(), run_config={**SETTINGS, "registration-timeout": 0.0})
        with pytest.raises((ConfigError, RunError)) as error:
            server_app.app(Deployed(clients), context)
        return str(error.value)

    sign_roster(pki)
    assert "no client is registered" in run()
    (pki / "roster.json").write_bytes(old)
    assert "roster.json is an older roster, 1; this machine has used number 2" in run()


def test_masked_rounds_need_a_roster(clients, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COTERIE_ROSTER", "")
    masked = {"privacy-unit": "client", "mechanism": "secure", "clients": 12, "delta": 1e-3, "epsilon": 50.0}
    masked |= {"samples-per-client": 0}
    context = Context(17, 0, {}, RecordDict(), run_config={**SETTINGS, **masked})
    with pytest.raises(ConfigError, match=r"requires a roster.*set COTERIE_ROSTER"):
        server_app.app(Deployed(clients), context)
    assert not list((tmp_path / "runs").glob("*/"))
