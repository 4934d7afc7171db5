"""Runs that cluster records: their scores, who was missing, what was sent, and pictures of it."""

import io
import json
import re

import numpy as np
import pytest
from kit.tables import for_rows
from matplotlib.colors import same_color
from rich.console import Console

from coterie.report import formats
from coterie.report.clustered_records import confusion_rows, describe_points, describe_scores, point_figures
from coterie.report.evidence import numbered_files
from coterie.report.page import write_report
from coterie.report.plots import CLUSTER_COLOURS
from coterie.report.points_plots import MAX_CLIENTS, MAX_PER_CLIENT, embedding_figure, samples_figure
from coterie.report.result_table import result_table
from coterie.report.runs import read_run
from coterie.report.uploaded_points import embed, read_codes, read_points
from coterie.results import Outcome

# Clusters in rows: 0 and 1 lie in cluster 2, nothing in cluster 1, class 2 in cluster 0.
CONFUSION = [[0, 10, 80], [0, 0, 0], [60, 40, 10]]
SCORES = {"accuracy": 0.7, "nmi": 0.43216, "kappa": 0.5, "ari": 0.25678, "classes": 3}
TRAFFIC = {"messages_down": 8, "messages_up": 6, "bytes_down": 2_500_000, "bytes_up": 1_234_567}
NOTES = {"missing": [1, 3], "points": {"0": 12, "2": 9, "4": 1100}}
CLIENTS = {"0": 12, "2": 9, "4": 14}


def make_run(folder, strategy="ppfc-gan", dataset="pendigits", shape=(16,), notes=NOTES, result=True, **more):
    (folder / "evidence").mkdir(parents=True)
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
    rng = np.random.default_rng(0)
    for client, many in CLIENTS.items():
        points = rng.uniform(-1, 1, (many, *shape)).astype(np.float32)
        np.savez_compressed(folder / "evidence" / f"points-{int(client):04d}.npz", points=points)
    points = rng.uniform(-1, 1, (30, *shape)).astype(np.float32)
    codes = points.reshape(30, -1) if strategy == "kfed" else rng.normal(size=(30, 4)).astype(np.float32)
    labels, clients = np.arange(30) % 3, np.repeat([0, 2, 4], 10)
    file = folder / "evidence" / "codes.npz"
    np.savez(file, points=points, codes=codes, labels=labels, clients=clients, centroids=codes[:3])
    return folder


def html_of(*folders):
    return write_report(folders, folders[0].parent / "report.html").read_text(encoding="utf-8")


def words(html):
    html = re.sub(r"<(style|svg).*?</\1>", " ", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", html).replace(formats.NBSP, " ").split())


def test_the_page_tells_scores_the_missing_and_the_traffic(tmp_path):
    html = html_of(make_run(tmp_path / "run"))
    text = words(html)
    for part in (
        *("NMI 0.4322", "Kappa 0.5000", "Adjusted Rand 0.2568", "Accuracy 70.0 %"),
        *("Replies 3 of 5 missing: 1 and 3", "Clients 1 and 3 sent no points; their data did not contribute."),
        "In one round, 3 clients sent 1,121 synthetic samples (9 to 1,100 each).",
        "70.0 % of 200 records are in the cluster of their class",
        *("Cluster 2 contains the majority of classes 0 and 1.", "Cluster 1 is empty."),
        *("from the server to clients 8 2.5 MB", "from clients to the server 6 1.2 MB"),
        "5 clients, 3 clusters of records, non-IID level 0.25, one round, no privacy",
        "cluster class 0 class 1 class 2 2 60 40 10 1 0 0 0 0 0 10 80",  # matched ones in the order of their classes
    ):
        assert part in text, part
    for absent in ("Worst group", "hidden group", "Clusters found", "Held-out accuracy", "released no cluster sizes"):
        assert absent not in text.replace("Hidden groups and held-out data", ""), absent
    assert len(re.findall(r"<svg", html)) == 3
    assert 'style="--share: 80%">40<' in html  # of the 50 of class 1
    assert len(set(re.findall(r'\bid="([^"]+)"', html))) == len(re.findall(r'\bid="([^"]+)"', html))


@pytest.mark.parametrize(("collapsed", "who"), [([2], "client 2"), ([0, 2], "clients 0 and 2")])
def test_whose_gan_collapsed_is_said(tmp_path, collapsed, who):
    run = read_run(make_run(tmp_path / "run", notes={**NOTES, "collapsed": collapsed}))
    assert f"Samples of {who} hardly differ from each other, so the clusters" in " ".join(describe_points(run))


def test_nobody_missing_is_said_and_centroids_are_called_so(tmp_path):
    run = read_run(make_run(tmp_path / "run", "kfed", notes={"missing": [], "points": {"0": 3, "1": 3}}))
    assert describe_points(run) == [
        "In one round, 2 clients sent 6 local centroids (3 each). The server clustered all of them, and clients "
        "labelled their records with the result.",
        "All clients replied.",
    ]
    samples, places = point_figures(run)[0]
    assert "local centroids" in samples.caption
    assert len(places.panels) == 1  # its codes are the points


def test_what_was_not_scored_is_not_made_up(tmp_path):
    none = dict.fromkeys((*SCORES, "confusion"))
    run = read_run(make_run(tmp_path / "run", **none))
    assert describe_scores(run) == confusion_rows(run) == []
    text = words(html_of(tmp_path / "run"))
    assert f"NMI {formats.MISSING}" in text
    assert "No scores are available" in text


def test_an_unfinished_run_tells_what_it_noted(tmp_path):
    text = words(html_of(make_run(tmp_path / "run", result=False)))
    assert "This run is unfinished" in text
    assert "Clients 1 and 3 sent no points" in text


def test_traffic_is_summed_over_rounds_of_any_strategy(tmp_path):
    folder = make_run(tmp_path / "run", "ifca")
    lines = [{"round": number, "seconds": 1.0, **TRAFFIC} for number in (1, 2)] + [{"round": 3, "seconds": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    assert run.traffic == {key: 2 * value for key, value in TRAFFIC.items()}
    assert (len(run.rounds), run.unreadable_lines) == (3, 0)
    text = words(html_of(folder))
    assert "from clients to the server 12 2.5 MB" in text
    assert "Uploaded points" not in text  # its clusters are of clients
    (folder / "metrics.jsonl").write_text(json.dumps(lines[2]))
    assert "Communication" not in words(html_of(folder))


def test_runs_of_records_are_compared_by_their_scores(tmp_path):
    html = html_of(make_run(tmp_path / "a"), make_run(tmp_path / "b", "kfed"))
    text = words(html)
    assert "accuracy NMI kappa adjusted Rand ε" in text
    assert text.count("70.0 % 0.4322 0.5000 0.2568 ∞") == 2
    assert "No run was evaluated" not in text
    assert "Each line ends at the last round" not in text  # one round makes no line
    mixed = words(html_of(make_run(tmp_path / "c"), make_run(tmp_path / "d", "ifca")))
    assert "worst group clustering accuracy ε seconds NMI" in mixed


def axes_of(figure):
    return figure.axes[0]


def test_a_pen_is_drawn_as_it_went():
    down = np.array([[-1, 1, -1, -1, 1, -1, 0, 0]], np.float32)  # down the left side, to the right, back to the middle
    axes = axes_of(samples_figure({3: np.repeat(down, 12, axis=0)}, strokes=True))
    lines = axes.collections[1].get_segments()
    assert len(lines) == MAX_PER_CLIENT
    np.testing.assert_allclose(lines[0], [[0.1, 0.1], [0.1, 0.9], [0.9, 0.9], [0.5, 0.5]], atol=1e-6)
    assert axes.yaxis_inverted()
    np.testing.assert_allclose(axes.lines[0].get_xydata()[0], [0.1, 0.1], atol=1e-6)  # where it starts
    assert [text.get_text() for text in axes.texts] == ["client 3"]


def test_vectors_are_lines_over_their_features():
    rising = np.linspace(-1, 1, 5, dtype=np.float32)[None]
    axes = axes_of(samples_figure({0: rising, 7: np.zeros((2, 5), np.float32)}))
    first, *others = axes.collections[1].get_segments()
    np.testing.assert_allclose(first[[0, -1]], [[0.1, 0.9], [0.9, 0.1]], atol=1e-6)
    assert len(others) == 2
    assert not axes.lines
    (segment,) = axes_of(samples_figure({0: 3 * rising[:1]})).collections[1].get_segments()
    np.testing.assert_allclose(segment, first, atol=1e-6)  # features beyond [-1, 1] share one scale
    assert len(axes_of(samples_figure({0: np.ones((1, 1), np.float32)})).collections[1].get_segments()[0]) == 2


def test_images_are_drawn_as_images():
    grey = np.stack([np.full((1, 4, 6), value, np.float32) for value in (-1, 0.5)])
    axes = axes_of(samples_figure({0: grey}))
    assert [image.get_array().tolist() for image in axes.images] == [grey[0, 0].tolist(), grey[1, 0].tolist()]
    assert axes.images[0].get_extent() == pytest.approx((0, 1, 4 / 6, 0))
    red = np.full((1, 3, 2, 2), -1, np.float32)
    red[:, 0] = 1
    assert axes_of(samples_figure({0: red})).images[0].get_array()[0, 0].tolist() == [1, 0, 0]


def test_samples_are_taken_evenly_from_all_and_rows_stay_few():
    many = {client: np.full((100, 4), client / 50, np.float32) for client in range(50)}
    many[0] = np.linspace(-1, 1, 100, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    axes = axes_of(samples_figure(many))
    names = [text.get_text() for text in axes.texts]
    assert (len(names), names[0], names[-1]) == (MAX_CLIENTS, "client 0", "client 49")
    heights = [segment[0, 1] for segment in axes.collections[1].get_segments()[:MAX_PER_CLIENT]]
    np.testing.assert_allclose(np.diff(heights), np.diff(heights)[0], atol=0.01)
    assert heights[0] > heights[-1]


def test_clusters_have_colours_and_numbers_in_the_plane():
    assert len(set(CLUSTER_COLOURS)) == 10
    places, labels = np.arange(12.0).reshape(6, 2), np.array([0, 0, 0, 9, 9, 9])
    axes = axes_of(embedding_figure(places, labels))
    assert [text.get_text() for text in axes.texts] == ["0", "9"]
    assert [text.get_position() for text in axes.texts] == [(2, 3), (8, 9)]  # the middle one
    np.testing.assert_array_equal(axes.lines[1].get_xydata(), places[3:])
    assert same_color(axes.lines[1].get_color(), CLUSTER_COLOURS[9])


def test_t_sne_keeps_neighbours_together_and_is_the_same_every_time():
    rng = np.random.default_rng(0)
    heaps = rng.normal(size=(40, 6)) + 30 * np.repeat([0, 1], 20)[:, None]
    found = embed(heaps.astype(np.float32))
    assert found.shape == (40, 2)
    nearest = np.argsort(np.linalg.norm(found[:, None] - found[None], axis=2), axis=1)[:, 1]
    assert np.all(nearest // 20 == np.arange(40) // 20)
    np.testing.assert_array_equal(embed(heaps.astype(np.float32)), found)
    for odd in (np.zeros((6, 3), np.float32), np.arange(6, dtype=np.float32)[:, None]):
        assert np.isfinite(embed(odd)).all()
        np.testing.assert_array_equal(embed(odd), embed(odd))


def test_the_picture_of_codes_stands_beside_that_of_points(tmp_path):
    run = read_run(make_run(tmp_path / "run", dataset="mnist", shape=(1, 4, 4)))
    (samples, places), unreadable = point_figures(run)
    assert not unreadable
    assert len(axes_of(samples.panels[0][1]).images) == 10 + 9 + 10
    assert [heading for heading, _ in places.panels] == [
        *("input space", "code space of the autoencoder, in which the points were clustered")
    ]
    assert places.caption.startswith("A sample of 30 points")  # of 35
    assert not np.allclose(*(figure.axes[0].lines[0].get_xydata() for _, figure in places.panels))


def test_files_that_are_not_whole_are_left_out_and_named(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "evidence" / "points-0002.npz").write_bytes(b"torn")
    np.savez(folder / "evidence" / "points-0004.npz", points=np.full((3, 16), np.nan, np.float32))
    np.savez(
        folder / "evidence" / "codes.npz", points=np.zeros((3, 2)), codes=np.zeros((2, 2)), labels=np.zeros(3, int)
    )
    np.savez(folder / "evidence" / "gathered.npz", clients=np.arange(3))
    (picture,), unreadable = point_figures(read_run(folder))
    assert unreadable == ["points-0002.npz", "points-0004.npz", "codes.npz"]
    assert [text.get_text() for text in axes_of(picture.panels[0][1]).texts] == ["client 0"]
    assert "evidence/points-0002.npz, evidence/points-0004.npz" in words(html_of(folder))
    assert list(numbered_files(folder, "points")) == [0, 2, 4]
    assert read_points(folder / "evidence" / "none.npz") is None
    for label, clients in ((-1, 3), (0, 2)):
        np.savez(
            folder / "evidence" / "odd.npz",
            points=np.zeros((3, 2)),
            codes=np.zeros((3, 2)),
            labels=np.full(3, label),
            clients=np.zeros(clients, int),
        )
        assert read_codes(folder / "evidence" / "odd.npz") is None


def test_the_table_in_the_terminal(tmp_path):
    def shown(result):
        console = Console(width=120, file=io.StringIO(), color_system=None)
        with console.capture() as capture:
            console.print(result_table(result, {}))
        return capture.get().replace(formats.NBSP, " ")

    text = shown(read_run(make_run(tmp_path / "run")).result)
    for part in ("0.4322", "0.5000", "0.2568", "70.0 % of records", "1 and 3"):
        assert part in text, part
    assert "Worst group" not in text
    missing = re.compile(r"Clients missing\W+none")
    assert missing.search(shown(Outcome(strategy="ffcm", notes={"missing": []})))
    assert not missing.search(shown(Outcome(strategy="ffcm")))


@for_rows(
    ("many", "written"),
    [(0, "0 B"), (812, "812 B"), (3421, "3.4 kB"), (999_600, "1 MB"), (20_600_000, "21 MB"), (5_000_000_000, "5 GB")],
)
def test_sizes(many, written):
    assert formats.size(many).replace(formats.NBSP, " ") == written
