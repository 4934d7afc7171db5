"""Attack on a client's gradients through Flower's ClientApp, by a malicious server.

Every draw uses a new client with its own data, state folder and budget. The server sends several requests with a
network in which only the victim's record has a gradient. Each reply is one full-batch step and must be charged; the
claim is the total charge in the clients' ledgers.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict

from coterie.audit.findings import Finding, FloatArray, dominance_test, zero_count_test
from coterie.audit.runs import quiet
from coterie.client.app import app
from coterie.datasets.settings import DataSettings
from coterie.engine.in_process import LocalGrid
from coterie.fields import RECORD_LEVEL
from coterie.models.settings import TrainingSettings
from coterie.privacy import RecordPlan, read_ledger
from coterie.privacy.ledger_lines import count_events
from coterie.wire import ClientConfig
from coterie.wire.messages import CONFIG, MODELS, TRAIN, Layout, pack_models, read_reply

# Randomness is secret, so audits are not reproducible: fewer than one in a million fails by chance.
_CONFIDENCE = 1 - 1e-7
_LAYOUT = Layout(("output.weight", "output.bias"), ((2, 2), (2,)))
# Records (1, 0) of class 0 have no gradient, the victim (0, 1) of class 1 has (1, -1) in every weight that it uses.
_MODEL = np.array([[50, 50, -50, -50, 0, 0]], np.float32)
_VICTIM = np.array([0, 1, 0, -1, 1, -1]) / 2
_RECORDS, _REPLIES, _LR = 4, 4, 0.05
_PLAN = RecordPlan(
    num_examples=_RECORDS, batch_size=_RECORDS, rounds=_REPLIES, epsilon=50.0, delta=1e-5, noise_multiplier=1.0
)
_BUDGET = "budget.jsonl"
_CONFIG: dict[str, Any] = {
    **ClientConfig(
        data=DataSettings(
            dataset="own",
            input_shape="2",
            num_classes=2,
            clients=1,
            groups="1",
            shift="none",
            samples_per_client=_RECORDS,
        ),
        training=TrainingSettings(model="linear", local_epochs=1, batch_size=_RECORDS, lr=_LR, device="cpu"),
    ).to_record(),
    "record-plans": json.dumps([asdict(_PLAN)]),
}


def audit_client_app(clients: int) -> list[Finding]:
    """Audit one additional record in a client's data; randomness is secret, because budgets exclude seeds."""
    LocalGrid(1)  # messages need a sender
    worlds, uncharged, charged = [], 0, {}
    with quiet(), tempfile.TemporaryDirectory() as folder:
        for victim in (False, True):
            x, y = np.tile(np.array([[1, 0]], np.float32), (_RECORDS, 1)), np.zeros(_RECORDS, np.int64)
            x[-1], y[-1] = (0, 1), 1
            last = _RECORDS if victim else _RECORDS - 1
            data = Path(folder) / f"data-{victim}.npz"
            np.savez(data, x=x[:last], y=y[:last])
            scores = np.zeros((clients, 1))
            for number in range(clients):
                state = Path(folder, f"{victim}-{number}")
                scores[number] = sum(_update(state, data, round) @ _VICTIM for round in range(1, _REPLIES + 1))
                charged = dict(count_events(read_ledger(state / _BUDGET)[1]))
                uncharged += _REPLIES - sum(charged.values())
            worlds.append(scores)
    name = f"additional record, {_REPLIES} replies of the ClientApp"
    return [
        zero_count_test("dp-sgd", "uncharged reply of the ClientApp", uncharged),
        dominance_test("dp-sgd", name, charged, (worlds[0], worlds[1]), confidence=_CONFIDENCE),
    ]


def _update(state: Path, data: Path, round: int) -> FloatArray:
    node: dict[str, Any] = {"client-id": 0, "state-dir": str(state), "epsilon": 50.0, "delta": 1e-5, "data": str(data)}
    node |= {"guarantee": RECORD_LEVEL, "input-shape": "2", "num-classes": 2, "budget-file": str(state / _BUDGET)}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
    content = RecordDict({MODELS: pack_models(_MODEL, _LAYOUT), CONFIG: ConfigRecord({**_CONFIG, "round": round})})
    reply = app(Message(content, dst_node_id=1, message_type=TRAIN, group_id=str(round)), context).content
    update = read_reply(reply, client_id=0, round=round, num_clusters=1, layout=_LAYOUT).update
    return -update.astype(np.float64) * _RECORDS / (_LR * _PLAN.clip_norm)
