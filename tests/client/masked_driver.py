"""Kills a client's process by SIGKILL while it answers the steps of masked rounds; run by test_masked_kills.py.

``python masked_driver.py FOLDER KILLS`` prints a summary as JSON, and fails if a client answers a step with two
different replies, if an answered training is not charged, or if a sum is wrong.
"""

import json
import os
import pickle
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from kit.masked_sites import STEPS, Hidden, Server, Sites, plan_of

from coterie.client.state import ClientError
from coterie.deploy.certificates import create
from coterie.privacy.secure_aggregation import MaskingClient
from coterie.wire.masked import read_masked, read_opening, read_shares, read_signature
from coterie.wire.messages import CONFIG

READ = dict(zip(STEPS, (read_opening, read_masked, read_signature, read_shares), strict=True))
VICTIM, ROUNDS = 0, 1000
REFUSED = b"refused"


def asked_in_a_process(sites, step, content, seconds=None):
    """Return the bytes of a reply, or None from a process that was killed before it replied."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            reply = recorddict_to_proto(sites.ask(VICTIM, step, content)).SerializeToString()
        except ClientError:
            reply = REFUSED
        with os.fdopen(write, "wb") as pipe:
            pipe.write(len(reply).to_bytes(8, "big") + reply)
        os._exit(0)
    os.close(write)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said[8:] if len(said) > 8 and len(said) == 8 + int.from_bytes(said[:8], "big") else None


def contents(server, step):
    """The message of a step, and another one for the same step."""
    other = server.content(step, VICTIM)
    if step in STEPS[:2]:
        other.config_records[CONFIG]["lr"] = 0.5
    elif step == STEPS[2]:
        other = server.survivors_content(sorted(server.vectors)[:-1])
    else:
        other = server.unmask_content(dict(list(server.signatures.items())[:-1]))
    return server.content(step, VICTIM), other


def play(sites, plan, number, folder, rng, seconds, left):
    """One round, whose victim is killed in every step while ``left`` kills are due; returns their number."""
    server, kills = Server(sites, plan, number), 0
    others = [client for client in server.cohort if client != VICTIM]
    run = dict(zip(STEPS, server.steps, strict=True))
    into = dict(zip(STEPS, (server.openings, server.vectors, server.signatures, server.shares), strict=True))
    for step in STEPS:
        before = len(sites.charges(VICTIM))
        run[step](others)
        message, other = contents(server, step)
        began, replies, due = time.monotonic(), [], left > kills
        limit = rng.uniform(0, seconds[step]) if due and step in seconds else None
        first = asked_in_a_process(sites, step, message, limit)
        if limit is None:
            seconds.setdefault(step, time.monotonic() - began)
        kills += first is None
        later = [asked_in_a_process(sites, step, content) for content in (other, message, message)]
        replies = {reply for reply in (first, *later) if reply not in (None, REFUSED)}
        assert len(replies) == 1, (step, len(replies))
        if step == "train.masked":
            assert len(sites.charges(VICTIM)) > before
        if step in STEPS[1:3] and first is None and later[0] != REFUSED:
            return kills  # it has another view, or has signed another list, and does nothing more in this round
        content = recorddict_from_proto(ProtoRecordDict.FromString(replies.pop()))
        if step == "train.open":
            key = server.keys[VICTIM]
            server.openings[VICTIM], _ = read_opening(content, client_id=VICTIM, round=server.round, key=key)
        elif step == "train.masked":
            server.read_vector(VICTIM, content, message)
        else:
            into[step][VICTIM] = READ[step](content, client_id=VICTIM, round=server.round)
    hidden = Hidden()
    for client in server.vectors:
        hidden[client], noise = pickle.loads((folder / f"hidden-{client}").read_bytes())
        hidden.noise[client] = server.round.layers, noise
    np.testing.assert_array_equal(server.total(), hidden.total(revealing=server.shares))
    assert not sites.state(VICTIM, "open-round").exists()
    return kills


def main(folder, kills):
    """Play rounds until so many processes are killed."""
    torch.set_num_threads(1)
    original = MaskingClient.masked

    def masked(self, vector):
        (folder / f"hidden-{self.client}").write_bytes(pickle.dumps((vector, self._state.noise)))
        return original(self, vector)

    MaskingClient.masked = masked
    pki = create(folder / "pki", 6, ["superlink"]).folder
    sites, plan = Sites(folder, pki, 6), plan_of(6, rounds=ROUNDS, epsilon=1e4)
    rng, seconds, made, number = random.Random(0), {}, 0, 0
    while made < kills:
        number += 1
        made += play(sites, plan, number, folder, rng, seconds, kills - made)
    charges = sites.charges(VICTIM)
    answered = len({tuple(charge["masked"]) for charge in charges})
    print(json.dumps({"kills": made, "rounds": number, "charges": len(charges), "charged_rounds": answered}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
