"""Evaluation of received models by a client, on its held-out records: exact reports, and noisy histograms of scores."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from coterie.client.cohort import Cohort, Labels
from coterie.client.personal import OwnModels, personalised
from coterie.client.record_level import noisy_histograms
from coterie.client.scores import accuracies, losses, outputs
from coterie.datasets import TestSet
from coterie.fields import MAX_SAMPLED_TESTS, TRUSTED_SERVER
from coterie.privacy.score_histograms import MAX_CLASSES, count_outputs
from coterie.wire import EvaluateRequest
from coterie.wire.messages import DIAGNOSTICS, REPLY, SCORE_COUNTS
from coterie.wire.requests import MaskedEvaluateRequest

# Test examples of a client with personal layers, whose network is evaluated for this client only.
_MAX_OWN_TESTS = 500

#: Accuracy, training loss (None if not requested) and number of test examples of a client.
Score: TypeAlias = tuple[float, float | None, int]


def evaluate(cohort: Cohort) -> list[RecordDict]:
    """Return the accuracy of each client's model, chosen on its training data or assigned, on held-out data."""
    if cohort.plans:
        return _histograms(cohort)
    return [RecordDict({DIAGNOSTICS: report}) for report in reports(cohort)]


def reports(cohort: Cohort) -> list[MetricRecord]:
    """Return what each client finds about its model: accuracy, loss, cluster, and counts of scores if requested."""
    if cohort.request.assign != "nearest":
        labels = cohort.choose()
    else:
        labels = cohort.last_labels(otherwise=np.full(len(cohort.clients), -1))
        if (labels < 0).any():
            labels = np.where(labels >= 0, labels, cohort.choose())
    score = _scores_of_personal_models if cohort.layers.own.names else _scores_of_shared_models
    rows = zip(cohort.clients, cohort.shards, cohort.labels(labels), score(cohort, labels), strict=True)
    own = _own_models(cohort, labels)
    replaced = zip(_accuracies_of_own_models(cohort, own), _score_counts(cohort, labels, own), strict=True)
    return [
        MetricRecord(
            {
                "client-id": client.client_id,
                "accuracy": accuracy,
                **({} if loss is None or math.isinf(loss) else {"loss": loss}),  # messages hold finite numbers only
                "cluster": int(label),
                "group": shard.group,
                "num-examples": size,
                **own_accuracy,
                **counts,
            }
        )
        for (client, shard, label, (accuracy, loss, size)), (own_accuracy, counts) in zip(rows, replaced, strict=True)
    ]


def _histograms(cohort: Cohort) -> list[RecordDict]:
    """Return noisy histograms of scores at record level; nothing else of held-out records is released."""
    return [
        RecordDict(
            {
                REPLY: ConfigRecord({"client-id": client.client_id, "round": cohort.request.round}),
                DIAGNOSTICS: MetricRecord({SCORE_COUNTS: counts}),
            }
        )
        for client, counts in zip(cohort.clients, noisy_histograms(cohort), strict=True)
    ]


@dataclass
class _LatestModels:
    """Accuracies of the models that this process evaluated last, by test set; messages to many clients repeat them."""

    key: tuple[object, ...] = ()
    scores: dict[TestSet, dict[int, float]] = field(default_factory=dict)


_LATEST = _LatestModels()


def _test_accuracies(cohort: Cohort, test: TestSet, used: set[int]) -> dict[int, float]:
    """Return the accuracies of these received models on a test set, by index; others may be there."""
    device, sampled = cohort.local_training.device, cohort.samples_tests
    digest = hashlib.sha256(np.ascontiguousarray(cohort.models).data).digest()
    key = (digest, cohort.model_spec, cohort.request.additive, cohort.layers.whole, device, sampled)
    if key != _LATEST.key:
        _LATEST.key, _LATEST.scores = key, {}
    scores = _LATEST.scores.setdefault(test, {})
    if new := sorted(used - scores.keys()):
        examples = _test_examples(cohort, test)
        found = accuracies(cohort.network, cohort.layers.whole, cohort.models[new], *examples, device, cohort.task)
        scores.update(zip(new, found.tolist(), strict=True))
    return scores


def _scores_of_shared_models(cohort: Cohort, labels: Labels) -> list[Score]:
    """Evaluate every model once per test set whose clients use it: the clients of a group share one."""
    used: dict[TestSet, set[int]] = {}
    for shard, label in zip(cohort.shards, labels.tolist(), strict=True):
        used.setdefault(shard.test, set()).add(label)
    hits = {test: _test_accuracies(cohort, test, models) for test, models in used.items()}
    sizes = {test: len(_test_examples(cohort, test)[1]) for test in used}
    training_losses: list[float | None] = [None] * len(labels)
    if cohort.reports_losses:
        training_losses = cohort.losses[np.arange(len(labels)), labels].tolist()
    return [
        (hits[shard.test][label], loss, sizes[shard.test])
        for shard, label, loss in zip(cohort.shards, labels.tolist(), training_losses, strict=True)
    ]


def _scores_of_personal_models(cohort: Cohort, labels: Labels) -> list[Score]:
    network, layout, device = cohort.network, cohort.layers.whole, cohort.local_training.device
    whole = cohort.layers.join(cohort.models[labels], cohort.own)
    scores: list[Score] = []
    for client, shard, vector in zip(cohort.clients, cohort.shards, whole, strict=True):
        x, y = _part(shard.test, client.client_id)
        accuracy = accuracies(network, layout, vector[None], x, y, device, cohort.task)[0]
        loss = None
        if cohort.reports_losses:
            loss = float(losses(network, layout, vector[None], [shard], device, cohort.local_training.loss)[0, 0])
        scores.append((float(accuracy), loss, len(y)))
    return scores


def _own_models(cohort: Cohort, labels: Labels) -> OwnModels | None:
    """Return the models that the clients fit to their own records, if they report of these; otherwise None.

    In diagnostics only simulated clients report it: no noise would cover it. Neither does a client with its own budget,
    except in a masked evaluation, which it charges.
    """
    request, network, layout = cohort.request, cohort.network, cohort.layers.whole
    assert isinstance(request, EvaluateRequest)
    silent = any(
        client.deployed and (client.guarantee != TRUSTED_SERVER or not request.private) for client in cohort.clients
    )
    if request.personalize is None or (silent and not isinstance(request, MaskedEvaluateRequest)):
        return None
    released = cohort.layers.join(cohort.models[labels], cohort.own)
    training = cohort.local_training
    return personalised(
        network, layout, released, cohort.shards, request.personalize, training, cohort.rngs(), cohort.initial
    )


def _accuracies_of_own_models(cohort: Cohort, own: OwnModels | None) -> list[dict[str, float]]:
    """Return the accuracy of the model that each client fits to its own records.

    It replaces that of the released model where the server releases a noisy mean of it.
    """
    request, device = cohort.request, cohort.local_training.device
    assert isinstance(request, EvaluateRequest)
    if own is None:
        return [{} for _ in cohort.clients]
    key = "accuracy" if request.private else "personal-accuracy"
    tests = [_part(shard.test, client.client_id) for client, shard in zip(cohort.clients, cohort.shards, strict=True)]
    models = zip(own.models, tests, strict=True)
    found = [accuracies(own.network, own.layout, model[None], *test, device, cohort.task)[0] for model, test in models]
    return [{key: float(accuracy)} for accuracy in found]


def _score_counts(cohort: Cohort, labels: Labels, own: OwnModels | None) -> list[dict[str, list[float]]]:
    """Return the counts of scores by label of each client's held-out records, if the server asks for a histogram.

    They are of the model whose accuracy it reports. A client whose owner does not allow histograms sends none; masked
    ones are allowed by then.
    """
    request = cohort.request
    if not (isinstance(request, EvaluateRequest) and request.private and request.histogram):
        return [{} for _ in cohort.clients]
    if own is None:
        network, layout = cohort.network, cohort.layers.whole
        models = cohort.layers.join(cohort.models[labels], cohort.own)
    else:
        network, layout, models = own.network, own.layout, own.models
    reports: list[dict[str, list[float]]] = []
    for client, shard, model in zip(cohort.clients, cohort.shards, models, strict=True):
        allowed = isinstance(request, MaskedEvaluateRequest) or client.allows("histograms")
        if allowed and 2 <= cohort.federation.num_classes <= MAX_CLASSES:
            found = outputs(network, layout, model[None], shard.test, cohort.local_training.device)[0]
            reports.append({SCORE_COUNTS: count_outputs(found, shard.test.y).tolist()})
        else:
            reports.append({})
    return reports


def _test_examples(cohort: Cohort, test: TestSet) -> tuple[Any, Any]:
    """Return the examples and targets of a shared test set, or of a sample of it if the server requests one."""
    return _every_nth(test, MAX_SAMPLED_TESTS) if cohort.samples_tests else (test.x, test.y)


def _part(test: TestSet, client_id: int) -> tuple[Any, Any]:
    """Return every n-th example of a large test set, starting at a place that depends on the client."""
    return _every_nth(test, _MAX_OWN_TESTS, client_id)


def _every_nth(test: TestSet, most: int, begin: int = 0) -> tuple[Any, Any]:
    """Return every n-th example of a test set, at most ``most``; ``begin`` modulo n is the first."""
    stride = max(1, -(-len(test.y) // most))
    return test.x[begin % stride :: stride], test.y[begin % stride :: stride]
