"""Comparison of runs: rows of repetitions, mean and standard deviation, and what is stated about missing runs."""

import html
import json

import pandas
import pytest
from kit.tables import for_rows
from test_report import CERTIFICATE, RESULT, WITHOUT_PRIVACY, make_run, page, words

from coterie.report import configuration
from coterie.report.comparison import compare, read_runs
from coterie.report.configuration import differing_settings, has_effect, shown_settings, used_settings
from coterie.report.runs import ReportError, read_run
from coterie.server import SETTINGS, ConfigError, RunConfig
from coterie.strategies.registry import STRATEGIES

VALUES = {
    ("ifca", 0): (0.81, 0.71, 0.9, 7.99, 20.5),
    ("ifca", 1): (0.85, 0.66, 1.0, 7.99, 19.25),
    ("ifca", 2): (0.79, 0.70, 0.8, 7.98, 22.0),
    ("fedavg", 0): (0.6, 0.5, 0.25, 7.99, 11.0),
    ("fedavg", 1): (0.58, 0.41, 0.25, 7.99, 13.0),
}


def seeded(folder, strategy, seed, values=VALUES[("ifca", 0)], **changes):
    accuracy, worst, clustering, epsilon, seconds = values
    result = RESULT | {"accuracy": accuracy, "worst_group_accuracy": worst, "clustering_accuracy": clustering}
    result |= {"seconds_total": seconds, "seed": seed}
    certificate = changes.pop("certificate", CERTIFICATE | {"epsilon": epsilon})
    make_run(folder, strategy=strategy, result=changes.pop("result", result), certificate=certificate)
    changes = {"evaluate": "diagnostic", **changes}
    config = folder / "config.toml"
    text = config.read_text().replace("[versions]", f"seed = {json.dumps(seed)}\nout = '{folder}'\n[versions]")
    for name, value in changes.items():
        key = name.replace("_", "-")
        lines = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
        text = "\n".join([lines[0], f"{key} = {json.dumps(value)}", *lines[1:]])
    config.write_text(text)
    return folder


@pytest.fixture
def folders(tmp_path):
    return [
        seeded(tmp_path / f"{strategy}-{seed}", strategy, seed, values) for (strategy, seed), values in VALUES.items()
    ]


def test_mean_and_deviation_agree_with_pandas(folders):
    names = ["accuracy", "worst_group_accuracy", "clustering_accuracy", "epsilon", "seconds"]
    rows = [(*place, *values) for place, values in VALUES.items()]
    groups = pandas.DataFrame(rows, columns=["strategy", "seed", *names]).groupby("strategy")
    found = compare([read_run(folder) for folder in folders])
    assert found.settings == ("strategy",)
    assert [row["settings"] for row in found.document()["rows"]] == [{"strategy": "ifca"}, {"strategy": "fedavg"}]
    for row in found.document()["rows"]:
        for name in names:
            expected = groups.get_group(row["settings"]["strategy"])[name]
            assert row[name]["mean"] == pytest.approx(expected.mean())
            assert row[name]["std"] == pytest.approx(expected.std())
            assert row[name]["n"] == row["repetitions"] == len(expected)


def test_the_cells_are_rounded_and_marked(folders):
    heads, (first, second) = compare([read_run(folder) for folder in folders]).cells()
    assert heads == ["", "strategy", "runs", "accuracy", "worst group", "clustering accuracy", "ε", "seconds"]
    scores = ["81.7 ± 3.1 %*", "69.0 ± 2.6 %*", "90.0 ± 10.0 %*", "7.99 ± 0.01", "20.58 ± 1.38"]  # ε is rounded up
    assert [cell.replace("\u00a0", " ") for cell in first] == ["1", "ifca", "3", *scores]
    assert second[:3] == ["2", "fedavg", "2"]


def test_one_run_has_no_deviation(tmp_path):
    found = compare([read_run(seeded(tmp_path / "one", "ifca", 0))])
    assert found.document()["rows"][0]["accuracy"] == {"mean": 0.81, "std": None, "n": 1}
    assert "±" not in "".join(found.cells()[1][0])


def test_a_run_without_privacy_has_exact_scores_that_nothing_guarantees(tmp_path):
    found = compare(
        [read_run(seeded(tmp_path / str(seed), "ifca", seed, certificate=WITHOUT_PRIVACY)) for seed in (0, 1)]
    )
    (row,) = found.document()["rows"]
    assert (row["epsilon"], row["outside_guarantee"]) == ({"mean": None, "std": None, "n": 2}, [])
    assert "∞" in found.cells()[1][0]
    assert "*" not in "".join(found.cells()[1][0])


def test_settings_that_some_runs_do_not_use_make_no_difference(tmp_path):
    runs = [
        read_run(seeded(tmp_path / "a", "ifca", 0, reseed_every=5, rebalance_train="own")),
        read_run(seeded(tmp_path / "b", "fedavg", 0, reseed_every=0, rebalance_train="assigned", clusters=1)),
    ]
    assert compare(runs).settings == ("strategy",)
    runs.append(read_run(seeded(tmp_path / "c", "ifca", 0, reseed_every=10)))
    assert compare(runs).settings == ("reseed-every", "strategy")
    assert [row.settings["reseed-every"] for row in compare(runs).rows] == [5, None, 10]


def test_missing_runs_and_scores_are_stated(tmp_path):
    whole = seeded(tmp_path / "whole", "ifca", 0)
    cut = seeded(tmp_path / "cut", "ifca", 1)
    (cut / "result.json").unlink()
    silent = seeded(tmp_path / "silent", "ifca", 2, result=dict.fromkeys(RESULT), evaluate="off")
    again = seeded(tmp_path / "again", "ifca", 0)
    damaged = seeded(tmp_path / "damaged", "ifca", 4)
    (damaged / "result.json").write_text("{")
    runs, unreadable = read_runs([whole, cut, silent, again, damaged])
    found = compare(runs, unreadable)
    assert [(row.settings, [run.name for run in row.runs]) for row in found.rows] == [
        ({"evaluate": "diagnostic"}, ["whole", "again"]),
        ({"evaluate": "off"}, ["silent"]),
    ]
    assert dict(found.left_out)[str(cut)] == "unfinished: 4 of 4 rounds"
    assert "not valid JSON" in dict(found.left_out)[str(damaged)]
    assert dict(found.notes) == {
        str(silent): "no accuracy: evaluate = off",
        str(again): f"seed 0 as in {whole}: no independent repetition",
    }
    text = words(page(whole, silent, cut))
    assert f"Left out: {cut}: unfinished: 4 of 4 rounds" in text
    assert f"{silent}: no accuracy: evaluate = off." in text


def test_some_values_of_a_row_may_be_missing(tmp_path):
    runs = [seeded(tmp_path / "a", "ifca", 0), seeded(tmp_path / "b", "ifca", 1, result=RESULT | {"accuracy": None})]
    (row,) = compare(list(map(read_run, runs))).rows
    assert (row.scores["accuracy"].n, row.scores["epsilon"].n) == (1, 2)
    assert "(1 of 2)" in compare(list(map(read_run, runs))).cells()[1][0][2]


def test_nothing_readable_is_an_error(tmp_path):
    with pytest.raises(ReportError, match="does not exist"):
        read_runs([tmp_path / "a", tmp_path / "b"])
    run = make_run(tmp_path / "run")
    with pytest.raises(ReportError, match="same run"):
        read_runs([run, tmp_path / "x" / ".." / "run"])


def test_the_page_shows_mean_and_deviation(folders):
    text = words(page(*folders))
    assert "Mean ± sample standard deviation over runs that are equal but for the seed." in text
    assert "1 ifca 3 81.7 ± 3.1 %* 69.0 ± 2.6 %* 90.0 ± 10.0 %* 7.99 ± 0.01 20.58 ± 1.38" in text
    assert "* exact, from clients' data without noise: outside the guarantee." in html.unescape(text)


# ---- settings that a run uses -----------------------------------------------------------------------------


def of(**settings):
    values = RunConfig({name.replace("_", "-"): value for name, value in settings.items()}).values
    return {name.rpartition(".")[2]: value for name, value in values.items()}


def test_conditions_are_of_settings():
    assert set(configuration._USED) | set(configuration._OFF) <= {each.key for each in SETTINGS.values()}


RECORD = {"privacy_unit": "record", "samples_per_client": 10}


@for_rows(
    ("changes", "used", "unused"),
    [
        ({}, "epsilon mechanism reseed-every clip-norm", "loss-bound identifiers evaluate-noise participation"),
        ({"privacy_unit": "none"}, "lr clusters divisor", "epsilon delta clip-norm mechanism accountant"),
        ({"strategy": "fedavg"}, "epsilon", "clusters reseed-every rebalance-min rebalance-train"),
        ({"mechanism": "rr-slot"}, "identifiers", "participation"),
        ({"mechanism": "banded"}, "participation", "identifiers"),
        ({"strategy": "fedprox"}, "proximal-mu", ""),
        ({"evaluate": "private"}, "evaluate-noise", "evaluate-clients"),
        ({}, "evaluate-clients", "max-clusters"),
        ({"clusters": 0}, "max-clusters", ""),
        (
            {"strategy": "rc-dpfl", "samples_per_client": 10},
            "epsilon clip-norm weights components selection loss-bound",
            "mechanism divisor loss-noise table-schema",
        ),
        ({"strategy": "fedavg", **RECORD}, "weights first-batch-size", "selection loss-bound loss-noise"),
        ({"strategy": "lcfl", **RECORD}, "loss-bound loss-noise", "selection"),
        ({"strategy": "kfed"}, "clusters feature-range", "model server-lr epsilon reseed-every"),
    ],
)
def test_only_settings_with_an_effect_are_used(changes, used, unused):
    found = used_settings(of(**changes))
    assert set(used.split()) <= found.keys()
    assert not set(unused.split()) & found.keys()
    assert not {each.key for each in SETTINGS.values() if each.place} & found.keys()


CONFIGURATIONS = [
    *({}, {"mechanism": "rr-slot"}, {"mechanism": "banded"}, {"clip-norm": "adaptive"}, {"clusters": 0}),
    *({"evaluate": "private"}, {"evaluate": "off"}, {"privacy-unit": "none"}),
    *({"privacy-unit": "none", "aggregator": name} for name in ("krum", "median")),
    {"strategy": "rc-dpfl", "samples-per-client": 50, "clip-norm": "adaptive"},
    {"strategy": "lcfl", "privacy-unit": "record", "samples-per-client": 50},
    *({"strategy": name, "samples-per-client": 50} for name in STRATEGIES),
]
NO_EFFECT = ("has no effect", "has no privacy", "is for privacy-unit")


def other_value(declared):
    """A value of a setting beside its default."""
    if declared.kind is bool:
        return not declared.default
    if declared.kind is str:
        return next((name for name in declared.choices if name != declared.default), "epsilon=2")
    ends = declared.kind(max(declared.bounds.low, 0)), declared.kind(min(declared.bounds.high, 50))
    return next(value for value in (*ends, sum(ends) / 4) if value in declared.bounds and value != declared.default)


def has_no_effect(given, declared):
    """Whether the command refuses a value of a setting because of other settings, with which it has no effect."""
    try:
        RunConfig({**given, declared.name: other_value(declared)})
    except ConfigError as error:
        about = str(error).startswith((f"{declared.name} = ", f"{declared.key} = "))
        return about and any(words in str(error) for words in NO_EFFECT)
    return False


@for_rows("given", CONFIGURATIONS)
def test_a_setting_is_used_if_and_only_if_the_command_does_not_refuse_it(given):
    config = of(**given)
    for name, declared in RunConfig(given).declared.items():
        if name in given or declared.key in given:
            continue
        # The command accepts some settings that have no effect, such as a budget in a sweep over units of privacy.
        keys = {declared.key, declared.only[0].rpartition(".")[2]} if declared.only else {declared.key}
        accepted_without_effect = not all(holds(config) for key in keys for holds in configuration._USED.get(key, ()))
        if has_no_effect(given, declared):
            assert not has_effect(config, declared.key), name
        elif not accepted_without_effect:
            assert has_effect(config, declared.key), name


def test_what_is_off_is_not_shown_and_what_is_set_is():
    shown = shown_settings(of(device="cpu", seed=3, average_last=0.25, out="here"))
    assert (shown["device"], shown["seed"], shown["average-last"]) == ("cpu", 3, 0.25)
    assert not {"out", "resume", "stop-after", "label-skew", "data-dir"} & shown.keys()
    assert "seed" not in shown_settings(of())


def test_the_order_of_differences_is_that_of_the_settings():
    assert differing_settings([of(), of(epsilon=4, strategy="fedavg", lr=0.1)]) == ["strategy", "lr", "epsilon"]
    assert differing_settings([of(seed=1, out="a"), of(seed=2, out="b")]) == []
