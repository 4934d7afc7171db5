"""A deployed client's noisy histogram of held-out records: what it counts, charges, refuses and repeats."""

import numpy as np
import pytest
from test_hostile_server import CHEAP, CONFIGURED, LAYOUT, WORLDS, World, plans, sender  # noqa: F401
from torch import nn

from coterie.client.record_level import held_out_counts
from coterie.datasets import Shard, TestSet
from coterie.models import float32_arrays
from coterie.privacy.ledger_lines import HELD_OUT
from coterie.privacy.score_histograms import CELLS, UnitCounts
from coterie.wire.messages import Layout

ASKED = {"private": True, "histogram": True, "cluster": 0}
COVERED = plans(noise_multiplier=6.0, held_out_epsilon=1.0)


@pytest.fixture
def world(tmp_path):
    def made(data=None, **node):
        path = tmp_path / f"world-{len(list(tmp_path.iterdir()))}"
        return World(path, WORLDS["another label"][0] if data is None else data, **node)

    return made


def trained(world):
    assert world.ask("train", CHEAP | COVERED)[0] == "reply"
    return world


def test_one_charge_pays_for_one_histogram(world):
    asked = trained(world())
    before = asked.charges
    kind, arrays, told, metrics = asked.ask("evaluate", COVERED | ASKED)
    assert (kind, arrays, metrics) == ("reply", {}, ["diagnostics"])
    assert told == [{"client-id": 0, "round": 1, **{key: told[0][key] for key in told[0] if key == "padding"}}]
    (charge,) = asked.charges[len(before) :]
    assert charge[HELD_OUT] == 1.0


def test_a_repeated_request_gets_the_same_noise_and_pays_once(world, monkeypatch):
    asked, seen = trained(world()), []
    right = UnitCounts.noisy
    monkeypatch.setattr(UnitCounts, "noisy", lambda *given: seen.append(right(*given)) or seen[-1])
    for _ in range(3):
        assert asked.ask("evaluate", COVERED | ASKED)[0] == "reply"
    assert len(seen) == 1
    assert sum(HELD_OUT in charge for charge in asked.charges) == 1


def test_the_budget_of_held_out_records_ends(world):
    asked = trained(world())
    kinds = [asked.ask("evaluate", COVERED | ASKED | {"round": number})[0] for number in range(2, 9)]
    assert kinds == ["reply"] * 5 + ["error"] * 2  # the budget is 5


REFUSED = {
    "not planned": (CHEAP, ASKED),
    "exact": (COVERED, {**ASKED, "private": False}),
    "no histogram": (COVERED, {**ASKED, "histogram": False}),
    "diagnostics": (COVERED, {}),
    "a seed": (COVERED, {**ASKED, "seed": 1}),
    "more than its budget": (plans(held_out_epsilon=3.0, noise_multiplier=6.0, epsilon=2.0), ASKED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_before_data_are_read(world, name):
    asked = trained(world())
    terms, change = REFUSED[name]
    kind, text = asked.ask_unread("evaluate", terms | change)
    assert (kind, "rejects" in text) == ("error", True)


def test_several_models_are_refused(world):
    asked = trained(world())
    models = np.zeros((2, LAYOUT.size), np.float32)
    kind, text, *_ = asked.ask("evaluate", COVERED | ASKED, models)
    assert (kind, "of one model" in text) == ("error", True)
    assert not any(HELD_OUT in charge for charge in asked.charges)


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ('releases = ["updates"]', "error"),
        ('releases = ["updates", "scores"]', "error"),
        ('releases = ["updates", "histograms"]', "reply"),
        ("epsilon-per-run = 0.5", "error"),
        ("epsilon-per-run = 1.0", "reply"),
        ("epsilon-per-month = 0.5", "error"),
    ],
)
def test_the_owner_decides(world, tmp_path, policy, kind):
    path = tmp_path / "policy.toml"
    path.write_text("")
    asked = trained(world(policy=str(path)))
    path.write_text(policy)
    assert asked.ask("evaluate", COVERED | ASKED)[0] == kind
    assert sum(HELD_OUT in charge for charge in asked.charges) == (kind == "reply")


def counted(test, train=3, same=False):
    """Counts with records of score 2 x whose label is whether x is positive, and noise that is always the same."""
    network = nn.Linear(1, 2, bias=False)
    layout = Layout.of(float32_arrays(network))
    model = np.array([[-1.0, 1.0]], np.float32)
    x = np.array(test, np.float32).reshape(-1, 1)
    y = (x[:, 0] > 0).astype(np.int64)
    others = x if same else np.zeros((train, 1), np.float32)
    shard = Shard(0, 0, others, y if same else np.zeros(train, np.int64), TestSet(x, y))
    return held_out_counts(network, layout, model, shard).noisy(1.0, np.random.default_rng(0))


@pytest.mark.parametrize("further", [1.0, -1.0, 0.0, 1e30, -1e30, np.inf, np.nan])
def test_a_held_out_record_is_counted_once_and_a_training_record_never(further):
    base = [0.5, -0.5, 2.0]
    moved = counted([*base, further]) - counted(base)
    assert sorted(moved) == [0.0] * 63 + [1.0]
    np.testing.assert_array_equal(counted(base, train=3), counted(base, train=4))


@pytest.mark.parametrize("records", [[], [1.0], [1.0, -1.0]])
def test_where_nothing_is_held_out_nothing_is_counted(records):
    np.testing.assert_array_equal(counted(records, same=True), counted([]))
    np.testing.assert_array_equal(counted([]), UnitCounts(np.zeros(CELLS)).noisy(1.0, np.random.default_rng(0)))
