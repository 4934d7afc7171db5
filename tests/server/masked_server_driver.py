"""Kills the server of masked rounds by SIGKILL between any two of its steps; run by test_masked_server_kills.py.

``python masked_server_driver.py FOLDER KILLS`` prints a summary as JSON. The clients are in this process, and a server
is a child that it forks: a run that is created, or resumed after a kill. After a kill, some messages are delivered
again, as Flower may do.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from itertools import count
from multiprocessing import Pipe
from pathlib import Path

import torch
from flwr.app import Error, Message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid
from kit.masked_sites import CLASSES, CLUSTERS, Sites

from coterie.client.state import ClientError
from coterie.deploy.certificates import create
from coterie.engine.nodes import SingleProcessGrid
from coterie.privacy import read_ledger
from coterie.server import RunConfig, RunFolder, run
from coterie.wire import digest
from coterie.wire.messages import CONFIG

STEPS = ("train.open", "train.masked", "train.survivors", "train.unmask")
CLIENTS, VECTORS = 6, STEPS.index("train.masked")
#: Moments of a step: before its messages arrive, after one or half of the clients, after all, after all replies.
MOMENTS = ("sent", "one", "half", "all", "replied")


def settings(rounds):
    """Of a run whose clients all take part in every round."""
    return {
        "dataset": "own",
        "input-shape": "1x4x4",
        "num-classes": CLASSES,
        "model": "linear",
        "device": "cpu",
        "batch-size": 8,
        "strategy": "ifca",
        "clusters": CLUSTERS,
        "clients": CLIENTS,
        "privacy-unit": "client",
        "mechanism": "secure",
        "masks": True,
        "sampling-rate": 1.0,
        "epsilon": 1e4,
        "delta": 1e-4,
        "rounds": rounds,
        "evaluate": "off",
    }


class PipedGrid(SingleProcessGrid):
    """The server's half: sends a batch of messages through a pipe, and receives the replies to them."""

    get_nodes = Grid.get_nodes

    def __init__(self, pipe):
        super().__init__(CLIENTS)
        self._pipe = pipe

    def _answers(self, requests):
        sent = [(m.metadata.dst_node_id - 1, m.metadata.message_type, packed(m.content)) for m in requests]
        self._pipe.send(sent)
        for message, reply in zip(requests, self._pipe.recv(), strict=True):
            yield Message(Error(1, "refused") if reply is None else unpacked(reply), reply_to=message)


def packed(content):
    return recorddict_to_proto(content).SerializeToString()


def unpacked(content):
    return recorddict_from_proto(ProtoRecordDict.FromString(content))


def serve(folder, pipe, rounds):
    """One process of the server: it creates or resumes the run, and runs to the end."""
    status = 1
    try:
        ready = (folder / "config.toml").exists()
        opened = RunFolder.resume(folder, {}) if ready else RunFolder.create(folder, RunConfig(settings(rounds)))
        run(opened, PipedGrid(pipe))
        opened.close()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


class Clients:
    """All clients, and what has left them.

    Attributes:
        replies: by client, round and step: the digest of the message, the message, and the reply.
    """

    def __init__(self, sites, folder):
        self.sites, self.folder, self.replies = sites, folder, {}

    def ask(self, client, message_type, content):
        """Return the bytes of a reply; None if it is an error. Checks charges, and that no step has two answers."""
        message = unpacked(content)
        try:
            reply = packed(self.sites.ask(client, message_type, message))
        except ClientError:
            reply = None
        if message_type not in STEPS:
            return reply
        config, step = message.config_records[CONFIG], STEPS.index(message_type)
        id = config["run"], config["round"], config["attempt"]
        charged = Counter(charge["round"] for charge in read_ledger(self.folder / "ledger.jsonl")[1])
        assert charged[id[1]] == 1, f"round {id[1]} is charged {charged[id[1]]} times when its step {step + 1} arrives"
        if reply is not None:
            known = self.replies.setdefault((client, id, step), (digest(message_type, message), content, reply))
            assert known[2] == reply, f"client {client} answers step {step + 1} of {id} with different bytes"
            if step == VECTORS:
                assert list(id) in [charge["masked"] for charge in self.sites.charges(client)]
        return reply

    def repeat(self, chosen):
        """Deliver some messages again; return how many were answered."""
        answered = 0
        for client, id, step in chosen:
            _, content, reply = self.replies[client, id, step]
            again = self.ask(client, STEPS[step], content)
            assert again in (None, reply)
            answered += again is not None
        return answered


def session(clients, folder, rounds, step, moment, spared, rng):
    """One process of the server, killed at a moment of a step, after some rounds; return whether it was killed."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve(folder, theirs, rounds)
    theirs.close()
    passed, before = count(), set(clients.replies)
    killed = False
    while not killed:
        try:
            batch = ours.recv()
        except EOFError:
            break
        due = bool(batch) and batch[0][1] == step and next(passed) == spared
        some = {"sent": 0, "one": 1, "half": len(batch) // 2}.get(moment, len(batch)) if due else len(batch)
        replies = [clients.ask(*message) for message in batch[:some]]
        if not due or moment == "replied":
            ours.send(replies)
        if due:
            time.sleep(rng.uniform(0, 0.03) if moment == "replied" else 0)
            os.kill(pid, signal.SIGKILL)
            killed = True
    _, status = os.waitpid(pid, 0)
    ours.close()
    new = sorted(set(clients.replies) - before)
    latest = [entry for entry in new if entry[1] == max(id for _, id, _ in new)]
    if os.WIFSIGNALED(status):
        clients.repeat(rng.sample(latest, min(3, len(latest))))
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def main(folder, kills):
    """Resume a run until it was killed so often, and is at its end."""
    torch.set_num_threads(1)
    points = [(step, moment) for step in STEPS for moment in MOMENTS]
    # Every third session ends a round before the one in which it is killed.
    rounds = kills + sum(number % 3 == 2 for number in range(kills)) + 2
    pki = create(folder / "pki", CLIENTS, ["superlink"]).folder
    sites, rng = Sites(folder / "sites", pki, CLIENTS), random.Random(0)
    clients = Clients(sites, folder / "run")
    made = 0
    for number in range(kills):
        sites.run += 1  # Flower numbers every submission
        killed = session(clients, folder / "run", rounds, *points[number % len(points)], int(number % 3 == 2), rng)
        assert killed, f"the run ended before kill {number + 1}"
        made += killed
    sites.run += 1
    assert not session(clients, folder / "run", rounds, "none", "none", 0, rng)
    answered = clients.repeat(sorted(clients.replies))
    result = json.loads((folder / "run" / "result.json").read_text())
    charges = Counter(charge["round"] for charge in read_ledger(folder / "run" / "ledger.jsonl")[1])
    assert charges == Counter(range(1, rounds + 1)), charges
    for client in range(CLIENTS):
        masked = [list(id) for one, id, step in clients.replies if (one, step) == (client, VECTORS)]
        assert sorted(charge["masked"] for charge in sites.charges(client)) == sorted(masked)
    summary = {"kills": made, "rounds": rounds, "skipped": result["skipped_rounds"], "certified": result["certified"]}
    summary |= {"replies": len(clients.replies), "repeated": answered}
    summary["open"] = [client for client in range(CLIENTS) if sites.state(client, "open-round").exists()]
    print(json.dumps(summary))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
