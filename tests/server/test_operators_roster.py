"""The operator of a deployment sets the roster of all runs; a run may name another."""

import pytest
from flwr.app import Context, RecordDict
from test_resume_deployed import SETTINGS, Deployed, clients  # noqa: F401

from coterie.deploy.certificates import create, sign_roster
from coterie.fields.settings import ConfigError
from coterie.server import app as server_app
from coterie.server.run import RunError


@pytest.mark.parametrize(
    ("settings", "named"),
    [({}, "operator"), ({"deployment.roster": "auto"}, "operator"), ({"deployment.roster": "run/roster.json"}, "run")],
)
def test_a_deployed_run_uses_the_roster_of_its_operator(clients, tmp_path, monkeypatch, settings, named):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COTERIE_ROSTER", "operator/roster.json")
    context = Context(17, 0, {}, RecordDict(), run_config={**SETTINGS, **settings})
    with pytest.raises(ConfigError, match=f"roster: {named}/ca.crt cannot be read"):
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


def test_a_roster_that_is_not_set_is_none(monkeypatch):
    monkeypatch.delenv("COTERIE_ROSTER", raising=False)
    assert server_app._with_roster({"rounds": 2}) == {"deployment.roster": "auto", "rounds": 2}
