"""Runs that cluster records: their scores, who was missing, and what was sent."""

import json
import re

from kit.tables import for_rows
from test_report import assert_shown, page, shown, words

from coterie.report import formats
from coterie.report.clustered_records import confusion_rows, describe_points, describe_scores
from coterie.report.runs import read_run
from coterie.results import Outcome

# Clusters in rows: 0 and 1 lie in cluster 2, nothing in cluster 1, class 2 in cluster 0.
CONFUSION = [[0, 10, 80], [0, 0, 0], [60, 40, 10]]
SCORES = {"accuracy": 0.7, "nmi": 0.43216, "kappa": 0.5, "ari": 0.25678, "classes": 3}
TRAFFIC = {"messages_down": 8, "messages_up": 6, "bytes_down": 2_500_000, "bytes_up": 1_234_567}
NOTES = {"missing": [1, 3], "points": {"0": 12, "2": 9, "4": 1100}}


def make_run(folder, strategy="ppfc-gan", dataset="pendigits", notes=NOTES, result=True, **more):
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"[config]\nstrategy = '{strategy}'\ndataset = '{dataset}'\nclients = 5\nclusters = 3\ngroups = '1'\n"
        "rounds = 1\nlabel-skew = 'non-iid:0.25'\nsampling-rate = 1.0\nprivacy-unit = 'none'\n"
    )
    line = {"round": 1, "seconds": 7.0, "epsilon": None, "notes": notes, **TRAFFIC}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    scores = {"round": 1, **SCORES, "confusion": [count for row in CONFUSION for count in row]}
    (folder / "diagnostics.jsonl").write_text(json.dumps(scores) + "\n")
    (folder / "privacy.json").write_text(json.dumps({"unit": "none", "certified": False, "reasons": []}))
    if result:
        document = {"strategy": strategy, "dataset": dataset, "notes": notes, "rounds": 1}
        document |= {"seconds_total": 9.0, "seconds_training": 7.0, "seconds_per_round": 7.0}
        (folder / "result.json").write_text(json.dumps(document))
        (folder / "diagnostics.json").write_text(json.dumps({**SCORES, "confusion": CONFUSION, **more}))
    return folder


def test_the_page_tells_scores_the_missing_and_the_traffic(tmp_path):
    html = page(make_run(tmp_path / "run"))
    text = words(html)
    assert_shown(
        text,
        *("NMI 0.4322", "Kappa 0.5000", "Adjusted Rand 0.2568", "Accuracy 70.0 %"),
        *("Replies 3 of 5 missing: 1 and 3", "Clients 1 and 3 sent no points; their data did not contribute."),
        "In one round, 3 clients sent 1,121 synthetic samples (9 to 1,100 each).",
        "70.0 % of 200 records are in the cluster of their class",
        *("Cluster 2 contains the majority of classes 0 and 1.", "Cluster 1 is empty."),
        *("from the server to clients 8 2.5 MB", "from clients to the server 6 1.2 MB"),
        "5 clients, 3 clusters of records, non-IID level 0.25, one round, no privacy",
        "cluster class 0 class 1 class 2 2 60 40 10 1 0 0 0 0 0 10 80",  # matched ones in the order of their classes
    )
    for absent in ("Worst group", "hidden group", "Clusters found", "Held-out accuracy", "released no cluster sizes"):
        assert absent not in text.replace("Hidden groups and held-out data", ""), absent
    assert "<svg" not in html
    assert 'style="--share: 80%">40<' in html  # of the 50 of class 1


def test_whose_gan_collapsed_is_said(tmp_path):
    for collapsed, who in (([2], "client 2"), ([0, 2], "clients 0 and 2")):
        run = read_run(make_run(tmp_path / who, notes={**NOTES, "collapsed": collapsed}))
        assert f"Samples of {who} hardly differ from each other, so the clusters" in " ".join(describe_points(run))


def test_nobody_missing_is_said_and_centroids_are_called_so(tmp_path):
    run = read_run(make_run(tmp_path / "run", "kfed", notes={"missing": [], "points": {"0": 3, "1": 3}}))
    assert describe_points(run) == [
        "In one round, 2 clients sent 6 local centroids (3 each). The server clustered all of them, and clients "
        "labelled their records with the result.",
        "All clients replied.",
    ]


def test_what_was_not_scored_is_not_made_up(tmp_path):
    none = dict.fromkeys((*SCORES, "confusion"))
    run = read_run(make_run(tmp_path / "run", **none))
    assert describe_scores(run) == confusion_rows(run) == []
    text = words(page(tmp_path / "run"))
    assert f"NMI {formats.MISSING}" in text
    assert "No scores are available" in text


def test_an_unfinished_run_tells_what_it_noted(tmp_path):
    text = words(page(make_run(tmp_path / "run", result=False)))
    assert_shown(text, "This run is unfinished", "Clients 1 and 3 sent no points")


def test_traffic_is_summed_over_rounds_of_any_strategy(tmp_path):
    folder = make_run(tmp_path / "run", "ifca")
    lines = [{"round": number, "seconds": 1.0, **TRAFFIC} for number in (1, 2)] + [{"round": 3, "seconds": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run.traffic == {key: 2 * value for key, value in TRAFFIC.items()}
    assert (len(run.rounds), run.unreadable_lines) == (3, 0)
    text = words(page(folder))
    assert "from clients to the server 12 2.5 MB" in text
    (folder / "metrics.jsonl").write_text(json.dumps(lines[2]))
    assert "Communication" not in words(page(folder))


def test_runs_of_records_are_compared_by_their_scores(tmp_path):
    html = page(make_run(tmp_path / "a"), make_run(tmp_path / "b", "kfed"))
    text = words(html)
    assert "accuracy NMI kappa adjusted Rand ε" in text
    assert text.count("70.0 % 0.4322 0.5000 0.2568 ∞") == 2
    assert "No run was evaluated" not in text
    assert "Each line ends at the last round" not in text  # one round makes no line
    mixed = words(page(make_run(tmp_path / "c"), make_run(tmp_path / "d", "ifca")))
    assert "worst group clustering accuracy ε seconds NMI" in mixed


def test_the_table_in_the_terminal(tmp_path):
    text = shown(read_run(make_run(tmp_path / "run")).result, {})
    assert_shown(text, "0.4322", "0.5000", "0.2568", "70.0 % of records", "1 and 3")
    assert "Worst group" not in text
    missing = re.compile(r"Clients missing\W+none")
    assert missing.search(shown(Outcome(strategy="ffcm", notes={"missing": []}), {}))
    assert not missing.search(shown(Outcome(strategy="ffcm"), {}))


@for_rows(
    ("many", "written"),
    [(0, "0 B"), (812, "812 B"), (3421, "3.4 kB"), (999_600, "1 MB"), (20_600_000, "21 MB"), (5_000_000_000, "5 GB")],
)
def test_sizes(many, written):
    assert formats.size(many).replace(formats.NBSP, " ") == written
