"""``coterie data scales``: charged before it reads on, refused beyond the budget, and never mixed with runs."""

import json

import pytest

from coterie.privacy import ClientLedger, Event

SCHEMA = """version = 1
[label]
column = "died"
classes = ["no", "yes"]
[[columns]]
name = "age"
type = "number"
mean = 60
scale = 30
range = [0, 120]
[[columns]]
name = "weight"
type = "number"
mean = 70
scale = 20
missing = "mean"
"""


@pytest.fixture
def places(tmp_path):
    (tmp_path / "schema.toml").write_text(SCHEMA)
    lines = [f"{40 + number % 41},{number},no" for number in range(400)]
    (tmp_path / "t.csv").write_text("age,weight,died\n" + "\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def scales(coterie, places):
    def scales(*words):
        return coterie(
            "data",
            "scales",
            places / "t.csv",
            "--schema",
            places / "schema.toml",
            "--ledger",
            places / "l.jsonl",
            *words,
        )

    return scales


def test_a_release_is_charged_and_near(scales, places):
    status, out, err = scales("--epsilon", 2, "--json")
    assert (status, err) == (0, "")
    (proposal,) = json.loads(out)["columns"]
    assert proposal["name"] == "age"
    assert 54 < proposal["mean"] < 66
    assert 8 < proposal["scale"] < 25
    _, charge = map(json.loads, (places / "l.jsonl").read_text().splitlines())
    assert (charge["released"], charge["columns"]) == ("quantiles", ["age"])
    assert charge["noise_multiplier"] == pytest.approx(json.loads(out)["noise-multiplier"])


def test_the_text_is_a_part_of_a_schema_and_says_what_it_cost(scales):
    status, out, _ = scales("--epsilon", 2)
    assert status == 0
    assert out.startswith("# Quartiles of noisy histograms: epsilon = 2, delta = 1e-06, charged to l.jsonl.")
    assert '[[columns]]\nname = "age"\nmean = ' in out


def test_a_second_release_beyond_the_budget_is_refused_and_prints_nothing(scales, places):
    assert scales("--epsilon", 2)[0] == 0
    before = (places / "l.jsonl").read_text()
    status, out, err = scales("--epsilon", 2)
    assert (status, out) == (1, "")
    assert "above the budget of 2" in err
    assert (places / "l.jsonl").read_text() == before


def test_a_larger_budget_allows_two(scales):
    assert [scales("--epsilon", 1, "--budget", 4)[0] for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--epsilon", 0), "must be positive"),
        (("--epsilon", "nan"), "must be positive"),
        (("--epsilon", "inf"), "must be positive"),
        (("--epsilon", 1, "--budget", "nan"), "must be positive"),
        (("--epsilon", 1, "--budget", -1), "must be positive"),
        (("--epsilon", 1, "--delta", 1), "delta in (0, 1)"),
        (("--epsilon", 1, "--column", "weight"), "no numeric column with a range in the schema; there are 'age'"),
        (("--epsilon", 1, "--column", "died"), "--column died"),
    ],
)
def test_what_cannot_be_released_is_refused_before_a_charge(scales, places, words, said):
    status, out, err = scales(*words)
    assert (status, out) == (1, "")
    assert said in err
    assert not (places / "l.jsonl").exists()


def test_a_ledger_of_runs_is_refused(scales, places):
    ledger = ClientLedger(1e-6, 8.0, places / "l.jsonl")
    ledger.spend(1, {Event(1.0, 9.0): 1})
    ledger.close()
    status, _, err = scales("--epsilon", 1)
    assert status == 1
    assert "has charges of runs; name another file" in err


def test_too_much_noise_gives_no_proposal(scales):
    status, out, _ = scales("--epsilon", 0.01)
    assert status == 0
    assert "# too noisy for a proposal" in out
