"""Released models do not change by a redesign: each strategy, unit and mechanism against recorded numbers."""

import json

import pytest

from tests.golden import NUMBERS, cases, released, summary

pytestmark = pytest.mark.slow

RECORDED = json.loads(NUMBERS.read_text())
CASES = cases()


def test_every_case_is_recorded():
    assert RECORDED.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_models_are_as_recorded(name):
    facts, arrays = released(CASES[name])
    expected, found = dict(RECORDED[name]), summary(facts, arrays)
    chaotic = name.startswith("ppfc-gan")  # its GANs and autoencoder amplify rounding: norms alone are comparable
    models = expected.pop("models")
    assert found["models"].keys() == models.keys()
    for model, numbers in models.items():
        if chaotic:
            assert found["models"][model][0] == pytest.approx(numbers[0], rel=0.3), model
        else:
            assert found["models"][model] == pytest.approx(numbers, rel=1e-3, abs=1e-3), model
    for key, value in expected.items():
        if chaotic and key == "accuracy":
            continue
        exact = value is None or not isinstance(value, float)
        assert found[key] == (value if exact else pytest.approx(value, rel=1e-6)), key
