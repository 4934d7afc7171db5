"""Scores of a clustering against the true groups, and of models on held-out data. All are diagnostics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import MetricRecord

from coterie.wire.replies import EvaluationReply, LabelCounts, summary_of

IntArray = npt.NDArray[np.int64]


def confusion(clusters: IntArray, groups: IntArray) -> IntArray:
    """(clusters, groups) number of clients."""
    table = np.zeros((int(clusters.max()) + 1, int(groups.max()) + 1), np.int64)
    np.add.at(table, (clusters, groups), 1)
    return table


def groups_found(clusters: IntArray, groups: IntArray) -> int:
    """Groups most of whose clients share one cluster in which they are the majority."""
    table = confusion(clusters, groups)
    homes = table.argmax(axis=0)
    inside = table[homes, np.arange(table.shape[1])]
    return int(np.sum((2 * inside > table.sum(axis=0)) & (2 * inside > table.sum(axis=1)[homes])))


@summary_of(EvaluationReply)
def summarise(replies: Sequence[EvaluationReply]) -> MetricRecord:
    """Scores of all clients as one record; the accuracy of a client is that of its model."""
    if not replies:
        return MetricRecord()
    replies = sorted(replies, key=lambda reply: reply.client_id)
    accuracy = np.array([reply.accuracy for reply in replies])
    clusters = np.array([reply.cluster for reply in replies], np.int64)
    named = np.array([reply.group for reply in replies], np.int64)
    present, groups, sizes = np.unique(named, return_inverse=True, return_counts=True)
    per_group = [float(accuracy[groups == group].mean()) for group in range(len(present))]
    scores: dict[str, Any] = {
        "accuracy": float(accuracy.mean()),
        "group_accuracy": per_group,
        "worst_group_accuracy": min(per_group),
        "worst_client_accuracy": float(accuracy.min()),
        "max_disparity": float(np.ptp(accuracy)),
        "client_id": [reply.client_id for reply in replies],
        "client_accuracy": accuracy.tolist(),
        "client_cluster": clusters.tolist(),
        "client_group": named.tolist(),
    }
    losses = [reply.loss for reply in replies if reply.loss is not None]
    if len(losses) == len(replies):
        scores["client_loss"] = losses
    own = [reply.personal_accuracy for reply in replies if reply.personal_accuracy is not None]
    if len(own) == len(replies):  # all clients have fitted a model to their own records
        scores |= {
            "personal_accuracy": float(np.mean(own)),
            "personal_worst_group_accuracy": min(float(np.mean(np.array(own)[groups == g])) for g in np.unique(groups)),
            "personal_worst_client_accuracy": min(own),
            "client_personal_accuracy": own,
        }
    least = int(np.argmin(sizes))
    if np.sum(sizes == sizes[least]) == 1 and len(present) > 1:  # one group is smaller than all others
        scores["minority_accuracy"] = float(accuracy[groups == least].mean())
        scores["majority_accuracy"] = float(accuracy[groups != least].mean())
    if len(present) > 1:  # else there is nothing to find
        table = confusion(clusters, groups)
        partition = partition_scores(table)
        scores |= {
            "clustering_accuracy": partition["accuracy"],
            "groups_found": groups_found(clusters, groups),
            "nmi": partition["nmi"],
            "kappa": partition["kappa"],
            "confusion": table.ravel().tolist(),
        }
    return MetricRecord(scores)


def partition_scores(table: npt.NDArray[Any]) -> dict[str, float]:
    """How well clusters of records agree with their classes: accuracy, NMI, kappa and adjusted Rand index.

    Accuracy and kappa are those of the classes that clusters are matched to one to one (Hungarian method). Memory
    does not depend on the counts.

    Args:
        table: (clusters, classes) number of records; at least one record.
    """
    from scipy.optimize import linear_sum_assignment
    from scipy.special import entr

    counts = np.asarray(table, np.float64)
    total, of_clusters, of_classes = counts.sum(), counts.sum(axis=1), counts.sum(axis=0)
    rows, columns = linear_sum_assignment(-counts)
    agreed, chance = counts[rows, columns].sum() / total, of_clusters[rows] @ of_classes[columns] / total**2
    apart = entr(of_clusters / total).sum() + entr(of_classes / total).sum()
    mutual = apart - entr(counts / total).sum()
    # Pairs of records in the same place.
    together, in_clusters, in_classes, pairs = (
        float(np.sum(sizes * (sizes - 1) / 2)) for sizes in (counts, of_clusters, of_classes, total)
    )
    expected, most = in_clusters * in_classes / max(pairs, 1), (in_clusters + in_classes) / 2
    return {
        "accuracy": float(agreed),
        "nmi": float(np.clip(2 * mutual / apart, 0, 1)) if apart else 1.0,
        "kappa": float((agreed - chance) / (1 - chance)) if chance < 1 else 1.0,
        "ari": float((together - expected) / (most - expected)) if most > expected else 1.0,
    }


@summary_of(LabelCounts)
def summarise_records(replies: Sequence[LabelCounts]) -> MetricRecord:
    """Scores of the records of all clients together; replies with fewer or more classes than most are left out."""
    most = Counter(reply.classes for reply in replies).most_common(1)
    tables = [np.reshape(reply.confusion, (-1, reply.classes)) for reply in replies if reply.classes == most[0][0]]
    if not np.sum(tables):
        return MetricRecord()
    table = np.sum(tables, axis=0)
    return MetricRecord({**partition_scores(table), "classes": table.shape[1], "confusion": table.ravel().tolist()})


def unfairness(values: Sequence[float], best: Sequence[float]) -> float:
    """The largest difference between two clients in what privacy costs them, max |D_i - D_j|, D_i = best_i - value_i.

    F_acc of RC-DPFL (section 5.1) for accuracies, F_loss for training losses; ``best`` is that of a model trained
    centrally, without privacy, on the data of the client's group.
    """
    return float(np.ptp(np.asarray(best) - np.asarray(values)))
