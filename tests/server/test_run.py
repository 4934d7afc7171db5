"""Whole runs in process: what they leave behind, and that they survive bad replies and interruptions."""

import json
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from kit.commands import lines
from kit.run_folders import run_in
from kit.toy_grids import Tampered
from safetensors.numpy import load_file

from coterie.client.handlers import HANDLERS
from coterie.privacy import Event, Plan, epsilon
from coterie.server import RunConfig, RunError, RunFolder
from coterie.wire.messages import TRAIN, UPDATE, pack_update, unpack_models

# Rebalancing, so that the released histogram matters for what comes after a resume.
SETTINGS = {"clients": 20, "clusters": 2, "groups": "2", "rounds": 2, "sampling-rate": 0.5, "rebalance-min": 2}
SETTINGS |= {"reseed-every": 2, "local-epochs": 1, "samples-per-client": 10, "model": "linear", "lr": 0.1}
SETTINGS |= {"clip-norm": 1.0, "evaluate-every": 2}
SEEDED = {**SETTINGS, "seed": 7}


def execute(path, settings, grid=None, prepare=lambda folder: None):
    """A new run, or (settings None) the one in ``path`` resumed: its result."""
    folder = RunFolder.resume(path, {}) if settings is None else RunFolder.create(path, RunConfig(settings))
    prepare(folder)
    return run_in(folder, grid)


def models(path):
    files = sorted((path / "models").iterdir())
    return {file.name: load_file(file) for file in files}


def assert_same_models(one, other):
    first, second = models(one), models(other)
    assert list(first) == list(second)
    for name, tensors in first.items():
        assert list(tensors) == list(second[name])
        for key, values in tensors.items():
            np.testing.assert_array_equal(values, second[name][key], err_msg=f"{name} {key}")


def interrupt(after):
    """Makes a folder's run stop as by Ctrl-C once a round is finished."""

    def observe(record):
        if record.round == after:
            raise KeyboardInterrupt

    def prepare(folder):
        folder.on_metrics = observe

    return prepare


def power_cut(round):
    """Makes a folder's run die after the charge of a round, before its checkpoint."""

    def prepare(folder):
        keep = folder.checkpoint

        def checkpoint(state, line):
            if state.round == round:
                raise OSError("power cut")
            keep(state, line)

        folder.checkpoint = checkpoint

    return prepare


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs that tests share, by their settings and what happens to replies: folder and outcome."""

    @cache
    def once(items, change):
        path = tmp_path_factory.mktemp("finished") / "run"
        return path, execute(path, dict(items), change and Tampered(20, change))

    return lambda settings, change=None: once(tuple(settings.items()), change)


def test_a_run_leaves_its_result_certificate_and_models(finished):
    path, outcome = finished(SETTINGS)
    exact = outcome["diagnostics"]
    outcome = {name: value for name, value in outcome.items() if name != "diagnostics"}
    assert json.loads((path / "result.json").read_text(), parse_constant=pytest.fail) == outcome
    assert json.loads((path / "diagnostics.json").read_text(), parse_constant=pytest.fail) == exact
    assert set(outcome) == {
        *("strategy", "dataset", "seed", "evaluate", "notes", "epsilon", "epsilon_rdp", "delta", "certified", "rounds"),
        *("charges", "seconds_total", "seconds_training", "seconds_per_round", "peak_rss_mb", "out"),
    }  # nothing exact
    assert set(exact) == {
        *("about", "round", "accuracy", "worst_group_accuracy", "group_accuracy", "clustering_accuracy"),
        *("groups_found", "nmi", "kappa", "worst_client_accuracy", "max_disparity", "confusion", "groups"),
    }
    assert "guarantee does not cover" in exact["about"]
    assert (outcome["strategy"], outcome["dataset"], outcome["seed"]) == ("ifca", "digits", None)
    assert (outcome["rounds"], outcome["charges"], exact["groups"], exact["round"]) == (2, 2, 2, 2)
    assert len(exact["group_accuracy"]) == 2
    assert exact["accuracy"] == pytest.approx(np.mean(exact["group_accuracy"]))  # groups of equal size
    assert exact["worst_group_accuracy"] == min(exact["group_accuracy"])
    assert np.sum(exact["confusion"], axis=0).tolist() == [SETTINGS["clients"] / 2] * 2
    assert 0 < outcome["seconds_per_round"] < outcome["seconds_total"]

    guarantee = json.loads((path / "privacy.json").read_text(), parse_constant=pytest.fail)
    charges = lines(path / "ledger.jsonl")
    assert guarantee["certified"] is outcome["certified"] is True
    assert guarantee["epsilon"] == outcome["epsilon"] <= 8.0
    events = [Event(line["sampling_rate"], line["noise_multiplier"]) for line in charges]
    assert guarantee["epsilon"] == pytest.approx(epsilon(events, guarantee["delta"]), rel=1e-9)
    assert [line["round"] for line in charges] == [1, 2]

    first, second = models(path).values()
    assert {key: value.shape for key, value in first.items()} == {"output.weight": (10, 64), "output.bias": (10,)}
    assert all(value.dtype == np.float32 and np.isfinite(value).all() for value in first.values())
    assert not np.array_equal(first["output.weight"], second["output.weight"])

    rounds = lines(path / "metrics.jsonl")
    assert [line["round"] for line in rounds] == [1, 2]
    for line in rounds:
        timing = {"seconds", "seconds_total"}
        assert set(line) == {"round", "epsilon", "epsilon_rdp", "histogram", "reseeded"} | timing
    (evaluated,) = lines(path / "diagnostics.jsonl")
    assert evaluated["round"] == 2
    assert {key: evaluated[key] for key in ("accuracy", "groups_found")} == {
        key: exact[key] for key in ("accuracy", "groups_found")
    }
    assert not [key for key in evaluated if key.startswith("client_")]
    assert [line["epsilon"] for line in rounds] == pytest.approx([line["epsilon"] for line in charges])
    assert all(len(line["histogram"]) == 2 and line["seconds"] > 0 for line in rounds)


# Every key of the files of a private run. A new key must be classified here: it is released or charged (or computed
# from such values), public, or outside the guarantee, by an entry of the certificate that begins with these words.
RELEASED = {
    *("accuracy", "clip_norm", "histogram", "reseeded", "sites", "sites/client", "sites/cluster"),
    *(f"notes/{name}" for name in ("clusters", "mss", "mpo", "mss_of", "labels", "projection", "silhouettes")),
}
PUBLIC = {
    *("strategy", "dataset", "seed", "evaluate", "rounds", "round", "out", "notes", "certified"),
    *("epsilon", "epsilon_rdp", "delta", "charges", "messages_down", "bytes_down"),
    *(f"notes/{name}" for name in ("metric", "clusterer", "switch_round")),
    *("accountant", "chain", "charge", "count", "diagnostics", "for", "ledger", "noise", "noise_multiplier", "plan"),
    *("noise_multiplier_counts", "noise_multiplier_updates", "profiles", "public", "sampler", "sampling_rate", "slot"),
    *("slots", "tuned", "unfounded"),
}
_TIMES, _MEMORY, _REPLIES = "when each charge was made", "the peak memory of the run", "in each round, how many clients"
OUTSIDE = {
    **dict.fromkeys(("seconds", "seconds_total", "seconds_training", "seconds_per_round"), _TIMES),
    **dict.fromkeys(("time", "notes/compare_seconds"), _TIMES),
    "peak_rss_mb": _MEMORY,
    **dict.fromkeys(("messages_up", "bytes_up", "clients_present", "replies", "notes/clients"), _REPLIES),
    **dict.fromkeys(("replies/asked", "replies/accepted", "replies/dropped", "notes/evaluations"), _REPLIES),
}
FILES = {
    *("checkpoint/state.safetensors", "config.toml", "ledger.jsonl", "metrics.jsonl", "privacy.json", "result.json"),
    *("models/cluster-0.safetensors", "models/cluster-1.safetensors", "SHA256SUMS"),
}
RECORD_LEVEL = {**SETTINGS, "privacy-unit": "record", "clients": 6, "batch-size": 5} | {
    "first-round-noise-ratio": 1,
    "sampling-rate": 1,
    "rebalance-min": 0,
    "reseed-every": 0,
}
EXACT = {"diagnostics.json", "diagnostics.jsonl"}


@pytest.mark.parametrize(
    ("settings", "further"),
    [
        ({**SETTINGS, "clip-norm": "adaptive", "evaluate": "private", "epsilon": 20}, set()),
        ({**SETTINGS, "mechanism": "banded", "sampling-rate": 0.5, "rebalance-min": 0}, EXACT),
        ({**RECORD_LEVEL, "strategy": "rc-dpfl", "evaluate": "off"}, set()),
        ({**RECORD_LEVEL, "strategy": "lcfl"}, EXACT | {"evidence/distances.npz"}),
    ],
    ids=["client", "banded", "rc-dpfl", "lcfl"],
)
def test_every_value_of_a_private_run_is_released_public_or_named_as_outside(tmp_path, settings, further):
    path = tmp_path / "run"
    execute(path, {name: value for name, value in settings.items() if value is not None})
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert {file for file in files if not file.startswith("clients/")} == FILES | further
    documents = [json.loads((path / "result.json").read_text())]
    for name in ("metrics.jsonl", "ledger.jsonl"):
        documents += map(json.loads, (path / name).read_text().splitlines())
    found = set().union(*documents)
    for document in documents:
        for key in ("notes", "replies", "sites"):
            entries = document.get(key, {})
            found |= {f"{key}/{name}" for entry in (entries if key == "sites" else [entries]) for name in entry}
    assert found - RELEASED - PUBLIC - OUTSIDE.keys() == set()
    outside = json.loads((path / "privacy.json").read_text())["outside"]
    for key in found & OUTSIDE.keys():
        assert any(text.startswith(OUTSIDE[key]) for text in outside), key
    assert any(text.startswith("accuracies on clients' held-out data") for text in outside) == bool(EXACT & further)


def test_a_seed_makes_a_run_reproducible_and_uncertified(finished, tmp_path):
    first, outcome = finished(SEEDED)
    assert (outcome["seed"], outcome["certified"]) == (7, False)
    assert "seed 7" in json.loads((first / "privacy.json").read_text())["reasons"][0]
    execute(tmp_path / "again", SEEDED)
    assert_same_models(first, tmp_path / "again")
    execute(tmp_path / "other", {**SETTINGS, "seed": 8})
    with pytest.raises(AssertionError):
        assert_same_models(first, tmp_path / "other")


def test_secret_runs_differ(finished, tmp_path):
    execute(tmp_path / "run", SETTINGS)
    with pytest.raises(AssertionError):
        assert_same_models(finished(SETTINGS)[0], tmp_path / "run")


def test_without_privacy_nothing_is_certified_and_json_has_no_infinity(tmp_path):
    outcome = execute(tmp_path / "run", {**SETTINGS, "privacy-unit": "none"})
    assert (outcome["certified"], outcome["epsilon"], outcome["delta"]) == (False, None, None)
    assert len(outcome["diagnostics"]["client_accuracy"]) == 20
    for file in ("result.json", "privacy.json", "diagnostics.json"):
        json.loads((tmp_path / "run" / file).read_text(), parse_constant=pytest.fail)
    for file in ("diagnostics.jsonl", "metrics.jsonl", "ledger.jsonl"):
        for line in (tmp_path / "run" / file).read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)


def test_evaluate_off_computes_no_accuracy(tmp_path, monkeypatch):
    monkeypatch.delitem(HANDLERS, "evaluate")  # nobody is even asked
    outcome = execute(tmp_path / "run", {**SETTINGS, "evaluate": "off"})
    assert outcome["diagnostics"] is None
    assert not list((tmp_path / "run").glob("diagnostics*"))
    assert not any("accuracy" in text for text in (*outcome, *lines(tmp_path / "run" / "metrics.jsonl")[-1]))
    outside = json.loads((tmp_path / "run" / "privacy.json").read_text())["outside"]
    assert not any(text.startswith("accuracies") for text in outside)


def test_a_private_evaluation_is_all_that_is_known_of_accuracy(tmp_path):
    outcome = execute(tmp_path / "run", {**SETTINGS, "evaluate": "private", "evaluate-every": 2, "epsilon": 20})
    assert outcome["certified"] is True
    assert 0 <= outcome["accuracy"] <= 1
    assert outcome["diagnostics"] is None
    assert not list((tmp_path / "run").glob("diagnostics*"))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["accuracy"] == outcome["accuracy"]
    charges = lines(tmp_path / "run" / "ledger.jsonl")
    assert [line["for"] for line in charges] == ["training", "training", "evaluation"]
    guarantee = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert guarantee["epsilon"] == pytest.approx(charges[-1]["epsilon"])
    assert 19 < guarantee["epsilon"] <= 20
    assert not any("accurac" in text for text in guarantee["outside"])
    last = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["accuracy"], last["epsilon"]) == (outcome["accuracy"], pytest.approx(guarantee["epsilon"]))


def test_a_budget_that_ends_before_the_rounds_is_an_error_that_keeps_everything(tmp_path):
    settings = {**SETTINGS, "noise-multiplier": 1.0, "rounds": 6, "epsilon": 3.5}
    with pytest.raises(RunError, match=r"the budget is exhausted after \d of 6 rounds; models and results are saved"):
        execute(tmp_path / "run", settings)
    outcome = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 0 < outcome["rounds"] < 6
    assert outcome["charges"] == outcome["rounds"]
    assert len(models(tmp_path / "run")) == 2
    spent = [line["epsilon"] for line in lines(tmp_path / "run" / "ledger.jsonl")]
    assert spent[-1] <= 3.5 < 2 * spent[-1] - spent[-2] + 0.3  # one more would not have fitted
    guarantee = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert guarantee["certified"] is True  # when a budget ends is public
    assert guarantee["epsilon"] == pytest.approx(spent[-1])


def test_a_run_under_another_mechanism(tmp_path):
    settings = {**SETTINGS, "mechanism": "rr-slot", "rebalance-min": 3, "epsilon": 30, "rounds": 2}
    assert execute(tmp_path / "run", settings)["certified"] is True
    guarantee = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert (guarantee["mechanism"], guarantee["sampler"]) == ("rr-slot", "fixed")
    cohort = round(SETTINGS["clients"] * SETTINGS["sampling-rate"])
    assert [sum(line["histogram"]) for line in lines(tmp_path / "run" / "metrics.jsonl")] == [cohort] * 2


# ---- bad replies ------------------------------------------------------------------------------------------


def whole(replies, exchange):
    return replies


def without_first(replies, exchange):
    return replies[1:] if exchange == 1 else replies


def poisoned(replies, exchange):
    if exchange == 1:
        update = replies[0].content[UPDATE]
        vector, layout = unpack_models(update)
        vector[0, -1] = np.nan
        replies[0].content[UPDATE] = pack_update(vector[0], layout)
    return replies


class Late:
    """The first reply comes a round too late, as that of a slow client may."""

    def __call__(self, replies, exchange):
        if exchange == 1:
            self.kept = replies[:1]
            return replies[1:]
        return self.kept + replies


def twice(replies, exchange):
    return [reply for reply in replies for _ in range(2)]


@pytest.mark.parametrize("unit", ["client", "none"])
@pytest.mark.parametrize(
    ("change", "same_as"),
    [(poisoned, without_first), (Late(), without_first), (twice, whole)],
    ids=["nan", "late", "twice"],
)
def test_a_reply_that_is_no_good_contributes_nothing_and_the_run_goes_on(finished, tmp_path, unit, change, same_as):
    settings = {**SEEDED, "privacy-unit": unit}
    outcome = execute(tmp_path / "changed", settings, Tampered(20, change))
    assert (outcome["rounds"], outcome["charges"]) == (2, 2)
    assert_same_models(tmp_path / "changed", finished(settings, same_as)[0])
    for tensors in models(tmp_path / "changed").values():
        assert all(np.isfinite(value).all() for value in tensors.values())
    if same_as is not whole:
        with pytest.raises(AssertionError):
            assert_same_models(tmp_path / "changed", finished(settings, whole)[0])


@pytest.mark.parametrize("seed", ["auto", 7])
def test_when_all_clients_fail_every_round_is_charged_and_the_run_is_an_error(tmp_path, monkeypatch, seed):
    def fail(cohort):
        raise OSError("the disk is gone")

    monkeypatch.setitem(HANDLERS, TRAIN, fail)
    path = tmp_path / "run"
    with pytest.raises(RunError, match="no valid reply in the whole run") as caught:
        execute(path, {**SETTINGS, "seed": seed})
    assert ("disk is gone" in str(caught.value)) is (seed == 7)  # a certified run says nothing of a client
    assert [line["round"] for line in lines(path / "ledger.jsonl")] == [1, 2]
    with pytest.raises(RunError, match="no valid reply in the whole run"):
        execute(path, None)  # a resume makes it no success
    assert not (path / "result.json").exists()


def test_an_empty_cohort_is_a_valid_round(tmp_path, monkeypatch):
    sample = Plan.sample
    rounds = iter([1, 2, 3])
    nobody = np.zeros(0, np.int64)
    monkeypatch.setattr(Plan, "sample", lambda plan, rng: nobody if next(rounds) > 1 else sample(plan, rng))
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        execute(path, {**SETTINGS, "rounds": 3}, prepare=interrupt(2))
    outcome = execute(path, None)  # nobody takes part in the only round that is left
    assert (outcome["rounds"], outcome["charges"]) == (3, 3)


# ---- interruptions ----------------------------------------------------------------------------------------

SIX = {"rounds": 6, "reseed-every": 1}


def test_an_interrupted_run_resumes_to_the_very_same_models_and_its_time_goes_on(finished, tmp_path):
    uncut, _ = finished({**SEEDED, **SIX})
    path = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        execute(path, {**SEEDED, **SIX}, prepare=interrupt(3))
    written = lines(path / "metrics.jsonl")
    totals = [line["seconds_total"] for line in written]
    assert len(totals) == 3
    assert totals == sorted(totals)
    assert totals[-1] >= sum(line["seconds"] for line in written)
    written[-1]["seconds_total"] = 1000.0
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    outcome = execute(path, None)
    assert (outcome["rounds"], outcome["charges"]) == (6, 6)
    later = [line["seconds_total"] for line in lines(path / "metrics.jsonl")][3:]
    assert 1000 < later[0] < later[-1] <= outcome["seconds_total"] < 1100
    assert_same_models(path, uncut)
    for line, expected in zip(lines(path / "metrics.jsonl"), lines(uncut / "metrics.jsonl"), strict=True):
        assert line.pop("epsilon") == pytest.approx(expected.pop("epsilon"), rel=1e-9)  # composed in another order
        untimed = {"seconds": 0, "seconds_total": 0}
        assert line | untimed == expected | untimed
    assert lines(path / "diagnostics.jsonl") == lines(uncut / "diagnostics.jsonl")


@pytest.mark.parametrize("round", [1, 4])
def test_a_charge_that_a_crash_wasted_is_made_up_for_by_noise(tmp_path, round):
    path = tmp_path / "run"
    with pytest.raises(OSError, match="power cut"):
        execute(path, {**SETTINGS, **SIX, "epsilon": 4.0}, prepare=power_cut(round))
    before = lines(path / "ledger.jsonl")
    assert [line["round"] for line in before] == list(range(1, round + 1))

    outcome = execute(path, None)
    charges = lines(path / "ledger.jsonl")
    assert charges[:round] == before  # never refunded
    assert [line["round"] for line in charges] == [*range(1, round + 1), *range(round, 7)]
    assert [line["charge"] for line in charges] == list(range(1, 8))
    noise = [line["noise_multiplier"] for line in charges]
    assert len(set(noise[:round])) == len(set(noise[round:])) == 1
    assert noise[-1] > noise[0] * 1.01
    for line in charges:  # the noise that was drawn is the noise that was charged
        together = line["noise_multiplier_updates"] ** -2 + line["noise_multiplier_counts"] ** -2
        assert together == pytest.approx(line["noise_multiplier"] ** -2)
    assert all(one["epsilon"] < other["epsilon"] for one, other in pairwise(charges))
    assert charges[-1]["epsilon"] <= 4.0
    assert [line["round"] for line in lines(path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert (outcome["rounds"], outcome["charges"], outcome["certified"]) == (6, 7, True)
    assert 3.9 < outcome["epsilon"] <= 4.0  # the budget is used, and kept


def test_a_seeded_run_draws_fresh_noise_after_a_crash(tmp_path):
    """The round that is repeated must not release the sums of another cohort under the noise of the first."""
    path = tmp_path / "run"
    settings = {**SEEDED, "privacy-unit": "client", "rounds": 3}
    with pytest.raises(OSError, match="power cut"):
        execute(path, settings, prepare=power_cut(2))
    execute(path, None)
    execute(tmp_path / "whole", settings)
    cut, whole = (lines(p / "metrics.jsonl") for p in (path, tmp_path / "whole"))
    assert cut[0]["histogram"] == whole[0]["histogram"]
    assert cut[1]["histogram"] != whole[1]["histogram"]
