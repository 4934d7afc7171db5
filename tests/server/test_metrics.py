"""Scores worked out by hand."""

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from coterie.messages import DIAGNOSTICS, ReplyError
from coterie.server.metrics import confusion, groups_found, matched, summarise, unfairness


def replies(clusters, groups, accuracies):
    return [
        RecordDict({DIAGNOSTICS: MetricRecord({"accuracy": a, "cluster": c, "group": g})})
        for c, g, a in zip(clusters, groups, accuracies, strict=True)
    ]


def table_to_labels(table):
    """Clients that give this (clusters, groups) table of numbers."""
    table = np.asarray(table)
    clusters, groups = np.indices(table.shape)
    return np.repeat(clusters.ravel(), table.ravel()), np.repeat(groups.ravel(), table.ravel())


def test_confusion_counts_clients():
    table = [[2, 0, 1], [0, 3, 0]]
    assert confusion(*table_to_labels(table)).tolist() == table


@pytest.mark.parametrize(
    ("table", "correct"),
    [
        ([[0, 5], [5, 0]], 10),  # names of clusters do not matter
        # the best matching is not the greedy one: 6 + 0 < 5 + 5
        ([[6, 5], [5, 0]], 10),
        ([[4, 4], [0, 0]], 4),  # one cluster holds all: the other group is wrong
        # more clusters than groups: group 0 is split, its second cluster is unmatched and wrong
        ([[3, 0], [0, 4], [2, 0]], 7),
        ([[3, 0, 0], [0, 2, 3]], 6),  # more groups than clusters
    ],
)
def test_clustering_accuracy_matches_one_to_one(table, correct):
    clusters, groups = table_to_labels(table)
    agreed = matched(clusters, groups)
    assert np.sum(agreed == groups) == correct
    summary = summarise(replies(clusters.tolist(), groups.tolist(), [0.5] * len(groups)))
    assert summary["clustering_accuracy"] == pytest.approx(correct / len(groups))


def test_an_unmatched_cluster_is_no_group():
    clusters, groups = table_to_labels([[3, 0], [0, 4], [2, 0]])
    assert set(matched(clusters, groups)[clusters == 2].tolist()) == {-1}


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ([[5, 0], [0, 5]], 2),
        ([[3, 0], [2, 5]], 2),  # 3 of 5 share cluster 0, alone there; 5 of 7 are the majority of cluster 1
        ([[2, 0], [2, 0], [0, 5]], 1),  # half of a group is not most of it
        ([[4, 4], [0, 0]], 0),  # all share a cluster, in which nobody is the majority
        ([[4, 1], [1, 9]], 2),
        ([[3, 3], [0, 4]], 1),  # group 0 is all in cluster 0, but only half of it
    ],
)
def test_a_group_is_found_by_majorities_both_ways(table, found):
    assert groups_found(*table_to_labels(table)) == found


def test_summary_of_hand_made_replies():
    # groups 0 and 1 swap names with clusters 1 and 0; the last client of group 1 sits in the wrong cluster
    summary = summarise(replies([1, 1, 0, 0, 1], [0, 0, 1, 1, 1], [0.9, 0.7, 0.5, 0.5, 0.2]))
    assert summary["accuracy"] == pytest.approx(0.56)  # over clients, not over groups
    assert summary["group_accuracy"] == pytest.approx([0.8, 0.4])
    assert summary["worst_group_accuracy"] == pytest.approx(0.4)
    assert summary["clustering_accuracy"] == pytest.approx(0.8)
    assert summary["groups_found"] == 2
    # kappa: observed 4/5, by chance (2/5)(3/5) + (3/5)(2/5) = 12/25
    assert summary["kappa"] == pytest.approx((0.8 - 0.48) / (1 - 0.48))
    # entropies of (2, 3) on both sides, joint (2, 2, 1): NMI = I / mean entropy
    entropy = -(0.4 * np.log(0.4) + 0.6 * np.log(0.6))
    joint = -(2 * 0.4 * np.log(0.4) + 0.2 * np.log(0.2))
    assert summary["nmi"] == pytest.approx((2 * entropy - joint) / entropy)


def test_where_there_is_one_group_there_is_nothing_to_find():
    summary = summarise(replies([0, 1], [0, 0], [1.0, 0.5]))
    assert not {"clustering_accuracy", "groups_found", "minority_accuracy"} & set(summary)
    assert summary["accuracy"] == 0.75


def test_a_reply_without_diagnostics_is_refused():
    with pytest.raises(ReplyError, match="diagnostics"):
        summarise([RecordDict()])


def test_a_minority_is_one_group_that_is_smaller_than_all_others():
    summary = summarise(replies([0, 0, 0, 1, 2, 2], [0, 0, 0, 1, 2, 2], [1.0, 0.8, 0.6, 0.2, 0.5, 0.5]))
    assert summary["minority_accuracy"] == pytest.approx(0.2)
    assert summary["majority_accuracy"] == pytest.approx(3.4 / 5)
    assert summary["worst_client_accuracy"] == 0.2
    assert summary["max_disparity"] == pytest.approx(0.8)
    assert summary["client_group"] == [0, 0, 0, 1, 2, 2]
    assert "minority_accuracy" not in summarise(replies([0, 1], [0, 1], [1.0, 0.5]))  # none is smaller
    assert "minority_accuracy" not in summarise(replies([0, 1, 2, 2], [0, 1, 2, 2], [1.0, 0.5, 0.1, 0.1]))


def test_unfairness_by_hand():
    # accuracies fall by 0.1, 0.3 and 0.05: the second client pays 0.25 more than the third
    assert unfairness([0.8, 0.6, 0.9], [0.9, 0.9, 0.95]) == pytest.approx(0.25)
    assert unfairness([1.0, 0.4], [0.2, 0.3]) == pytest.approx(0.7)  # losses rise by 0.8 and 0.1
