"""The mechanism of a paper, and its accountants: available to tables, and refused elsewhere in one line."""

import subprocess
import sys

import pytest

import coterie.audit.printed  # noqa: F401 - adds the mechanisms
from coterie.engine.in_process import LocalGrid
from coterie.privacy import PrivacyError, read_ledger
from coterie.privacy.check import check
from coterie.results import Outcome
from coterie.server import ConfigError, RunConfig, RunFolder, run

SETTINGS = {"dataset": "digits", "clients": 8, "groups": "2", "clusters": 2, "rounds": 2, "rebalance-min": 2,
            "sampling-rate": 1.0, "samples-per-client": 8, "epsilon": 30, "delta": 1e-3}  # fmt: skip

REFUSED = """
from coterie.privacy import PrivacyError, plan_from_terms
from coterie.server import ConfigError, RunConfig
for values in ({"mechanism": "paper"}, {"accountant": "theorem-4.2"}, {"identifier-noise": 1.0}):
    try:
        RunConfig(values)
    except ConfigError as error:
        print(error)
try:
    plan_from_terms({"mechanism": "paper"})
except PrivacyError as error:
    print(error)
"""


def test_a_run_that_asks_for_them_is_told_what_to_use():
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.partition(" was removed: use ")[0] for line in lines] == [
        "mechanism = paper", "accountant = theorem-4.2", "identifier-noise", "mechanism = paper",
    ]  # fmt: skip
    assert all(line.endswith("; `coterie bench rr-table1` reproduces the tables of the paper") for line in lines)


@pytest.mark.parametrize("mechanism", ["paper", "paper-uncharged"])
def test_tables_run_it_uncertified(tmp_path, mechanism):
    folder = RunFolder.create(tmp_path / "run", RunConfig({**SETTINGS, "mechanism": mechanism}))
    run(folder, LocalGrid(SETTINGS["clients"]))
    folder.close()
    outcome = Outcome.read(tmp_path / "run")
    assert outcome.values["certified"] is False
    header, charges = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert header["plan"]["mechanism"] == mechanism
    assert check(header, charges, None) == []


def test_its_numbers_are_those_of_the_paper():
    plan = RunConfig({"mechanism": "paper", "epsilon": 100, "rounds": 3}).plan
    assert (plan.identifier_share, plan.accountant, plan.divisor) == (0.2, "theorem-4.2", "released")
    uncharged = RunConfig({"mechanism": "paper-uncharged", "epsilon": 100, "rounds": 3}).plan
    assert (uncharged.identifier_share, uncharged.noise_multiplier_counts) == (0.0, 1.0)


def test_the_floor_of_its_bound_is_named():
    paper = {"mechanism": "paper", "clients": 1000, "sampling-rate": 0.1, "rounds": 100, "delta": 1e-3, "epsilon": 2}
    with pytest.raises((ConfigError, PrivacyError), match=r"theorem-4\.2.* at least 2\.226 however large"):
        _ = RunConfig(paper).plan


def test_a_shared_budget_is_not_for_it():
    with pytest.raises(ConfigError, match=r"budget-file with mechanism = .*change mechanism"):
        RunConfig({"budget-file": "budget.jsonl", "mechanism": "paper"})
