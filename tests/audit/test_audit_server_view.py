"""The audit of the secure mechanism finds noise that the least honest survivors do not have, and long vectors."""

import pytest

from coterie.audit import audit
from coterie.audit.server_view import server_attacks
from coterie.privacy import Secure
from coterie.secure.integers import STEPS

DRAWS = 30_000


def failed():
    return [f.attack for f in audit(["secure"], draws=DRAWS, parts=["mechanisms"]) if f.failed]


def test_every_claim_holds_and_every_control_is_broken():
    findings = audit(["secure"], draws=DRAWS, parts=["mechanisms"])
    assert [f.failed for f in findings] == [False] * 4
    assert [f.control for f in findings] == [False, True, True, False]
    attacks = server_attacks()
    assert attacks[0].plan.contributors == 5  # 7 of 10 must stay, and 2 of these work with the server


def test_noise_that_counts_on_corrupt_clients_is_found(monkeypatch):
    monkeypatch.setattr(
        Secure, "noise_steps", property(lambda plan: plan.noise_multiplier * STEPS / plan.threshold(1) ** 0.5)
    )
    assert failed() == ["the server and 2 of 7 survivors, oversized update"]


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
    assert "vector of any update" in failed()


def test_a_norm_that_is_not_clipped_is_found(monkeypatch):
    import numpy as np

    def on_grid(plan, update):
        return np.rint(np.nan_to_num(update, posinf=0, neginf=0).clip(-1e9, 1e9) * STEPS).astype(np.int64)

    monkeypatch.setattr(Secure, "on_grid", on_grid)
    assert "vector of any update" in failed()
