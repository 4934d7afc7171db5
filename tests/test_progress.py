"""The remaining time of a step, from its reports."""

import pytest
from kit.tables import for_rows

from coterie import logs


@pytest.fixture
def clock(monkeypatch):
    """The time, in a list of one number."""
    now = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    return now


def test_a_report_states_the_remaining_time_of_its_step(clock):
    said = []
    report = logs.estimated(said.append)
    for seconds, text in (
        (0, "client 3: epoch 1 of 5"),
        (10, "client 3: epoch 2 of 5"),
        (10, "client 4: epoch 1 of 5"),
    ):
        clock[0] += seconds
        report(text)
    clock[0] += 10
    report("client 3: epoch 4 of 5")
    report("client 3: epoch 5 of 5")
    report("5 of 5 clients replied")
    assert said == [
        "client 3: epoch 1 of 5",
        "client 3: epoch 2 of 5, about 30 s left",
        "client 4: epoch 1 of 5",
        "client 3: epoch 4 of 5, about 10 s left",
        "client 3: epoch 5 of 5",
        "5 of 5 clients replied",
    ]


@for_rows(
    ("seconds", "text"), [(0, "1 s"), (89.4, "89 s"), (90, "2 min"), (3600, "60 min"), (7200, "2 h"), (100_000, "28 h")]
)
def test_a_remaining_time_is_said_in_words(seconds, text):
    assert logs.remaining(seconds) == f"about {text} left"
