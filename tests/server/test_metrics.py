"""Scores worked out by hand."""

import numpy as np
import pytest
from kit.tables import for_rows
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, cohen_kappa_score, normalized_mutual_info_score

from coterie.server.metrics import confusion, groups_found, partition_scores, summarise, summarise_records, unfairness
from coterie.wire import EvaluationReply, LabelCounts


def replies(clusters, groups, accuracies):
    return [
        EvaluationReply(client_id=i, accuracy=a, cluster=c, group=g)
        for i, (c, g, a) in enumerate(zip(clusters, groups, accuracies, strict=True))
    ]


def table_to_labels(table):
    """Clients that give this (clusters, groups) table of numbers."""
    table = np.asarray(table)
    clusters, groups = np.indices(table.shape)
    return np.repeat(clusters.ravel(), table.ravel()), np.repeat(groups.ravel(), table.ravel())


def matched(clusters, groups):
    """Each client's cluster as the group it is matched to one to one (Hungarian method); -1 if unmatched."""
    rows, columns = linear_sum_assignment(-confusion(clusters, groups))
    group_of = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    return np.array([group_of.get(cluster, -1) for cluster in clusters.tolist()], np.int64)


def test_confusion_counts_clients():
    table = [[2, 0, 1], [0, 3, 0]]
    assert confusion(*table_to_labels(table)).tolist() == table


@for_rows(
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
    assert summary["clustering_accuracy"] == correct / len(groups)
    assert summary["nmi"] == pytest.approx(normalized_mutual_info_score(groups, clusters))
    assert summary["kappa"] == pytest.approx(cohen_kappa_score(groups, agreed))


@for_rows(
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


def test_where_there_is_one_group_there_is_nothing_to_find():
    summary = summarise(replies([0, 1], [0, 0], [1.0, 0.5]))
    assert not {"clustering_accuracy", "groups_found", "minority_accuracy"} & set(summary)
    assert summary["accuracy"] == 0.75


def test_groups_that_no_reply_names_are_left_out():
    summary = summarise(replies([0, 0, 1, 1], [2, 2, 7, 7], [0.5, 0.5, 1.0, 1.0]))
    assert summary["group_accuracy"] == [0.5, 1.0]
    assert summary["confusion"] == [2, 0, 0, 2]  # clusters x groups that are present
    assert summary["client_group"] == [2, 2, 7, 7]
    assert summary["clustering_accuracy"] == summary["nmi"] == 1


def test_scores_of_clients_are_in_the_order_of_their_ids():
    ordered = replies([0, 1, 0], [0, 1, 0], [0.1, 0.2, 0.3])
    assert summarise([ordered[i] for i in (2, 0, 1)]) == summarise(ordered)
    assert summarise(ordered)["client_accuracy"] == [0.1, 0.2, 0.3]


def test_losses_are_listed_if_every_client_reports_one():
    def reply(i, loss):
        return EvaluationReply(client_id=i, accuracy=1.0, cluster=0, group=0, loss=loss)

    assert summarise([reply(0, 0.5), reply(1, 0.25)])["client_loss"] == [0.5, 0.25]
    assert "client_loss" not in summarise([reply(0, 0.5), reply(1, None)])


def test_without_replies_there_are_no_scores():
    assert dict(summarise([])) == dict(summarise_records([])) == {}
    assert dict(summarise_records([told([[0, 0], [0, 0]])])) == {}  # no records


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


OF_PARTITIONS = {"nmi": normalized_mutual_info_score, "ari": adjusted_rand_score}


def told(table):
    table = np.asarray(table)
    return LabelCounts(client_id=0, classes=table.shape[-1], confusion=tuple(table.ravel().tolist()))


@for_rows(
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
    expected = {"accuracy": np.mean(agreed == classes), "kappa": cohen_kappa_score(classes, agreed)}
    expected |= {each: score(classes, clusters) for each, score in OF_PARTITIONS.items()}
    assert scores == pytest.approx(expected)
    assert {type(score) for score in scores.values()} == {float}


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


@for_rows("place", [0, 1, 2])
def test_counts_with_another_number_of_classes_are_left_out(place):
    contents = [told(GOOD), told(GOOD)]
    contents.insert(place, told([[1, 2, 3], [4, 5, 6]]))
    assert summarise_records(contents)["confusion"] == [6, 0, 0, 2]


def test_one_client_cannot_take_all_memory():
    """It says that it labelled a trillion records: a score takes no more room than the table."""
    summary = summarise_records([told(GOOD), told([[2**39, 0], [0, 2**39]])])
    assert summary["accuracy"] == pytest.approx(1)
    assert summary["ari"] == pytest.approx(1)
