"""Training that diverges, such as a regression on unscaled numbers, ends in a message that names the way out."""

import numpy as np
import pytest
from kit import run_folders

from coterie.client import handlers
from coterie.server import RunError
from coterie.wire.messages import DIVERGED

SETTINGS = {"dataset": "own", "input-shape": "4", "num-classes": 0, "strategy": "fedavg", "clients": 3, "rounds": 6}
SETTINGS |= {"sampling-rate": 1, "batch-size": 10, "local-epochs": 5, "lr": 0.1, "device": "cpu", "evaluate": "off"}


@pytest.fixture
def execute(tmp_path):
    """A regression of three clients whose features and targets have this scale."""

    def call(scale, **settings):
        rng = np.random.default_rng(0)
        for client in range(3):
            x = rng.normal(size=(60, 4))
            np.savez(tmp_path / f"client-{client}.npz", x=scale * x, y=scale * (x @ [1, -2, 3, 0.5]))
        changed = {name.replace("_", "-"): value for name, value in settings.items()}
        return run_folders.execute(tmp_path / f"run-{scale}", {**SETTINGS, "data-dir": str(tmp_path), **changed})

    handlers._log_divergence.cache_clear()
    return call


def test_a_run_of_which_no_update_is_finite_ends_after_three_rounds(execute, caplog):
    with pytest.raises(RunError) as refusal:
        execute(1000.0, privacy_unit="none")
    message = str(refusal.value)
    assert message.startswith("round 3: no client has sent a valid update: 9 were dropped, most often (9 times): ")
    assert message.endswith(f"the update contains NaN or Inf: {DIVERGED}")
    assert "client 0: feature " in caplog.text  # before round 1
    assert "counted from 0, reaches " in caplog.text


def test_the_same_data_scaled_are_fitted(execute, caplog):
    assert execute(1.0, privacy_unit="none", evaluate="diagnostic")["diagnostics"]["accuracy"] > 0.99
    assert DIVERGED not in caplog.text
    assert "reaches" not in caplog.text


def test_models_that_grow_without_bound_are_warned_of_once(execute, caplog):
    """Finite updates of the first rounds count: no reply ends a run."""
    result = execute(100.0, privacy_unit="none", local_epochs=1, batch_size=60, lr=0.02)
    assert result["rounds"] == 6
    warnings = [line for line in caplog.messages if "a parameter of the models is" in line]
    assert len(warnings) == 1
    assert warnings[0].endswith(DIVERGED)


@pytest.mark.parametrize("seed", ["auto", 1])
def test_at_client_level_the_run_is_not_cut_short_and_the_client_says_why(execute, caplog, seed):
    """Rounds are released regardless of replies; the server withholds reasons."""
    with pytest.raises(RunError, match="no valid reply in the whole run: 18 were dropped"):
        execute(1000.0, privacy_unit="client", epsilon=8, delta=1e-3, seed=seed)
    assert caplog.messages.count(f"the update of a client contains NaN or Inf: {DIVERGED}") == 1


def test_at_record_level_no_update_is_lost_to_divergence(execute, caplog):
    result = execute(1e20, privacy_unit="record", samples_per_client=48, delta=1e-3)
    assert result["rounds"] == 6
    assert "dropped" not in caplog.text
    assert "counted from 0, reaches " in caplog.text
