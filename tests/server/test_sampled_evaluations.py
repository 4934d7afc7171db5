"""Which evaluations of a run read a sample of the held-out records."""

from contextlib import closing

import pytest

from coterie.engine import in_process
from coterie.server import RunConfig, RunFolder
from coterie.server.simulate import simulate
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
    config = RunConfig({**SETTINGS, "evaluate": evaluate, "seed": 0, "out": str(tmp_path / "run")})
    with closing(RunFolder.create(tmp_path / "run", config)) as folder:
        simulate(folder, cores=1)
    assert asked == {number: {value} for number, value in enumerate(sampled, 1)}
