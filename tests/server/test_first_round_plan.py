"""RC-DPFL's round 1 as a run plans it: from public numbers, unless settings say otherwise."""

import numpy as np
from kit.tables import for_rows

from coterie import datasets, models
from coterie.privacy import FirstRound, Ledger, RecordPlan, certificate, read_ledger
from coterie.privacy.check import check
from coterie.server import RunConfig

RUN = {"strategy": "rc-dpfl", "clients": 12, "samples-per-client": 100, "rounds": 3, "batch-size": 10}
RUN |= {"local-epochs": 1, "delta": 1e-4}
NUMBERS = {"num_examples": 100, "batch_size": 10, "rounds": 3, "epsilon": 8.0, "delta": 1e-4, "first_batch_size": 100}
NUMBERS |= {"selection": "gumbel", "selections": 2}


def plan(**settings):
    config = RunConfig({**RUN, **{name.replace("_", "-"): value for name, value in settings.items()}})
    (own,) = config.plan.client_plans
    return own


def numbers(config):
    size = sum(np.size(v) for v in models.initialise(config.training.model, *config.examples, 0).values())
    return FirstRound(clients=12, groups=config.models, parameters=size)


def test_auto_follows_from_public_numbers():
    for clusters in (2, 4):
        config = RunConfig({**RUN, "clusters": clusters})
        (own,) = config.plan.client_plans
        expected = numbers(config).calibrated(**NUMBERS, clip_norm=own.clip_norm, loss_noise=own.loss_noise)
        assert own == expected
        assert own.cost() <= 8.0


def test_no_data_are_read(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("data are read")

    expected = plan()
    RecordPlan._calibrated.cache_clear()
    monkeypatch.setattr(datasets.Federation, "__init__", refuse)
    monkeypatch.setattr(datasets.Federation, "shard", refuse)
    assert plan() == plan(seed=1) == plan(groups="1:2") == expected


def test_explicit_values_are_unchanged():
    one = RecordPlan.calibrated(**NUMBERS)
    own = plan(first_round_noise_ratio=1.0)
    assert (own.noise_multiplier, own.noise(True), own.batch(True)) == (one.noise_multiplier, one.noise(True), 100)
    twice = RecordPlan.calibrated(first_noise_ratio=2.0, **NUMBERS)
    own = plan(first_round_noise_ratio=2.0)
    assert (own.noise_multiplier, own.first_noise_multiplier) == (twice.noise_multiplier, 2 * twice.noise_multiplier)
    half = RecordPlan.calibrated(**{**NUMBERS, "first_batch_size": 50})
    own = plan(first_batch_size=50)
    assert (own.noise_multiplier, own.noise(True), own.batch(True)) == (half.noise_multiplier, half.noise(True), 50)
    own = plan(clusters=0)  # finding the number of groups needs the signal of a full batch with the noise of the others
    assert (own.noise_multiplier, own.noise(True), own.batch(True)) == (one.noise_multiplier, one.noise(True), 100)
    own = plan(noise_multiplier=1.7)
    assert (own.noise_multiplier, own.noise(True)) == (1.7, 1.7)


@for_rows("strategy", ["f-cdpfl", "km-cdpfl", "oracle"])
def test_methods_that_do_not_cluster_first_updates_have_one_noise(strategy):
    own = plan(strategy=strategy)
    assert own.noise(True) == own.noise_multiplier
    assert own.batch(True) == own.batch_size


def test_the_certificate_lists_what_auto_became(tmp_path):
    profiles = "epsilon=2; epsilon=8 samples-per-client=60 batch-size=6"
    level = RunConfig({**RUN, "profiles": profiles}).plan
    ledger = level.ledger(tmp_path / "ledger.jsonl", seed=None)
    for number in (1, 2, 3):
        for event, count in level.worst.part(first=number == 1, chooses=number > 1).items():
            ledger.charge_round(number, event, count)
    assert isinstance(ledger, Ledger)
    ledger.close()
    paper = certificate(*read_ledger(tmp_path / "ledger.jsonl"))
    for shown, own in zip(paper["profiles"], level.client_plans, strict=True):
        assert shown["first_batch_size"] == own.num_examples
        assert shown["first_noise_multiplier"] == own.first_noise_multiplier
        assert shown["epsilon"] <= own.epsilon
    assert check(*read_ledger(tmp_path / "ledger.jsonl"), paper) == []
