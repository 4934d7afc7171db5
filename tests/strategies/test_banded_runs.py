"""Runs under the banded mechanism: who is asked, what a crash costs, and what a replaced model inherits."""

import math

import numpy as np
import pytest
from flwr.app import Message
from kit.toy_grids import Kept
from test_base import CLIENTS, LAYOUT, UP, Stub, start

from coterie.privacy import Banded, LedgerError, Streams, epsilon
from coterie.privacy.mechanisms.turns import slots_of
from coterie.privacy.randomness import gaussian
from coterie.strategies import IFCA, Checkpoint, FedAvg, Reseeding


def banded(rounds=4, noise=0.5, k=1, **numbers):
    shape = {"clients": CLIENTS, "num_clusters": k, "sampling_rate": 0.5, "rounds": rounds, "clip_norm": 0.5}
    privacy = {"epsilon": math.inf, "delta": 1e-5, "noise_multiplier": noise, "identifier_share": 0.5}
    return Banded(**shape | privacy | numbers)


def test_a_round_asks_its_slot_and_its_divisor_is_public():
    grid, plan = Stub(), banded(rounds=4)
    moved, strategy = start(grid, plan, rounds=4)
    slots = slots_of(CLIENTS, 2)
    expected = [client for number in range(4) for client in np.flatnonzero(slots == number % 2)]
    assert grid.asked == expected
    assert strategy.statistics.accepted == 4 * CLIENTS / 2
    np.testing.assert_allclose(moved, 4 * np.sign(UP) * 0.25, atol=0.3)  # clipped: norm 0.5, four coordinates
    assert [charge["slot"] for charge in strategy.ledger.charges] == [0, 1, 0, 1]


def test_a_client_that_never_replies_changes_no_divisor_and_no_cost():
    def silent(client, content):
        return [] if client in (0, 1, 2) else [content]

    noise = {"noise": 0.0501, "identifier_share": 0.0}
    everyone, whole = start(Stub(), banded(rounds=2, **noise), rounds=2)
    others, part = start(Stub(silent), banded(rounds=2, **noise), rounds=2)
    spread = np.sign(UP) * 0.25 * 3 / (CLIENTS / 2)
    np.testing.assert_allclose(everyone - others, spread, rtol=1e-4)  # the same noise in both
    assert part.ledger.spent() == whole.ledger.spent()


def test_a_late_reply_enters_no_round():
    """A reply to a message of round 1 that arrives in round 2 is dropped, though its client is in neither cohort."""
    kept = []

    class Late(Stub):
        def _answers(self, questions):
            answers = list(super()._answers(questions))
            trained = [m for m in questions if m.metadata.message_type == "train"]
            if trained and trained[0].content["config"]["round"] == 1:
                kept.append(answers.pop())
            elif trained:
                answers += kept
            yield from answers

    noise = {"noise": 0.0501, "identifier_share": 0.0}
    moved, strategy = start(Late(), banded(rounds=2, **noise), rounds=2)
    everyone, _ = start(Stub(), banded(rounds=2, **noise), rounds=2)
    assert isinstance(kept[0], Message)
    assert strategy.statistics.dropped.total() == 1
    np.testing.assert_allclose(everyone - moved, np.sign(UP) * 0.25 / (CLIENTS / 2), rtol=1e-4)


@pytest.mark.parametrize("crash", [1, 2, 3, 6])
def test_a_round_that_was_charged_before_a_crash_is_skipped(crash, caplog):
    plan, recorder = banded(rounds=6), Kept(crash)
    ledger = plan.ledger()
    with pytest.raises(OSError, match="power cut"):
        start(Stub(), plan, rounds=6, ledger=ledger, recorder=recorder)
    assert [charge["round"] for charge in ledger.charges] == list(range(1, crash + 1))
    before = recorder.states[-1] if recorder.states else None
    again = Kept()
    options = {"recorder": again, "resume_from": before, "evaluate_every": 4, "evaluate": "diagnostic"}
    _, strategy = start(Stub(), plan, rounds=6, ledger=ledger, **options)
    assert [line["round"] for line in again.lines] == list(range(crash + 1, 7))
    assert [charge["round"] for charge in ledger.charges] == list(range(1, 7))
    assert strategy.plan == plan  # noise, T and n stay
    assert ledger.spent() == pytest.approx(epsilon(plan.planned(), plan.delta))
    assert f"round(s) {crash} are skipped" in caplog.text


def test_a_round_that_crashed_before_its_charge_is_run():
    plan = banded(rounds=4)
    ledger = plan.ledger()
    for number in (1, 2):
        ledger.charge_round(number, plan.round_event(number), **{"for": "training"})
    done = Checkpoint(2, np.zeros((1, 4), np.float32), LAYOUT, None)
    recorder = Kept()
    start(Stub(), plan, rounds=4, ledger=ledger, resume_from=done, recorder=recorder)
    assert [line["round"] for line in recorder.lines] == [3, 4]


def test_after_a_crash_no_row_cancels_noise_of_before():
    plan = banded(rounds=4, noise=2.0, identifier_share=0.0)
    ledger = plan.ledger()
    ledger.charge_round(1, plan.round_event(1), **{"for": "training"})
    done = Checkpoint(1, np.zeros((1, 4), np.float32), LAYOUT, None)
    moved, _ = start(Stub(lambda *_: []), plan, rounds=2, ledger=ledger, resume_from=done)
    fresh = gaussian(Streams(0).stream("noise", 2, 2), 1.0, (1, 1, 4))[0, 0]
    expected = fresh / plan.matrix[1, 0] * 2.0 * 0.5 / (CLIENTS / 2)
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


def test_a_round_with_two_exchanges_is_refused():
    class Twice(FedAvg):
        def round(self, number, models):
            first = yield from self.sums(self.training(), models)
            yield from self.sums(self.training(), models)
            return self.step(models, first)

    with pytest.raises(LedgerError, match="round 1 was charged before"):
        start(Stub(), banded(), Twice, rounds=1)


def test_the_noise_of_a_replaced_model_restarts_and_that_of_its_copy_goes_on(monkeypatch):
    """All clients choose model 0, so that model 1 is replaced by a copy of it."""
    calls = []
    monkeypatch.setattr(Banded, "rearrange", lambda self, state, origins, *rest: calls.append(origins.tolist()))
    plan = banded(rounds=4, k=2, noise=0.5)
    recorder = Kept()
    start(Stub(), plan, IFCA, rounds=4, recorder=recorder, reseeding=Reseeding(every=2, until=1.0))
    assert calls == [[0, -1], [0, 1]]
    assert recorder.lines[1]["reseeded"] == [[0, 1]]


def test_a_search_for_the_number_of_models_keeps_the_noise_of_those_that_remain(monkeypatch):
    """All clients choose the model ahead of the others; the rest is replaced, then removed."""
    calls, rearrange = [], Banded.rearrange

    def recorded(self, state, origins, factors, shared=0):
        before = [row.copy() for row in state._past]
        rearrange(self, state, origins, factors, shared)
        calls.append((origins.tolist(), before, [row.copy() for row in state._past], factors))

    monkeypatch.setattr(Banded, "rearrange", recorded)
    recorder = Kept()
    start(Stub(), banded(rounds=20, k=4, noise=0.5), IFCA, rounds=20, recorder=recorder, clusters=0)
    many = [len(state.models) for state in recorder.states[:14]]  # the search ends after 14 of 20 rounds
    assert [len(origins) for origins, *_ in calls] == many
    assert len(set(many)) > 1
    assert any(-1 in origins for origins, *_ in calls)
    for origins, before, after, factors in calls:
        for old, new in zip(before, after, strict=True):
            for block, origin in enumerate(origins):
                expected = 0 * old[:, 0] if origin < 0 else old[:, origin] * factors[block]
                np.testing.assert_array_equal(new[:, block], expected)
