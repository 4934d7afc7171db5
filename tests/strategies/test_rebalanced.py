"""RR-Cluster by its name: a base method with a rebalance-min above 0."""

import numpy as np
import pytest
from kit.toys import trained

from coterie.privacy import Joint, NoPrivacy, RRSlot
from coterie.rounds.run_state import StrategyError
from coterie.server import ConfigError, RunConfig
from coterie.strategies import IFCA, FedCAM, FeSEM, RRCluster
from coterie.strategies.rr_cluster import RRClusterSettings

BASES = {"ifca": IFCA, "fesem": FeSEM, "fedcam": FedCAM}
SMALL = {"clients": 12, "clusters": 2, "groups": "3:1", "rounds": 2, "local-epochs": 1, "samples-per-client": 10}
SMALL |= {"sampling-rate": 1.0, "evaluate": "off", "seed": 3, "epsilon": 50}
PLANNED = {"clients": 40, "num_clusters": 2, "sampling_rate": 0.5, "rounds": 2, "rebalance_min": 3}
PLANNED |= {"noise_multiplier": 1, "clip_norm": 1, "epsilon": 50, "identifier_share": 0.2, "delta": 1e-3}


@pytest.mark.parametrize("unit", ["client", "none"])
@pytest.mark.parametrize("base", BASES)
def test_it_is_its_base_with_rebalancing(base, unit, tmp_path):
    common = {**SMALL, "privacy-unit": unit}
    ours = trained(tmp_path / "ours", {**common, "strategy": "rr-cluster", "base": base, "rebalance-min": 4})
    theirs = trained(tmp_path / "theirs", {**common, "strategy": base, "rebalance-min": 4})
    assert ours.keys() == theirs.keys() != set()
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("base", BASES)
def test_an_instance_is_a_strategy_on_its_base(base):
    plan = Joint(**PLANNED)
    strategy = RRCluster(plan, RRClusterSettings(base=base))
    assert isinstance(strategy, RRCluster)
    assert isinstance(strategy, BASES[base])
    assert (strategy.memory, strategy.knows_label) == (BASES[base].memory, BASES[base].knows_label)
    assert RRCluster.robust == BASES[base].robust
    assert RRCluster.units == BASES[base].units
    assert RRCluster.default_settings("client") == BASES[base].default_settings("client")


def test_a_subclass_keeps_its_class():
    settings = RRClusterSettings(base="fesem")
    strategy = RRCluster(Joint(**PLANNED), settings)
    own = type("Own", (type(strategy),), {})(Joint(**PLANNED), settings)
    assert type(own).__name__ == "Own"
    assert isinstance(own, FeSEM)
    assert own.settings == settings


def test_its_base_decides_which_mechanisms_cover_it():
    plan = RRSlot(**PLANNED)
    RRCluster(plan)
    with pytest.raises(StrategyError, match=r"rr-cluster keeps client state between rounds.* use mechanism joint"):
        RRCluster(plan, RRClusterSettings(base="fesem"))


@pytest.mark.parametrize(
    ("clients", "rate", "clusters", "minimum"), [(1000, 0.1, 4, 8), (1000, 0.1, 2, 16), (6, 0.5, 2, 1)]
)
def test_b_is_a_third_of_the_expected_members(clients, rate, clusters, minimum):
    shape = {"clients": clients, "sampling-rate": rate, "clusters": clusters, "groups": "1"}
    assert RunConfig({"strategy": "rr-cluster", "privacy-unit": "none", **shape}).plan.rebalance_min == minimum
    assert RunConfig({"strategy": "ifca", "privacy-unit": "none", **shape}).plan.rebalance_min == 0
    given = RunConfig({"strategy": "rr-cluster", "privacy-unit": "none", **shape, "rebalance-min": 1.5})
    assert given.plan.rebalance_min == 1.5


def test_without_rebalancing_it_is_refused():
    with pytest.raises(StrategyError, match="requires rebalance-min of at least 1, or auto; otherwise use its base"):
        RRCluster(NoPrivacy(clients=4, num_clusters=2, sampling_rate=1.0, rounds=2))
    with pytest.raises(ConfigError, match="requires rebalance-min of at least 1"):
        RunConfig({"strategy": "rr-cluster", "rebalance-min": 0})
    with pytest.raises(ConfigError, match=r"rr-cluster\.base = 'lcfl': must be ifca, fesem, fedcam"):
        RunConfig({"strategy": "rr-cluster", "base": "lcfl"})
    with pytest.raises(ConfigError, match=r"more clusters|at most qM/k"):
        RunConfig({"strategy": "rr-cluster", "clients": 6, "sampling-rate": 0.1, "groups": "1"})
