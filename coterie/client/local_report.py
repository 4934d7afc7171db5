"""A deployed client's report on its held-out records: written in its state folder for its owner, and never sent.

No reply depends on whether a client writes one, or on what it says.
"""

from __future__ import annotations

import json
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from flwr.common.logger import log

from coterie.client.cohort import Cohort
from coterie.client.identity import Client
from coterie.client.scores import outputs
from coterie.datasets import Shard
from coterie.files import write_atomic
from coterie.tasks import beats_constant
from coterie.wire import EvaluateRequest, TrainRequest

if TYPE_CHECKING:
    from coterie.tasks import Performance

_ABOUT = "exact figures of held-out records, which no epsilon covers: for the owner of the data alone, never sent"


def report_file(folder: str | Path, client_id: int) -> Path:
    """Return the file of a client's report."""
    return Path(folder) / f"client-{client_id}.report.json"


def keep_local_report(cohort: Cohort, client: Client) -> None:
    """Write how good the received model is on a client's held-out records, if its owner asks for it.

    A failure is logged, and changes nothing else.
    """
    if not client.local_report or not client.folder or not isinstance(cohort.request, EvaluateRequest | TrainRequest):
        return
    try:
        _write(cohort, client, report_file(client.folder, client.client_id))
    except Exception as error:  # the reply must not depend on it
        log(WARNING, "client %s has no report of this round: %s", client.client_id, error)


def _write(cohort: Cohort, client: Client, file: Path) -> None:
    shard = cohort.shard(client)
    if shard.test.x is shard.x or not len(shard.test.y):
        log(INFO, "client %s: no records are held out, so there is no report", client.client_id)
        return
    metrics = _metrics(cohort, client, shard)
    report = {
        "about": _ABOUT,
        "run": client.run or None,
        "round": cohort.request.round,
        "held-out-records": len(shard.test.y),
        "metrics": metrics.to_json(),
    }
    write_atomic(file, (json.dumps(report, indent=2) + "\n").encode(), sync=False)
    compared = {True: "better than", False: "not better than", None: "not comparable with"}[beats_constant(metrics)]
    log(
        INFO,
        "client %s: the received model of round %s is %s the best constant prediction, on %s held-out records; "
        "%s is never sent",
        client.client_id,
        cohort.request.round,
        compared,
        len(shard.test.y),
        file.name,
    )


def _metrics(cohort: Cohort, client: Client, shard: Shard) -> Performance:
    """Return the metrics of the one received model, or of that which suits the training records best."""
    own = replace(cohort, clients=[client])
    model = cohort.layers.join(cohort.models[own.choose()], own.own)
    found = outputs(cohort.network, cohort.layers.whole, model, shard.test, cohort.local_training.device)[0]
    if not np.isfinite(found).all():
        raise ValueError("the model's outputs are not finite")
    return cohort.task.measure(shard.test.y, found)(None)
