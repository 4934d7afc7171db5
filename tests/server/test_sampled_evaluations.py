"""Which evaluations of a run read a sample of the held-out records."""

import pytest
from kit.site_tables import simulated

from coterie.engine import in_process
from coterie.wire.messages import CONFIG

SETTINGS = {"clients": 200, "rounds": 3, "local-epochs": 1, "evaluate-every": 1, "strategy": "ifca"}


@pytest.mark.parametrize(("evaluate", "sampled"), [("diagnostic", [True, True, False]), ("private", [False] * 3)])
def test_the_last_and_private_evaluations_read_all_records(tmp_path, monkeypatch, evaluate, sampled):
    asked, handle = {}, in_process.handle

    def recorded(message_type, content, clients):
        if message_type == "evaluate":
            config = content.config_records[CONFIG]
            asked.setdefault(config["round"], set()).add(config["sampled"])
        return handle(message_type, content, clients)

    monkeypatch.setattr(in_process, "handle", recorded)
    simulated(tmp_path / "run", {**SETTINGS, "evaluate": evaluate, "seed": 0})
    assert asked == {number: {value} for number, value in enumerate(sampled, 1)}
