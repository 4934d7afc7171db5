"""Runs that release a histogram of scores: what is charged, stated, refused and continued."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from kit.run_folders import execute, run_in
from kit.tables import for_rows

from coterie.client.handlers import HANDLERS
from coterie.client.identity import Client
from coterie.engine.in_process import LocalGrid
from coterie.fields.settings import ConfigError
from coterie.privacy import LedgerError, read_ledger
from coterie.privacy.check import check, verified
from coterie.privacy.score_histograms import BINS, CELLS, ScoreHistogram, deviation_of_counts
from coterie.rounds.score_estimates import estimate
from coterie.server import RunConfig, RunFolder, planning
from coterie.server.run_requests import terms_of
from coterie.site.policy import Policy
from coterie.wire.messages import DIAGNOSTICS, EVALUATE, SCORE_COUNTS

SETTINGS = {"strategy": "fedavg", "dataset": "breast-cancer", "clients": 20, "shift": "none", "groups": "1"}
SETTINGS |= {"rounds": 3, "model": "linear", "evaluate": "private", "evaluate-every": 2, "evaluate-noise": 0.3}
SETTINGS |= {"epsilon": 20}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("scores") / "run"
    return path, execute(path, SETTINGS)


def test_one_histogram_is_charged_with_the_last_evaluation(finished):
    path, outcome = finished
    header, charges = read_ledger(path / "ledger.jsonl")
    kinds = [(charge["round"], charge["for"]) for charge in charges]
    assert kinds == [
        (1, "training"), (2, "training"), (2, "evaluation"), (3, "training"), (3, "evaluation"), (3, "histogram"),
    ]  # fmt: skip
    assert 18.9 < charges[-2]["epsilon"] <= 0.951 * 20
    assert 19.9 < charges[-1]["epsilon"] <= 20
    stated = json.loads((path / "privacy.json").read_text())
    assert "a noisy histogram of scores by label, and what follows from it" in stated["covers"]
    assert stated["certified"]
    assert stated["public_inputs"]["histogram_noise"] == charges[-1]["noise_multiplier"]
    assert check(header, charges, stated) == []
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [len(line.get("score_histogram", ())) for line in lines] == [0, 0, CELLS]
    assert outcome["estimates"] is None or 0 <= outcome["estimates"]["roc_auc"] <= 1


def test_a_histogram_without_its_charge_is_noticed(finished, tmp_path):
    path, _ = finished
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("ledger.jsonl", "metrics.jsonl", "privacy.json", "config.toml"):
        (copy / name).write_bytes((path / name).read_bytes())
    verified(copy)
    ledger = (copy / "ledger.jsonl").read_text().splitlines(keepends=True)
    (copy / "ledger.jsonl").write_text("".join(ledger[:-1]))
    with pytest.raises(LedgerError, match="private score histogram of round 3"):
        verified(copy)


def test_further_rounds_end_with_a_further_histogram(tmp_path):
    path = tmp_path / "run"
    settings = {**SETTINGS, "rounds": 2, "noise-multiplier": 6.0, "score-share": 0.05}
    execute(path, settings)
    execute(path, rounds=4)
    header, charges = read_ledger(path / "ledger.jsonl")
    assert [charge["round"] for charge in charges if charge["for"] == "histogram"] == [2, 4]
    stated = json.loads((path / "privacy.json").read_text())
    assert check(header, charges, stated) == []
    assert stated["epsilon"] == pytest.approx(charges[-1]["epsilon"])


@for_rows(
    ("changes", "named"),
    [
        (
            {"dataset": "own", "input-shape": "4", "num-classes": 11, "data-dir": "."},
            r"score-share = 0\.05: the task is to predict 11 classes, not two to 10 classes; set score-share to 0 or",
        ),
        ({"dataset": "diabetes"}, "the task is to predict real targets"),
        ({"evaluate": "diagnostic"}, "releases none; set it to private"),
        ({"evaluate": "off"}, "releases none; set it to private"),
        ({"score-share": 0.6}, "at most 0.5"),
        ({"score-share": 1.5}, "at most 1"),
        ({"score-share": -0.1}, "at least 0"),
    ],
)
def test_where_none_can_be_released_the_setting_is_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        RunConfig({**SETTINGS, "score-share": 0.05, **changes})


@for_rows(
    ("changes", "share"),
    [
        ({}, 0.05),
        ({"dataset": "digits"}, 0.0),
        ({"dataset": "diabetes"}, 0.0),
        ({"evaluate": "off"}, 0.0),
        ({"noise-multiplier": 2.0}, 0.0),
        ({"score-share": 0.02}, 0.02),
        ({"score-share": 0}, 0.0),
    ],
)
def test_the_share_is_automatic_with_two_classes(changes, share):
    settings = {
        name: value for name, value in SETTINGS.items() if name != "evaluate-noise" or "evaluate" not in changes
    }
    config = RunConfig({**settings, **changes})
    assert planning.score_share(config) == share
    assert config.plan.histograms == (share > 0)
    assert ("histograms" in terms_of(config)["releases"]) == (share > 0)


RECORD = {"strategy": "fedavg", "dataset": "own", "input-shape": "3", "num-classes": 2, "clients": 6}
RECORD |= {"privacy-unit": "record", "samples-per-client": 40, "batch-size": 20, "rounds": 2, "model": "linear"}
RECORD |= {"evaluate": "private", "score-share": 0.5, "epsilon": 8, "delta": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    for client in range(6):
        y = rng.integers(2, size=60)
        np.savez(path / f"client-{client}.npz", x=(rng.normal(size=(60, 3)) + y[:, None]).astype(np.float32), y=y)
    return str(path)


@pytest.mark.parametrize("strategy", ["fedavg", "rc-dpfl"])
def test_at_record_level_clients_add_the_noise_and_charge(tmp_path, folder, strategy):
    path = tmp_path / "run"
    clusters = {"clusters": 2, "selection": "gumbel", "loss-bound": 4.0, "first-round-noise-ratio": 1}
    clusters = clusters if strategy == "rc-dpfl" else {}
    outcome = execute(path, {**RECORD, "data-dir": folder, "strategy": strategy, **clusters})
    header, charges = read_ledger(path / "ledger.jsonl")
    assert [charge.get("held_out_epsilon") for charge in charges if charge["for"] == "histogram"] == [4.0]
    own = read_ledger(path / "clients" / "client-1.ledger.jsonl")[1]
    assert [charge.get("held_out_epsilon") for charge in own][-1:] == [4.0]
    assert sum("held_out_epsilon" in charge for charge in own) == 1
    stated = json.loads((path / "privacy.json").read_text())
    assert stated["certified"]
    assert stated["epsilon"] <= 8
    assert check(header, charges, stated) == []
    last = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    counts, noise = last["score_histogram"], last["score_noise"]
    assert counts == [round(count) for count in counts]
    assert noise == pytest.approx([deviation_of_counts([4.0] * 6)] * 2)
    # The noise in 64 cells of 6 clients has a standard deviation of 3.8; it is above 40 with a probability below 1e-17.
    assert 72 - 40 < sum(counts) < 72 + 40  # a fifth of 360 records
    histogram = ScoreHistogram(np.reshape(counts, (2, BINS)), np.array(noise))
    assert outcome["accuracy"] == histogram.accuracy
    assert outcome["estimates"] == json.loads(json.dumps(asdict(estimate(histogram))))


@for_rows(
    ("changes", "named"),
    [
        ({"score-share": "auto"}, "set score-share, or at record level use diagnostic or off"),
        ({"score-share": 0}, "set score-share, or at record level use diagnostic or off"),
        ({"dataset": "breast-cancer", "input-shape": "auto", "num-classes": "auto"}, "no other client has"),
        ({"num-classes": 3}, "the task is to predict 3 classes, not two"),
        ({"privacy-unit": "client", "samples-per-client": 0, "score-share": 0.7}, "at most 0.5 at client level"),
    ],
)
def test_a_record_level_histogram_needs_a_share_and_own_data(folder, changes, named):
    with pytest.raises(ConfigError, match=named):
        RunConfig({**RECORD, "data-dir": folder, **changes})


def test_a_run_on_three_classes_releases_a_macro_area(tmp_path, coterie):
    for client in range(40):
        rng = np.random.default_rng([client, 5])
        y = rng.integers(3, size=60)
        np.savez(tmp_path / f"client-{client}.npz", x=(rng.normal(size=(60, 3)) + np.eye(3)[y]).astype(np.float32), y=y)
    values = {key: value for key, value in RECORD.items() if key not in ("privacy-unit", "samples-per-client")}
    values |= {"clients": 40, "num-classes": 3, "epsilon": 60, "data-dir": str(tmp_path), "rounds": 6}
    path = tmp_path / "run"
    outcome = execute(path, values)
    header, charges = read_ledger(path / "ledger.jsonl")
    stated = json.loads((path / "privacy.json").read_text())
    assert check(header, charges, stated) == []
    assert (header["plan"]["histogram_classes"], stated["certified"]) == (3, True)
    assert sum(charge["for"] == "histogram" for charge in charges) == 1
    estimates = outcome["estimates"]
    assert estimates["classes"] == 3
    exact = json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(exact["score_histogram"]) == 3 * 64
    assert 0.6 < estimates["roc_auc"] < 0.95
    assert 0 < estimates["errors"]["roc_auc"] < 0.1
    assert coterie("report", path, "--out", "page.html")[0] == 0
    assert "mean of 3 classes, each against the others" in (tmp_path / "page.html").read_text()


class Watched(LocalGrid):
    """Notes the contents of replies to evaluations."""

    replies = ()

    def send_and_receive(self, messages, **options):
        replies = list(super().send_and_receive(messages, **options))
        if messages and messages[0].metadata.message_type == EVALUATE:
            self.replies = [reply.content for reply in replies]
        return replies


def test_only_a_client_whose_owner_allows_it_sends_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(Client, "allows", lambda client, release: release != "histograms" or client.client_id % 2 == 0)
    grid = Watched(20)
    run_in(RunFolder.create(tmp_path / "run", RunConfig(SETTINGS)), grid)
    sent = [SCORE_COUNTS in content[DIAGNOSTICS] for content in grid.replies]
    assert sorted(sent) == [False] * 10 + [True] * 10
    counts = [content[DIAGNOSTICS][SCORE_COUNTS] for content in grid.replies if SCORE_COUNTS in content[DIAGNOSTICS]]
    assert all(len(each) == CELLS and {type(count) for count in each} == {float} for each in counts)
    sizes = [content[DIAGNOSTICS]["num-examples"] for content in grid.replies if SCORE_COUNTS in content[DIAGNOSTICS]]
    assert [sum(each) for each in counts] == sizes


@for_rows(("releases", "allowed"), [(None, True), (("scores",), False), (("scores", "histograms"), True), ((), False)])
def test_a_policy_names_histograms(releases, allowed):
    assert Client(0, policy=Policy(releases=releases)).allows("histograms") is allowed


@for_rows("bad", [[float(2**60)] * CELLS, [-1.0] * CELLS, [1.0] * 3, 5.0])
def test_bad_counts_of_one_client_end_no_run(tmp_path, monkeypatch, bad):
    handler = HANDLERS[EVALUATE]

    def changed(cohort):
        replies = handler(cohort)
        for client, reply in zip(cohort.clients, replies, strict=True):
            if client.client_id == 3 and SCORE_COUNTS in reply[DIAGNOSTICS]:
                reply[DIAGNOSTICS][SCORE_COUNTS] = bad
        return replies

    path = tmp_path / str(len(list(tmp_path.iterdir())))
    with monkeypatch.context() as patched:
        patched.setitem(HANDLERS, EVALUATE, changed)
        execute(path, {**SETTINGS, "rounds": 1})
    assert np.isfinite(json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])["score_histogram"]).all()
