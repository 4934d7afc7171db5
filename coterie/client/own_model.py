"""What a deployed client keeps in its state folder for its owner, after a reply is made.

Its own model is the received one, fitted to its records, for ``coterie predict`` at the site; the log states what the
fit brought. Its report says how good the received model is on its held-out records. Nothing of either is sent: no reply
depends on whether a client has one, or on what it says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path

import numpy as np
from flwr.common.logger import log
from safetensors.numpy import save

from coterie import __version__
from coterie import models as networks
from coterie.client.cohort import Cohort
from coterie.client.identity import Client
from coterie.client.layers import Additive
from coterie.client.personal import OwnModels, personalised, trained_alone
from coterie.client.scores import accuracies, outputs
from coterie.datasets import Shard
from coterie.files import private_folder, read_object, write_atomic
from coterie.tasks import Performance, beats_constant
from coterie.wire import EvaluateRequest, TrainRequest
from coterie.wire.model_card import ModelCard, scaling_of

_ABOUT = "exact figures of held-out records, which no epsilon covers: for the owner of the data alone, never sent"


def own_model_folder(folder: str | Path, client_id: int) -> Path:
    """Return the folder of a client's own model, for ``coterie predict``."""
    return Path(folder) / f"client-{client_id}.own-model"


def report_file(folder: str | Path, client_id: int) -> Path:
    """Return the file of a client's report."""
    return Path(folder) / f"client-{client_id}.report.json"


def keep_for_owner(cohort: Cohort, client: Client) -> None:
    """Keep what a client's owner asks for, once its reply is made: its own model, and a report on the received one.

    A failure is logged, and changes nothing else.
    """
    if not client.folder or not isinstance(cohort.request, EvaluateRequest | TrainRequest):
        return
    for is_wanted, keep, name in (
        (client.personalize is not None, _keep_own_model, "model of its own"),
        (client.local_report, _write_report, "report"),
    ):
        try:
            if is_wanted:
                keep(cohort, client, Path(client.folder))
        except Exception as error:  # the reply must not depend on it
            log(WARNING, "client %s has no %s of this round: %s", client.client_id, name, error)


def _keep_own_model(cohort: Cohort, client: Client, folder: Path) -> None:
    method = client.personalize or "none"
    if cohort.layers.own.names:
        log(INFO, "client %s: its layers are its own already, personalize has no effect", client.client_id)
        return
    began = time.monotonic()
    shard = cohort.shard(client)
    if not len(shard.y):
        return
    network, layout, training = cohort.network, cohort.layers.whole, cohort.local_training
    one = replace(cohort, clients=[client])
    released = cohort.models[one.choose()]
    rng = np.random.default_rng(client.client_id)
    own = personalised(network, layout, released, [shard], method, training, [rng], cohort.initial)
    target = own_model_folder(folder, client.client_id)
    private_folder(target)
    metadata = {"about": json.dumps(_card(cohort, own).to_json())}
    tensors = {name: np.asarray(values, order="C") for name, values in own.layout.split(own.models[0]).items()}
    write_atomic(target / "cluster-0.safetensors", save(tensors, metadata=metadata), sync=False)
    figures = _figures(cohort, [OwnModels(network, layout, released), own], shard)
    alone = _accuracy_alone(cohort, client.run, shard, target / "alone.json")
    if alone is not None:
        figures += f", {100 * alone:.1f} % by a model trained alone on its records"
    log(
        INFO,
        "client %s fitted the model of round %s to its own records (%s, %.1f s): %s; %s is never sent",
        client.client_id,
        cohort.request.round,
        method,
        time.monotonic() - began,
        figures,
        target.name,
    )


def _figures(cohort: Cohort, compared: Sequence[OwnModels], shard: Shard) -> str:
    """Return the accuracies of the released and the own model on records that were held out."""
    if shard.test.x is shard.x or not len(shard.test.y):
        return "no records are held out to compare them"
    test = shard.test.x, shard.test.y, cohort.local_training.device, cohort.task
    before, after = (accuracies(one.network, one.layout, one.models, *test)[0] for one in compared)
    return f"{100 * before:.1f} % before and {100 * after:.1f} % after, of {len(shard.test.y)} held-out records"


def _accuracy_alone(cohort: Cohort, run: str, shard: Shard, file: Path) -> float | None:
    """Return the accuracy of a model that the client trains alone, once in a run; None without held-out records."""
    if shard.test.x is shard.x or not len(shard.test.y):
        return None
    if file.exists() and (stored := read_object(file)).get("run") == run:
        return float(stored["accuracy"])
    network, layout = cohort.network, cohort.layers.whole
    if cohort.request.additive:
        return None
    training, rng = cohort.local_training, np.random.default_rng(0)
    trained = trained_alone(network, layout, cohort.initial(), [shard], [rng], training)
    x, y, device = shard.test.x, shard.test.y, training.device
    accuracy = float(accuracies(network, layout, trained, x, y, device, training.task)[0])
    write_atomic(file, json.dumps({"run": run, "accuracy": accuracy}).encode(), sync=False)
    return accuracy


def _card(cohort: Cohort, own: OwnModels) -> ModelCard:
    """Return the card of a model without any guarantee."""
    data, training = cohort.config.data, cohort.config.training
    known = data.facts()
    return ModelCard(
        strategy=cohort.config.strategy or "unknown",
        dataset=data.dataset,
        model=training.model,
        adapters=training.adapters,
        frozen=training.frozen,
        pretrained=cohort.config.pretrained_sha256,
        trainable_parameters=networks.sizes(own.network)[0],
        parameters=networks.sizes(own.network)[1],
        features=training.features,
        kind=known.kind,
        shape=known.shape,
        num_classes=known.task.num_outputs,
        task=cohort.task.given_name,
        weights=cohort.task.weights or None,
        cluster=0,
        clusters=1,
        additive=isinstance(own.network, Additive),
        constants=cohort.config.constants,
        columns=known.schema.feature_names if known.schema else known.columns or None,
        table_schema=data.table_schema or None,
        classes=(known.schema.class_names or None) if known.schema else None,
        scaling="by the schema of the table" if known.schema else scaling_of(known.kind),
        rounds=cohort.request.round,
        unit="none",
        certificate="none: the own model of one site, not to be given away",
        version=__version__,
    )


# ---- the report ---------------------------------------------------------------------------------------------------


def _write_report(cohort: Cohort, client: Client, folder: Path) -> None:
    shard = cohort.shard(client)
    if shard.test.x is shard.x or not len(shard.test.y):
        log(INFO, "client %s: no records are held out, so there is no report", client.client_id)
        return
    file = report_file(folder, client.client_id)
    metrics = _report_metrics(cohort, client, shard)
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


def _report_metrics(cohort: Cohort, client: Client, shard: Shard) -> Performance:
    """Return the metrics of the one received model, or of that which suits the training records best."""
    own = replace(cohort, clients=[client])
    model = cohort.layers.join(cohort.models[own.choose()], own.own)
    found = outputs(cohort.network, cohort.layers.whole, model, shard.test, cohort.local_training.device)[0]
    if not np.isfinite(found).all():
        raise ValueError("the model's outputs are not finite")
    return cohort.task.measure(shard.test.y, found)(None)
