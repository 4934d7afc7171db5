"""The last round with released cluster sizes follows from public numbers: what reads them, and until when."""

import json
import math

import pytest
from kit.run_folders import run_in
from kit.tables import for_rows

from coterie.privacy import certificate, read_ledger
from coterie.server import RunConfig, RunFolder
from coterie.server.planning import sizes_until
from coterie.strategies import model_search
from coterie.strategies.reseeding import Reseeding

_COMMON = {"clients": 100, "clusters": 2, "groups": "2", "epsilon": 8.0, "rounds": 80}


@for_rows(
    ("settings", "last", "share"),
    [
        ({}, 45, 0.04),
        ({"reseed-every": 7}, 42, 0.04),
        ({"rounds": 10}, 5, 0.04),
        ({"rounds": 8}, math.inf, 0.0),  # the first re-seeding would be after round 5, above 0.6 x 8
        ({"reseed-every": 0}, math.inf, 0.0),
        ({"clusters": 0, "max-clusters": 4}, 56, 0.1),
        ({"clusters": 0, "max-clusters": 4, "rounds": 99}, 56, 0.1),
        ({"rebalance-min": 2.0}, math.inf, 0.04),
        ({"divisor": "released"}, math.inf, 0.04),
        ({"strategy": "fesem"}, 45, 0.04),
        ({"strategy": "fedavg", "clusters": 1}, math.inf, 0.0),
        ({"mechanism": "rr-slot"}, math.inf, 0.2),
        ({"mechanism": "banded"}, 45, 0.04),
        ({"identifier-share": 0.3}, 45, 0.3),
    ],
)
def test_the_plan_states_the_last_round_in_which_sizes_are_read(settings, last, share):
    config = RunConfig({**_COMMON, "noise-multiplier": 1.5, **settings})
    assert (config.plan.sizes_until, config.plan.identifier_share) == (last, share)
    assert sizes_until(config) in (last, 0)


@for_rows("every", [0, 1, 3, 5, 48, 49, 100])
def test_the_last_re_seeding_is_the_last_that_is_due(every):
    reseeding = Reseeding(every=every)
    due = [number for number in range(1, 81) if reseeding.due(number, 80)]
    assert reseeding.last(80) == max(due, default=0)


@for_rows("rounds", [20, 39, 80, 100, 119])
def test_the_search_ends_with_its_last_action(rounds):
    due = [number for number in range(1, rounds + 1) if model_search.action(number, rounds)]
    assert model_search.last(rounds) == due[-1]


SMALL = {**_COMMON, "clients": 12, "rounds": 10, "noise-multiplier": 1.0, "epsilon": 100.0, "samples-per-client": 10}
SMALL |= {"local-epochs": 1, "model": "linear", "evaluate": "off", "sampling-rate": 0.5}


def rounds_with_sizes(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line["round"] for line in lines if "histogram" in line]


def test_a_run_releases_sizes_up_to_that_round_and_its_ledger_says_so(tmp_path):
    run_in(RunFolder.create(tmp_path, RunConfig(SMALL)))
    assert rounds_with_sizes(tmp_path) == [1, 2, 3, 4, 5]
    header, charges = read_ledger(tmp_path / "ledger.jsonl")
    assert header["plan"]["sizes_until"] == 5
    assert [charge["noise_multiplier_counts"] for charge in charges] == [pytest.approx(5.0)] * 5 + [None] * 5
    updates = [charge["noise_multiplier_updates"] for charge in charges]
    assert updates == pytest.approx([0.96**-0.5] * 5 + [1.0] * 5)
    assert len({charge["noise_multiplier"] for charge in charges}) == 1
    stated = certificate(header, charges)
    assert "noisy cluster sizes, up to round 5" in stated["covers"]
    assert stated["public_inputs"]["sizes_until"] == 5
    assert stated["public_inputs"]["noise_multiplier_updates_last"] == pytest.approx(1.0)


def test_further_rounds_release_sizes_as_a_run_of_as_many_rounds_does(tmp_path):
    run_in(RunFolder.create(tmp_path, RunConfig({**SMALL, "stop-after": 7})))
    run_in(RunFolder.resume(tmp_path, {"rounds": 20, "stop-after": 0}))
    assert rounds_with_sizes(tmp_path) == [1, 2, 3, 4, 5, 8, 9, 10]  # re-seeding is due up to round 12
    stated = certificate(*read_ledger(tmp_path / "ledger.jsonl"))
    assert (stated["rounds"], stated["public_inputs"]["sizes_until"]) == (20, 10)


def test_a_run_without_sizes_goes_on_without_them(tmp_path):
    run_in(RunFolder.create(tmp_path, RunConfig({**SMALL, "reseed-every": 0, "rounds": 2})))
    run_in(RunFolder.resume(tmp_path, {"rounds": 3}))
    assert rounds_with_sizes(tmp_path) == []
    assert "sizes_until" not in read_ledger(tmp_path / "ledger.jsonl")[1][-1]["extended"]
