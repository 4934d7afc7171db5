"""Signed requests for runs: who signs them, what they allow, and how long."""

import base64
import json
import os
import tomllib

import pytest
from kit.apps import app_folder
from kit.commands import assert_refused, document
from kit.tables import for_rows

from coterie.deploy.certificates import add_submitter, remove_submitter
from coterie.fields.settings import ConfigError
from coterie.server.config import RunConfig
from coterie.server.run_requests import submission_of, terms_of
from coterie.site.errors import DeployError
from coterie.site.roster import Roster, read_authorities
from coterie.site.run_request import RunRequest
from coterie.site.signatures import read_private_key, sign
from coterie.strategies.registry import STRATEGIES

APP = "ab" * 32
TERMS = {"app": APP, "strategy": "fedavg", "rounds": 20, "releases": ("updates",)}
TERMS |= {"privacy_unit": "record", "epsilon": 2.0, "delta": 1e-4}
ASKED = {"app": APP, "strategy": "fedavg", "rounds": 20, "releases": ["updates"], "privacy": ("record", 2.0, 1e-4)}
RECORD = {"strategy": "fedavg", "rounds": 3, "privacy.privacy-unit": "record"}
RECORD |= {"data.samples-per-client": 100, "training.model": "linear"}


@pytest.fixture
def pki(pki_of_submitters):
    return pki_of_submitters


def key(pki, name="alice"):
    return read_private_key(pki / "submitters" / f"{name}.key")


def signed(pki, name="alice", days=7, **changes):
    return RunRequest.signed(key(pki, name), {**TERMS, **changes}, days=days)


def roster(pki):
    return Roster.read(pki / "roster.json", read_authorities(pki / "ca.crt"))


def test_a_request_names_its_submitter_and_its_terms(pki):
    text = signed(pki)
    assert len(text) < 2000
    request = RunRequest.read(text)
    assert {name: getattr(request, name) for name in TERMS} == TERMS
    assert request.submitter(roster(pki)).name == "alice"
    assert RunRequest.read(signed(pki, "bob")).submitter(roster(pki)).name == "bob"
    assert RunRequest.read(signed(pki)).id != request.id
    assert request.refuses(**ASKED) == ""


def altered(text, **changes):
    content = json.loads(base64.b64decode(text)) | changes
    return base64.b64encode(json.dumps(content).encode()).decode()


@for_rows(
    "changes",
    [
        {"epsilon": 20.0},
        {"rounds": 21},
        {"strategy": "lcfl"},
        {"releases": ["updates", "scores"]},
        {"app": "cd" * 32},
        {"expires": "2999-01-01T00:00:00+00:00"},
        {"begins": "2000-01-01T00:00:00+00:00"},
        {"id": "0" * 32},
        {"privacy-unit": "client"},
        {"signature": ""},
        {"signature": 1},
        {"more": 1},
    ],
)
def test_a_changed_request_is_none(pki, changes):
    with pytest.raises(DeployError, match="was changed after it was signed"):
        RunRequest.read(altered(signed(pki), **changes))


def test_another_key_cannot_be_put_in_and_a_node_signs_none(pki):
    bobs = RunRequest.read(signed(pki, "bob")).key
    with pytest.raises(DeployError, match="was changed"):
        RunRequest.read(altered(signed(pki), key=bobs))
    node = RunRequest.signed(read_private_key(pki / "nodes" / "node-0.key"), TERMS, days=1)
    with pytest.raises(DeployError, match="is that of a client in the roster, node-0, not of a submitter"):
        RunRequest.read(node).submitter(roster(pki))


def test_a_signature_for_another_purpose_is_none(pki):
    content = json.loads(base64.b64decode(signed(pki)))
    content.pop("signature")
    other = sign(key(pki), "coterie roster", content)
    with pytest.raises(DeployError, match="was changed"):
        RunRequest.read(altered(signed(pki), **content, signature=other))


@for_rows("text", ["", "é", "AAAA", "e30=", "W10=", "x" * 100_000, '{"id": 1}'])
def test_what_is_no_request(text):
    with pytest.raises(DeployError):
        RunRequest.read(text)


def test_who_left_or_got_a_new_key_signs_no_more(pki):
    request = RunRequest.read(signed(pki))
    remove_submitter(pki, "bob")
    assert request.submitter(roster(pki)).name == "alice"
    add_submitter(pki, "alice")
    with pytest.raises(DeployError, match="its key is not in the roster"):
        request.submitter(roster(pki))
    request = RunRequest.read(signed(pki))
    remove_submitter(pki, "alice")
    with pytest.raises(DeployError, match="its key is not in the roster"):
        request.submitter(roster(pki))


def test_a_request_is_valid_for_its_days(pki, clock):
    request = RunRequest.read(signed(pki, days=2))
    for later, reason in (
        ({"days": 1, "hours": 23}, ""),
        ({"days": 2, "minutes": 1}, "it expired at .* sign a new one"),
        ({"minutes": -4}, ""),  # two clocks differ
        ({"minutes": -6}, "this machine's clock shows .* correct the clock"),
    ):
        with clock(module="coterie.site.run_request", **later):
            if not reason:
                assert request.submitter(roster(pki)).name == "alice"
                continue
            with pytest.raises(DeployError, match=reason):
                request.submitter(roster(pki))


@for_rows(
    ("asked", "reason"),
    [
        ({"app": "cd" * 32}, "it is for the app abab"),
        ({"app": ""}, "an unknown app runs"),
        ({"strategy": "ifca"}, "it is for strategy fedavg, not ifca"),
        ({"strategy": None}, "not None"),
        ({"rounds": 21}, "it is for 20 rounds, not 21"),
        ({"releases": ["updates", "losses"]}, "release of losses"),
        ({"privacy": None}, "it is for record-level privacy, and the run has none"),
        ({"privacy": ("client", 2.0, 1e-4)}, "it is for privacy-unit record, not client"),
        ({"privacy": ("record", 2.1, 1e-4)}, "it is for epsilon 2, not 2.1"),
        ({"privacy": ("record", 2.0, 1e-3)}, "it is for delta 0.0001, not 0.001"),
        ({"privacy": ("record", float("inf"), 1e-4)}, "not inf"),
        ({"privacy": ("record", 1.0, 1e-5), "rounds": 1, "app": None}, ""),
        ({"releases": [], "privacy": None}, ""),
    ],
)
def test_a_run_is_within_the_terms(pki, asked, reason):
    refusal = RunRequest.read(signed(pki)).refuses(**{**ASKED, **asked})
    assert (reason in refusal, bool(refusal)) == (True, bool(reason))


@for_rows("release", ["updates", "losses", "samples"])
def test_what_a_record_level_plan_pays_for_needs_a_plan(pki, release):
    request = RunRequest.read(signed(pki, releases=(release,)))
    assert "record-level privacy, and the run has none" in request.refuses(
        **{**ASKED, "releases": [release], "privacy": None}
    )


@for_rows(
    "changes",
    [{"epsilon": None}, {"delta": 1.0}, {"rounds": 0}, {"releases": ("models",)}, {"app": "AB" * 32}, {"epsilon": 0.0}],
)
def test_terms_that_nobody_can_sign(pki, changes):
    with pytest.raises(DeployError):
        signed(pki, **changes)


# ---- of a run ----------------------------------------------------------------------------------------------


def config(**settings):
    return RunConfig({**RECORD, **settings}, deployed=True)


def test_terms_follow_from_the_settings():
    assert terms_of(config()) == {
        "strategy": "fedavg",
        "privacy_unit": "record",
        "epsilon": 8.0,
        "delta": 1e-4,
        "rounds": 3,
        "releases": ("updates",),
    }
    profiles = terms_of(config(profiles="epsilon=2; epsilon=9 delta=1e-6; epsilon=1"))
    assert (profiles["epsilon"], profiles["delta"]) == (9.0, 1e-4)
    assert terms_of(config(strategy="lcfl", evaluate="diagnostic"))["releases"] == ("losses", "updates", "scores")
    plain = terms_of(RunConfig({"strategy": "kfed"}, deployed=True))
    assert (plain["epsilon"], plain["delta"], plain["releases"]) == (None, None, ("centroids", "counts"))
    masked = {"mechanism": "secure"}
    assert terms_of(RunConfig(masked, deployed=True))["releases"] == ("masked updates", "masked scores")
    off = RunConfig({**masked, "evaluate": "off"}, deployed=True)
    assert terms_of(off)["releases"] == ("masked updates",)


def test_every_method_states_what_it_releases():
    others = {name for name, method in STRATEGIES.items() if method.releases != ("updates",)}
    assert others == {"lcfl", "ppfc-gan", "kfed", "ffcm"}


def test_the_server_refuses_first(pki, monkeypatch):
    monkeypatch.delenv("COTERIE_ROSTER", raising=False)
    terms = terms_of(config()) | {"app": APP}
    text = RunRequest.signed(key(pki), terms, days=1)
    assert submission_of(config()).submitter is None
    unknown = submission_of(config(**{"signed-request": text}))
    assert (unknown.submitter, unknown.request) == (None, RunRequest.read(text).id)
    monkeypatch.setenv("COTERIE_ROSTER", str(pki / "roster.json"))
    assert submission_of(config(**{"signed-request": text})).submitter == "alice"
    for settings, reason in (
        ({"rounds": 4}, "it is for 3 rounds, not 4"),
        ({"privacy.epsilon": 9.0}, "it is for epsilon 8, not 9"),
        ({"evaluation.evaluate": "diagnostic"}, "it does not include the release of scores"),
        ({"privacy.privacy-unit": "none"}, "it is for privacy-unit record, not none"),
    ):
        with pytest.raises(ConfigError, match=f"signed-request: {reason}: sign the settings"):
            submission_of(config(**{"signed-request": text}, **settings))
    with pytest.raises(ConfigError, match="signed-request: it is not a request that coterie sign has made"):
        submission_of(config(**{"signed-request": "x"}))
    remove_submitter(pki, "alice")
    with pytest.raises(ConfigError, match="signed-request: its key is not in the roster"):
        submission_of(config(**{"signed-request": text}))


def test_the_command_signs_a_file_of_settings(pki, coterie, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('# mine\nstrategy = "fedavg"\nrounds = 3\n[privacy]\nprivacy-unit = "none"\n')
    words = ["sign", run, "--key", pki / "submitters" / "alice.key", "--app", app_folder(tmp_path / "app")]
    status, out, err = coterie(*words, "--json")
    assert (status, err) == (0, "")
    written = document(out)
    assert written["file"] == str(tmp_path / "run.signed.toml")
    text = (tmp_path / "run.signed.toml").read_text()
    assert text.endswith(run.read_text())
    settings = tomllib.loads(text)
    request = RunRequest.read(settings["signed-request"])
    terms = request.strategy, request.rounds, request.privacy_unit, request.app
    assert terms == ("fedavg", 3, "none", written["app"])
    assert submission_of(RunConfig(settings, deployed=True)).request == request.id
    assert_refused(coterie("sign", tmp_path / "run.signed.toml", *words[2:]), "is signed already")
    os.chmod(pki / "submitters" / "alice.key", 0o644)
    assert_refused(coterie(*words), "--key", "gives other users access")
    assert_refused(coterie(*words[:3], pki / "nodes" / "node-0.tls.key", *words[4:]), "not an ECDSA P-384 private key")
