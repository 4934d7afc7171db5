"""Watches masked rounds in the processes of a deployment, by the folder WATCHED: for tests alone.

Clients write what they add up, before and after masks, as ROUND-CLIENT.clear and .sent. Those that ``plan.json`` names
under ``lost`` do not send their vector, those under ``gone`` nothing after it. The one under ``leak`` sends it in the
clear, in the last round, and the ServerApp writes it into the run folder. The ServerApp waits, with all that it has
received, until its ROUND-PID.waits is removed.

Python imports this module when a process starts with this folder in PYTHONPATH.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from pathlib import Path

WATCHED = Path(os.environ["WATCHED"])


def watch_clients(module):
    plan = json.loads((WATCHED / "plan.json").read_text())
    masked, answer = module.MaskingClient.masked, module.answer

    def watched(masking, vector):
        sent = masked(masking, vector)
        if (masking.client, masking.round.number) == (plan["leak"], plan["rounds"]):
            sent = vector
        for ending, values in (("clear", vector), ("sent", sent)):
            path = WATCHED / f"{masking.round.number}-{masking.client}.{ending}"
            path.write_bytes(values.astype("<u4").tobytes())
        return sent

    def answered(message_type, content, client, cohort=None):
        if message_type == "train.survivors" and client.client_id in plan["gone"]:
            raise module.ClientError("gone")
        reply = answer(message_type, content, client, cohort)
        if message_type == "train.masked" and client.client_id in plan["lost"]:
            raise module.ClientError("lost")
        return reply

    module.MaskingClient.masked, module.answer = watched, answered


def watch_server(module):
    plan = json.loads((WATCHED / "plan.json").read_text())
    unmasked_sum = module.unmasked_sum

    def watched(round, openings, vectors, shares):
        total = unmasked_sum(round, openings, vectors, shares)
        if round.number == plan["rounds"]:
            (run,) = (WATCHED.parent / "trial" / "runs").glob("*/")
            (run / "leaked").write_bytes(vectors[plan["leak"]].tobytes())
        waits = WATCHED / f"{round.number}-{os.getpid()}.waits"
        waits.touch()
        while waits.exists():
            time.sleep(0.1)
        return total

    module.unmasked_sum = watched


WATCHERS = {"coterie.client.masked_rounds": watch_clients, "coterie.rounds.masked_exchange": watch_server}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as usual, and changes some once they are loaded."""

    def find_spec(self, name, path, target=None):
        if name not in WATCHERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            WATCHERS[name](module)

        spec.loader.exec_module = loaded
        return spec


sys.meta_path.insert(0, _Finder())
