"""Every method, at every privacy unit, with one cluster, one or two clients, or one round: it runs, or it is refused.

What runs has a report. What does not is refused before anything starts, by a message that names the setting, its value
and the way out.
"""

from contextlib import closing

import pytest
from kit.tables import for_rows
from kit.tiers import mark_slow

from coterie.fields.settings import ConfigError
from coterie.report.page import write_report
from coterie.server import RunConfig, RunFolder
from coterie.server.simulate import prepare, simulate
from coterie.strategies.registry import STRATEGIES

TOY = {"dataset": "kit.toys:pixels", "model": "linear", "rounds": 3, "local-epochs": 1, "shift": "label-shift"}
POINTS = {"dataset": "kit.toys:blobs"}
DATA = {
    **dict.fromkeys(STRATEGIES, TOY),
    "fedper": TOY | {"model": "mlp-32"},
    "kfed": POINTS,
    "ffcm": POINTS,
    "ppfc-gan": {"dataset": "digits", "pretrain-epochs": 1, "joint-epochs": 1},
}
ALONE = {"shift": "none", "groups": 1, "clusters": 1}
CHANGES = {
    "one cluster": {"clusters": 1},
    "one cluster and round": {"clusters": 1, "rounds": 1},
    "one client": {"clients": 1, **ALONE},
    "two clients": {"clients": 2},
    "one round": {"rounds": 1},
}
#: What a method refuses, and how.
REFUSED = {
    ("oracle", "one cluster"): "requires one cluster per true group .* set clusters to 2",
    ("oracle", "one cluster and round"): "requires one cluster per true group .* set clusters to 2",
    ("rc-dpfl", "one client"): "clients = 1: rc-dpfl clusters at least 4 clients; use more clients",
    ("rc-dpfl", "two clients"): "clients = 2: rc-dpfl clusters at least 4 clients; use more clients",
    ("lcfl", "one client"): "clients = 1: lcfl clusters at least 2 clients; use more clients",
}
CASES = [
    (name, unit, change)
    for name, method in STRATEGIES.items()
    for unit in method.units
    for change, settings in CHANGES.items()
    if "rounds" not in settings or method.produces == "models"
]


def settings(name, unit, change):
    clusters = 2 if STRATEGIES[name].clustered else 1
    chosen = {"clients": 6, "groups": 2, "clusters": clusters, "samples-per-client": 5, "sampling-rate": 1, "seed": 1}
    privacy = {} if unit == "none" else {"epsilon": 8, "delta": 1e-3}
    return chosen | DATA[name] | privacy | {"strategy": name, "privacy-unit": unit} | CHANGES[change]


REFUSALS = [case for case in CASES if (case[0], case[2]) in REFUSED]
RUNS = [case for case in CASES if case not in REFUSALS]
FAST = {case for case in RUNS if case[2] == "one cluster" and STRATEGIES[case[0]].produces == "models"}


@pytest.mark.parametrize(("name", "unit", "change"), mark_slow(RUNS, set(RUNS) - FAST))
def test_a_degenerate_run_ends_with_a_report(tmp_path, name, unit, change):
    config = RunConfig(settings(name, unit, change))
    with closing(RunFolder.create(tmp_path / "run", config, prepare(config))) as folder:
        simulate(folder, cores=1)
    assert write_report([tmp_path / "run"], tmp_path / "report.html").exists()


@for_rows(("name", "unit", "change"), REFUSALS)
def test_a_run_that_cannot_work_is_refused_before_it_starts(name, unit, change):
    with pytest.raises(ConfigError, match=REFUSED[name, change]):
        RunConfig(settings(name, unit, change))
