"""Clients of different plans: the certificate covers what each of them can spend, at one delta."""

import functools
import math
from bisect import bisect_left
from collections import Counter

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from scipy.stats import norm

from coterie.privacy import Ledger, RecordPlan, certificate, epsilon
from coterie.privacy.check import check
from coterie.privacy.mechanisms.dp_sgd import RecordLevel
from coterie.server.config import RunConfig
from coterie.wire import TrainRequest

pytestmark = pytest.mark.slow

FEDAVG = {"strategy": "fedavg", "privacy-unit": "record", "clients": 24, "samples-per-client": 60, "rounds": 6}
CHOICES = {"strategy": "rc-dpfl", "clients": 24, "samples-per-client": 60, "rounds": 6}

# Profiles whose budgets, deltas, batches and numbers of records differ.
MIXTURES = {
    "the same but for delta": "epsilon=2.01; epsilon=2 delta=0.5",
    "cheap batches beside dear ones": "epsilon=10 batch-size=1; epsilon=9.9 batch-size=60",
    "budgets": "epsilon=1; epsilon=4; epsilon=8",
    "small budgets with much noise": "epsilon=0.1; epsilon=0.5 delta=1e-3",
    "deltas": "epsilon=4 delta=1e-5; epsilon=4 delta=1e-2; epsilon=4 delta=1e-3",
    "delta against epsilon": "epsilon=8 delta=1e-6; epsilon=2 delta=1e-2",
    "batches": "batch-size=1; batch-size=7; batch-size=60",
    "records": "samples-per-client=20; samples-per-client=60; samples-per-client=40",
    "records and batches": "samples-per-client=20 batch-size=20; samples-per-client=60 batch-size=2",
    "one that spends all at once": "epsilon=30 batch-size=60 delta=1e-2; epsilon=1 batch-size=1 delta=1e-4",
    "twice the same": "epsilon=3; epsilon=3; epsilon=3 delta=1e-3",
    "all of it": "epsilon=2 delta=1e-3 batch-size=5; epsilon=6 samples-per-client=30; epsilon=9 delta=1e-2",
}


@pytest.fixture(autouse=True, scope="module")
def losses_once():
    """dp-accounting computes the losses of a step by loops in Python; here once for each step."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(privacy_loss_distribution.from_gaussian_mechanism)
        patch.setattr(privacy_loss_distribution, "from_gaussian_mechanism", once)
        yield


def independent(rounds, plan, delta):
    """Epsilon of rounds, given as (whether it is round 1, whether it chooses), by dp-accounting's own accountant."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for (first, chooses), times in Counter(map(tuple, rounds)).items():
        batch, noise = plan.batch(first), plan.noise(first)
        step = dp_accounting.PoissonSampledDpEvent(batch / plan.num_examples, dp_accounting.GaussianDpEvent(noise))
        accountant.compose(step, times * plan.local_epochs * (plan.num_examples // batch))
        if chooses:
            choice = dp_accounting.GaussianDpEvent(1 / shift_of_bounded_range(plan.selection_epsilon))
            accountant.compose(choice, times)
    return accountant.get_epsilon(delta)


def shift_of_bounded_range(range_):
    return 2 * norm.ppf(0.5 + 0.5 * math.tanh(range_ / 4))


def charged(level, rounds):
    """The certificate, header and charges of a run that charged these rounds: (number, first, chooses)."""
    ledger = level.ledger(seed=None)
    header = {"ledger": 1, "delta": ledger.delta, "epsilon": ledger.budget, "accountant": ledger.accountant}
    header |= terms(level)
    for number, first, chooses in rounds:
        for event, count in level.charges(TrainRequest(first_batch=first, choice=chooses)).items():
            ledger.charge_round(number, event, count, **{"for": "training"})
    return certificate(header, ledger.charges), header, ledger.charges


def terms(level):
    """What the first line of a ledger holds beside the budget."""
    written = {}
    original = Ledger.__init__

    def remember(self, *words, **named):
        written.update(words[4])
        original(self, *words, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "__init__", remember)
        level.ledger(seed=None)
    return written


def affordable_rounds(plan, rounds):
    """The rounds that a client's own ledger accepts, from the first one on: after round 1 all are alike."""

    def over(count):
        return independent(rounds[:count], plan, plan.delta) > plan.epsilon

    return rounds if not over(len(rounds)) else rounds[: bisect_left(range(1, len(rounds)), True, key=over)]


@pytest.mark.parametrize(("settings", "noise"), [(FEDAVG, 1.0), (CHOICES, "auto")], ids=["fedavg", "rc-dpfl"])
@pytest.mark.parametrize("profiles", MIXTURES.values(), ids=MIXTURES)
def test_no_client_spends_more_than_the_certificate_says(profiles, settings, noise):
    level = RunConfig({**settings, "profiles": profiles, "noise-multiplier": noise}).plan
    first = settings is CHOICES
    asked = [(first and number == 1, first and number > 1) for number in range(1, level.rounds + 1)]
    afforded = len(affordable_rounds(level.worst, asked))
    paper, *_ = charged(level, [(n, *kind) for n, kind in enumerate(asked[: max(0, afforded - 1)], start=1)])
    deltas = [plan.delta for plan in level.client_plans]
    assert paper["delta"] == min(deltas)
    assert paper["epsilon"] == max(each["epsilon"] for each in paper["profiles"])
    assert [each["delta_budget"] for each in paper["profiles"]] == deltas
    for each, plan in zip(paper["profiles"], level.client_plans, strict=True):
        own = independent(affordable_rounds(plan, asked), plan, paper["delta"])
        assert own * (1 - 2e-3) <= each["epsilon"] <= paper["epsilon"]  # both round up
        if noise == "auto" and plan.delta == paper["delta"]:
            assert each["epsilon"] <= plan.epsilon == each["epsilon_budget"]
    assert paper["certified"] is all(
        d <= 1 / plan.num_examples for d, plan in zip(deltas, level.client_plans, strict=True)
    )


def test_the_largest_budget_is_not_the_largest_epsilon():
    profiles = "epsilon=10 batch-size=1; epsilon=9.9 batch-size=60"
    paper, *_ = charged(RunConfig({**FEDAVG, "profiles": profiles, "noise-multiplier": 1, "rounds": 10}).plan, [])
    cheap, dear = paper["profiles"]
    assert cheap["epsilon"] < 4.2 < 8 < dear["epsilon"] <= 9.9
    assert paper["epsilon"] == dear["epsilon"]
    assert [each["clients"] for each in (cheap, dear)] == [12, 12]
    assert (dear["num_examples"], dear["batch_size"], dear["noise_multiplier"]) == (60, 60, 1.0)


def test_a_delta_of_one_half_buys_more_at_the_delta_of_the_others():
    paper, *_ = charged(RunConfig({**FEDAVG, "profiles": "epsilon=2.01; epsilon=2 delta=0.5"}).plan, [])
    strict, lax = paper["profiles"]
    assert paper["delta"] == pytest.approx(1 / 6000)
    assert strict["epsilon"] <= 2.01
    assert paper["epsilon"] == lax["epsilon"] > 10
    assert paper["certified"] is False
    assert any("delta = 0.5 is above 1/60" in reason for reason in paper["reasons"])


@pytest.mark.parametrize("repeated", [1, 4])
def test_a_repeated_round_counts_for_every_profile(repeated):
    """The run's own client has enough left; the others' ledgers say what they spend."""
    profiles = "epsilon=20 delta=1e-4; epsilon=2 delta=1e-4; epsilon=2 delta=1e-3 batch-size=20"
    level = RunConfig({**CHOICES, "profiles": profiles}).plan
    asked = [(number, number == 1, number > 1) for number in range(1, 7)]
    asked.insert(repeated, asked[repeated - 1])
    before, *_ = charged(level, [])
    paper, header, charges = charged(level, asked[: repeated + 1])
    assert check(header, charges, paper) == []
    for each, once, plan in zip(paper["profiles"], before["profiles"], level.client_plans, strict=True):
        own = independent(affordable_rounds(plan, [kind for _, *kind in asked]), plan, paper["delta"])
        assert own * (1 - 2e-3) <= each["epsilon"]
        assert once["epsilon"] <= each["epsilon"]
        if plan.delta == paper["delta"]:
            assert each["epsilon"] <= plan.epsilon


def test_a_round_in_which_one_profile_takes_all_records_and_another_a_few():
    """The run's client has one kind of step, in every round; another's first round is of another kind."""
    numbers = {"rounds": 4, "epsilon": 50.0, "delta": 1e-4, "noise_multiplier": 2.0, "num_examples": 60}
    whole = RecordPlan(**numbers, batch_size=60, first_batch_size=60)
    few = RecordPlan(**numbers | {"epsilon": 40.0}, batch_size=6, first_batch_size=60)
    level = RecordLevel.of((whole, few), clients=4, num_clusters=1, weights="equal")
    paper, *_ = charged(level, [(1, True, False), (1, True, False), (1, True, False)])
    least = epsilon(few.part(first=True) + few.part(first=True) + few.planned(), 1e-4)
    assert least * (1 - 1e-6) <= paper["profiles"][1]["epsilon"] < 1.2 * least


def test_profiles_without_a_client_are_left_out():
    profiles = "epsilon=1; epsilon=2; epsilon=50"
    level = RunConfig({**FEDAVG, "clients": 2, "groups": 1, "profiles": profiles}).plan
    assert level.epsilon == level.worst.epsilon == 2.0
    paper, *_ = charged(level, [])
    assert [each["clients"] for each in paper["profiles"]] == [1, 1]
    assert paper["epsilon"] <= 2.0
