"""Scores worked out by hand."""

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from sklearn.metrics import adjusted_rand_score, cohen_kappa_score, normalized_mutual_info_score

from coterie.messages import DIAGNOSTICS, ReplyError
from coterie.server.metrics import (
    confusion,
    groups_found,
    matched,
    partition_scores,
    summarise,
    summarise_records,
    unfairness,
)


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


# ---- clusters of records ---------------------------------------------------------------------------------------------


def told(table, classes=None, **more):
    table = np.asarray(table)
    told = {"confusion": table.ravel().tolist(), "classes": table.shape[-1] if classes is None else classes, **more}
    return RecordDict({DIAGNOSTICS: MetricRecord(told)})


@pytest.mark.parametrize(
    "table",
    [
        [[5, 1, 0], [0, 2, 9], [3, 3, 3]],
        [[0, 4], [7, 1], [2, 2], [0, 0]],  # more clusters than classes: two are matched to none
        [[1, 0, 5], [2, 8, 0]],  # fewer
        [[3, 3], [3, 3]],
        [[4, 0], [0, 4]],
        [[4, 5], [0, 0]],  # all in one
    ],
)
def test_scores_of_records_are_scikit_learn_s(table):
    clusters, classes = table_to_labels(table)
    agreed = matched(clusters, classes)
    scores = partition_scores(np.array(table))
    assert scores == pytest.approx(
        {
            "accuracy": np.mean(agreed == classes),
            "nmi": normalized_mutual_info_score(classes, clusters),
            "kappa": cohen_kappa_score(classes, agreed),
            "ari": adjusted_rand_score(classes, clusters),
        }
    )
    assert {type(score) for score in scores.values()} == {float}


def test_scores_of_records_by_hand():
    scores = partition_scores([[6, 0], [2, 4]])
    assert scores["accuracy"] == 10 / 12
    assert scores["kappa"] == pytest.approx((10 / 12 - 1 / 2) / (1 / 2))  # 8/12 6/12 + 4/12 6/12 agree by chance
    joint = np.array([6, 2, 4]) / 12
    mutual = np.sum(joint * np.log(joint / (np.array([6 * 8, 6 * 8, 6 * 4]) / 144)))
    entropies = [-np.sum(p * np.log(p)) for p in (np.array([8, 4]) / 12, np.array([6, 6]) / 12)]
    assert scores["nmi"] == pytest.approx(mutual / np.mean(entropies))
    together, expected, most = 15 + 1 + 6, (15 + 15) * (28 + 6) / 66, (15 + 15 + 28 + 6) / 2
    assert scores["ari"] == pytest.approx((together - expected) / (most - expected))


def test_one_cluster_of_one_class_is_perfect_but_for_kappa():
    scores = partition_scores([[5]])
    assert [scores[name] for name in ("accuracy", "nmi", "ari")] == [1, 1, 1]
    assert scores["kappa"] == 1


def test_records_of_all_clients_are_scored_together():
    parts = [[[3, 0], [0, 1]], [[0, 2], [0, 4]], [[0, 0], [0, 0]]]
    summary = summarise_records([told(part) for part in parts])
    assert summary["confusion"] == [3, 2, 0, 5]
    assert summary["classes"] == 2
    assert {key: summary[key] for key in ("accuracy", "nmi", "kappa", "ari")} == pytest.approx(
        partition_scores(np.sum(parts, axis=0))
    )


GOOD = [[3, 0], [0, 1]]
BAD = {
    "too few": told([[1, 2, 3]], classes=2),
    "negative": told([[-1, 2], [3, 4]]),
    "huge": told([[2**40, 2], [3, 4]]),
    "fractions": told([[1.0, 2.0], [3.0, 4.0]]),
    "one number": RecordDict({DIAGNOSTICS: MetricRecord({"confusion": 4, "classes": 2})}),
    "nothing": RecordDict({DIAGNOSTICS: MetricRecord({"classes": 2})}),
    "no classes": RecordDict({DIAGNOSTICS: MetricRecord({"confusion": [1, 2]})}),
    "zero classes": told(GOOD, classes=0),
    "classes of another type": told(GOOD, classes=2.0),
    "a negative class": told(GOOD, classes=-2),
    "empty": RecordDict({DIAGNOSTICS: MetricRecord({"confusion": [], "classes": 2})}),
    "another shape": told([[1, 2], [3, 4], [5, 6]]),
    "another number of classes": told([[1, 2, 3, 4]], classes=4),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_impossible_numbers_of_records_are_left_out_wherever_they_stand(bad, place):
    contents = [told(GOOD), told(GOOD)]
    contents.insert(place, bad)
    assert summarise_records(contents)["confusion"] == [6, 0, 0, 2]


def test_one_client_cannot_take_all_memory():
    """It says that it labelled a trillion records: a score takes no more room than the table."""
    summary = summarise_records([told(GOOD), told([[2**39, 0], [0, 2**39]])])
    assert summary["accuracy"] == pytest.approx(1)
    assert summary["ari"] == pytest.approx(1)


def test_where_nobody_tells_there_are_no_scores():
    for contents in ([], [BAD["negative"]], [told([[0, 0], [0, 0]])]):
        assert dict(summarise_records(contents)) == {}
