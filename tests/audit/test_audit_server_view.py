"""The audit of the secure mechanism finds noise that the least honest survivors do not have, and long vectors."""

import pytest

from coterie.audit import audit
from coterie.audit.server_view import server_attacks
from coterie.privacy import Secure
from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.secure_aggregation import NoiseLayers

DRAWS = 30_000
ATTACKS = ["7 survivors, oversized update", "8 survivors, without surplus", "10 survivors, without surplus"]


def failed():
    return [f.attack for f in audit(["secure"], draws=DRAWS, parts=["mechanisms"]) if f.failed]


@pytest.mark.slow
def test_every_claim_holds_and_every_control_is_broken():
    findings = audit(["secure"], draws=DRAWS, parts=["mechanisms"])
    assert [f.failed for f in findings] == [False] * 7
    assert [f.control for f in findings] == [False, False, False, True, True, True, False]
    attacks = server_attacks()
    assert attacks[0].survivors - attacks[0].plan.corrupt == attacks[0].plan.threshold(1) - 2 == 5


@pytest.mark.slow
def test_noise_that_counts_on_corrupt_clients_is_found(monkeypatch):
    monkeypatch.setattr(
        Secure, "layers", property(lambda plan: NoiseLayers.of(plan.noise_multiplier * STEPS, plan.clients, 7, 0))
    )
    monkeypatch.setattr(Secure, "check_layers", lambda *of: None)
    assert failed() == [f"the server and 2 of {name}" for name in ATTACKS]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["update", "count", "sign"])
def test_a_part_that_is_not_charged_is_found(monkeypatch, part):
    def factors(plan):
        update, count, half = really(plan)
        return (
            STEPS if part == "update" else update,
            STEPS if part == "count" else count,
            half + 9000 * (part == "sign"),
        )

    really = Secure.factors.fget
    monkeypatch.setattr(Secure, "factors", property(factors))
    monkeypatch.setattr(Secure, "check_noise", lambda plan: None)
    assert "vector of any update" in failed()


@pytest.mark.slow
def test_a_norm_that_is_not_clipped_is_found(monkeypatch):
    import numpy as np

    def on_grid(plan, update):
        return np.rint(np.nan_to_num(update, posinf=0, neginf=0).clip(-1e9, 1e9) * STEPS).astype(np.int64)

    monkeypatch.setattr(Secure, "on_grid", on_grid)
    assert "vector of any update" in failed()
