"""Charges for held-out records: apart from training, within the same budget, and never lost."""

import json
import math
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from kit.tables import for_rows
from test_anchors import DELTA, EPSILON, OTHER, PLANNED, STEP, Site, keep

from coterie.privacy import BudgetError, ClientLedger, Ledger, LedgerError, PrivacyError, RecordPlan, epsilon
from coterie.privacy.budget_files import reconcile, reconcile_run, spending
from coterie.privacy.certificate import ODDS, certificate
from coterie.privacy.check import check
from coterie.privacy.ledger_lines import HELD_OUT, held_out_epsilon, read_ledger
from coterie.privacy.mechanisms import RecordLevel
from coterie.privacy.score_histograms import CELLS, UnitCounts, deviation_of_counts

NUMBERS = {"num_examples": 100, "batch_size": 10, "rounds": 3, "epsilon": 4.0, "delta": 1e-4}


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def spend(site, number, cost, **details):
    with closing(site.open()) as ledger:
        return ledger.spend_held_out(number, cost, **details)


def test_held_out_records_have_the_budget_to_themselves(site):
    site.spend(1, 2)
    before = epsilon(site.events, DELTA)
    assert spend(site, 3, 5.0) == 3
    assert epsilon(site.events, DELTA) == before
    assert spend(site, 4, 3.0) == 4
    with pytest.raises(BudgetError, match=r"held-out records to 8\.5, above the budget of 8"):
        spend(site, 5, 0.5)
    site.spend(5)
    assert site.events == Counter({STEP: 30})
    assert spending(site.ledger).held_out == 8.0
    assert "epsilon 8 of held-out records" in str(spending(site.ledger))


@pytest.mark.parametrize("cost", [0.0, -1.0, math.nan, math.inf])
def test_a_cost_is_positive_and_finite(site, cost):
    site.spend(1)
    with pytest.raises(BudgetError, match="positive and finite"):
        spend(site, 2, cost)
    assert held_out_epsilon(read_ledger(site.ledger)[1]) == 0


def test_training_is_charged_first_as_it_pins_the_filter(site):
    with pytest.raises(LedgerError, match="after training"):
        spend(site, 1, 1.0)
    site.spend(1)
    assert spend(site, 1, 1.0) == 2


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_lost_charge_is_noticed_and_reconciled(site, kept):
    site.spend(1)
    spend(site, 2, 3.0)
    spend(site, 3, 2.0)
    keep(site.ledger, kept)
    with pytest.raises(LedgerError):
        site.open().close()
    reconcile(site.ledger, site.anchors)
    with closing(site.open()) as ledger:
        assert ledger.events == Counter({STEP: 10})
    assert spending(site.ledger).held_out == 5.0
    with pytest.raises(BudgetError):
        spend(site, 4, 4.0)


@pytest.mark.parametrize("value", [0, -1, None, "4", float("inf"), [4]])
def test_a_damaged_line_is_refused(tmp_path, value):
    path = tmp_path / "ledger.jsonl"
    with closing(ClientLedger(DELTA, EPSILON, path)) as ledger:
        ledger.spend(1, Counter({STEP: 1}), planned=PLANNED)
        ledger._append_charges([{"charge": 2, "round": 2, HELD_OUT: value}])
    with pytest.raises(LedgerError, match="line 3 is not a charge"):
        read_ledger(path)


def plan(**changes):
    return RecordPlan(noise_multiplier=2.0, **NUMBERS | changes)


def test_a_plan_states_it_only_where_it_is_used():
    assert HELD_OUT not in plan().terms()
    terms = plan(held_out_epsilon=2.0).terms()
    del terms["mechanism"]
    assert RecordPlan.from_terms(terms) == plan(held_out_epsilon=2.0)
    del terms[HELD_OUT]
    assert RecordPlan.from_terms(terms) == plan()
    with pytest.raises(PrivacyError, match="at most epsilon = 4, not 5"):
        plan(held_out_epsilon=5.0)


@for_rows("value", [-1.0, math.nan, math.inf, "2", True, None])
def test_a_server_cannot_propose_another_number(value):
    terms = {key: item for key, item in plan().terms().items() if key != "mechanism"}
    with pytest.raises(PrivacyError):
        RecordPlan.from_terms({**terms, HELD_OUT: value})


def level(held_out):
    return RecordLevel.of((plan(held_out_epsilon=held_out),), clients=5, num_clusters=1, weights="equal")


def charged(server, held_out):
    ledger = server.ledger()
    for number in (1, 2, 3):
        for event, count in server.worst.part(first=number == 1).items():
            ledger.charge_round(number, event, count)
    if held_out:
        ledger.charge_held_out(3, held_out, **{"for": "histogram"})
    return ledger


def test_the_certificate_covers_both_and_states_the_worse_odds():
    plain, both = (certificate(ledger.header, ledger.charges) for ledger in (charged(level(h), h) for h in (0.0, 3.9)))
    assert plain["epsilon"] < 3.9 == both["epsilon"]
    assert both[ODDS] == pytest.approx(1 / (1 + math.exp(-3.9)))
    assert plain[ODDS] < both[ODDS]
    assert any("held-out records" in text and "3.9" in text for text in both["covers"])
    ledger = charged(level(3.9), 3.9)
    assert check(ledger.header, json.loads(json.dumps(ledger.charges)), both) == []


def test_a_check_finds_what_is_not_planned():
    ledger = charged(level(1.0), 1.5)
    assert any("1.5, but 1 is planned" in problem for problem in check(ledger.header, ledger.charges, None))
    ledger = charged(level(0.0), 0.5)
    assert any("0.5, but 0 is planned" in problem for problem in check(ledger.header, ledger.charges, None))


def test_a_run_reconciles_the_ledger_of_a_client(tmp_path):
    server, run, own = level(2.0), tmp_path / "run.jsonl", tmp_path / "own.jsonl"
    with closing(server.ledger(run)) as ledger:
        for event, count in server.worst.part(first=True).items():
            ledger.charge_round(1, event, count)
        ledger.charge_held_out(1, 2.0)
    with closing(ClientLedger(1e-4, 8.0, own)) as ledger:
        ledger.spend(1, Counter({OTHER: 1}), planned=PLANNED)
    assert reconcile_run(own, run, 0).held_out == 2.0


@pytest.mark.parametrize("cost", [0.3, 1.0, 4.0])
def test_the_noise_is_discrete_laplace(cost):
    drawn = np.concatenate([UnitCounts(np.zeros(CELLS)).noisy(cost, np.random.default_rng(i)) for i in range(400)])
    assert (drawn == np.round(drawn)).all()
    assert np.std(drawn) == pytest.approx(deviation_of_counts([cost]), rel=0.05)
    assert np.mean(drawn == 0) == pytest.approx(math.tanh(cost / 2), rel=0.05)  # (1 - p) / (1 + p), p = exp(-cost)
    assert np.mean(drawn == 1) == pytest.approx(math.tanh(cost / 2) * math.exp(-cost), rel=0.15)


def test_the_deviation_of_several_clients_adds_up():
    assert deviation_of_counts([1.0] * 4) == pytest.approx(2 * deviation_of_counts([1.0]))
    assert deviation_of_counts([]) == 0.0


def test_the_server_adds_what_clients_sent_and_clips_what_lies():
    server, ledger = level(2.0), charged(level(2.0), 0.0)
    sent = {0: np.ones(CELLS), 1: np.full(CELLS, 1e8), 2: [math.nan] * CELLS, 3: None, 4: -np.ones(CELLS)}
    permit = server.charge_histogram(ledger, 3)
    histogram = server.release_histogram(permit, sent, None, 1)
    np.testing.assert_allclose(histogram.counts, 100 / 8, rtol=1e-4)  # 1 - 1 + 100 / sqrt(64)
    assert histogram.deviations.tolist() == pytest.approx([deviation_of_counts([2.0] * 3)] * 2)
    with pytest.raises(LedgerError, match="already used"):
        server.release_histogram(permit, sent, None, 1)
    assert isinstance(ledger, Ledger)
