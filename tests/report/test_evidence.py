"""What clusters were found from: read as far as it is whole, drawn as it is."""

import json
import re

import numpy as np
import pytest
from matplotlib.colors import same_color

from coterie.report.evidence import Pairs, leaves, numbered_files, read_pairs
from coterie.report.evidence_plots import block_means, distance_figure, similarity_figures, tree_figure
from coterie.report.page import write_report
from coterie.report.plots import CLUSTER_COLOURS
from coterie.report.runs import read_run


def node(number, parent, born, ended, why, clients, cluster=None, similarity=None):
    return {
        "node": number,
        "parent": parent,
        "born": born,
        "ended": ended,
        "why": why,
        "clients": clients,
        "cluster": cluster,
        "similarity": similarity,
    }


# Clients 0 and 3 leave first; then 2 leaves 1 and 4.
TREE = [
    node(0, None, 1, 10, "split", [0, 1, 2, 3, 4], similarity=-0.25),
    node(1, 0, 11, 15, "split", [1, 2, 4], similarity=0.5),
    node(2, 0, 11, 18, "stationary", [0, 3], cluster=1),
    node(3, 1, 16, None, None, [2], cluster=0),
    node(4, 1, 16, None, None, [1, 4], cluster=2),
]
MATRIX = np.arange(25, dtype=np.float32).reshape(5, 5) / 25
LABELS = np.array([1, 2, 0, 1, 2])


def make_run(folder, notes=({},), result=None, **files):
    (folder / "evidence").mkdir(parents=True)
    (folder / "config.toml").write_text("[config]\nstrategy = 'cfl'\n")
    lines = [{"round": number, "notes": noted} for number, noted in enumerate(notes, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    for name, arrays in files.items():
        path = folder / "evidence" / f"{name.replace('_', '-')}.npz"
        if isinstance(arrays, bytes):
            path.write_bytes(arrays)
        else:
            np.savez_compressed(path, **arrays)
    return folder


def arrays(matrix=MATRIX, labels=LABELS):
    return {"matrix": matrix, "clients": np.arange(len(labels)), "labels": labels}


def html_of(folder):
    return write_report([folder], folder).read_text(encoding="utf-8")


def test_clients_are_ordered_by_cluster_or_as_they_are_told():
    pairs = Pairs(MATRIX, np.array([9, 8, 7, 6, 5]), np.array([1, 0, 1, 0, 0])).ordered()
    assert pairs.clients.tolist() == [5, 6, 8, 7, 9]
    assert pairs.labels.tolist() == [0, 0, 0, 1, 1]
    assert pairs.borders.tolist() == [3]
    assert pairs.matrix[0, 4] == MATRIX[4, 0]  # clients 5 and 9
    assert pairs.matrix[4, 0] == MATRIX[0, 4]
    assert np.isnan(np.diag(pairs.matrix)).all()
    assert np.isfinite(pairs.matrix).sum() == 20
    told = Pairs(MATRIX, np.array([9, 8, 7, 6, 5]), np.zeros(5, int)).ordered([7, 9])
    assert told.clients.tolist() == [7, 9, 5, 6, 8]


def test_blocks_are_means_of_what_is_known():
    matrix = np.array([[1, 3, 5, np.nan], [5, 7, np.nan, np.nan], [np.nan, np.nan, 2, 4], [np.nan, np.nan, 6, 8.0]])
    np.testing.assert_array_equal(block_means(matrix, 2), [[4, 5], [np.nan, 5]])
    np.testing.assert_array_equal(block_means(matrix, 4), matrix)
    large = np.add.outer(np.arange(701.0), np.arange(701.0))
    small = block_means(large)
    assert small.shape == (300, 300)
    assert np.all(np.diff(small, axis=0) > 0)
    assert small[0, 0] == 1  # of clients 0 and 1
    assert small[-1, -1] == 2 * np.mean([698, 699, 700])


def test_distances_are_drawn_cluster_by_cluster():
    figure = distance_figure(Pairs(MATRIX, np.arange(5), LABELS))
    axes = figure.axes[0]
    order = [2, 0, 3, 1, 4]
    drawn = axes.images[0].get_array()
    expected = MATRIX[np.ix_(order, order)]
    np.testing.assert_allclose(drawn.filled(np.nan)[~np.eye(5, dtype=bool)], expected[~np.eye(5, dtype=bool)])
    assert np.ma.getmaskarray(drawn).diagonal().all()
    borders = {tuple(line.get_xdata()) for line in axes.lines if len(set(line.get_xdata())) == 1}
    assert {(1, 1), (3, 3)} <= borders
    said = [text.get_text().replace("\u2002", " ") for text in axes.texts]
    assert sorted(said) == ["cluster 0 1 client", "cluster 1 2 clients", "cluster 2 2 clients"]
    heights = {text.get_text()[:9]: text.get_position()[1] for text in axes.texts}
    assert heights["cluster 0"] > heights["cluster 1"] > heights["cluster 2"]  # as the rows of the picture


def test_a_tree_is_read_from_the_last_note(tmp_path):
    notes = ({"tree": TREE[:1]}, {}, {"tree": TREE}, {"other": 1})
    assert [each.number for each in read_run(make_run(tmp_path / "cut", notes)).tree] == [0, 1, 2, 3, 4]
    done = make_run(tmp_path / "done", result={"notes": {"tree": TREE}})
    tree = read_run(done).tree
    assert tree[1].clients == (1, 2, 4)
    assert [leaf.cluster for leaf in leaves(tree)] == [0, 2, 1]
    assert read_run(make_run(tmp_path / "none")).tree == ()


@pytest.mark.parametrize("broken", [[{"node": 0}], TREE[1:], "oak", 7, [TREE[0], node(1, 5, 2, None, None, [1], 0)]])
def test_a_tree_that_makes_no_sense_is_left_out(tmp_path, broken):
    folder = make_run(tmp_path / "odd", ({"tree": broken},))
    assert read_run(folder).tree == ()
    assert "tree of splits" not in html_of(folder)


def test_the_tree_is_drawn_over_rounds(tmp_path):
    axes = tree_figure(read_run(make_run(tmp_path / "run", ({"tree": TREE},))).tree, 20).axes[0]
    spans = {tuple(line.get_xdata()): line for line in axes.lines if line.get_linestyle() == "-"}
    assert {(1, 10), (10, 15), (10, 18), (15, 20)} <= set(spans)
    root, pair = spans[1, 10], spans[10, 18]
    assert root.get_linewidth() - 1.5 == pytest.approx(5 / 2 * (pair.get_linewidth() - 1.5))
    assert same_color(pair.get_color(), CLUSTER_COLOURS[1])
    rings = sorted(line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o")
    squares = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "s"]
    assert (rings, squares) == ([10, 15], [18])
    said = {text.get_text().replace("\u2002", " ") for text in axes.texts}
    ends = {"cluster 0 1 client", "cluster 1 2 clients", "cluster 2 2 clients"}
    assert said == {"\N{MINUS SIGN}0.25", "0.50"} | ends


def test_similarities_share_an_order_and_a_scale():
    apart = np.where(LABELS[:, None] == LABELS, MATRIX, np.nan)
    pictures = {10: Pairs(-MATRIX, np.arange(5), np.zeros(5, int)), 20: Pairs(apart, np.arange(5), LABELS)}
    figures = similarity_figures(pictures, [2, 1, 4, 0, 3])
    assert list(figures) == [10, 20]
    first, second = (figure.axes[0] for figure in figures.values())
    assert first.images[0].get_array()[0, 1] == pytest.approx(-MATRIX[2, 1])
    assert second.images[0].get_array()[1, 2] == pytest.approx(MATRIX[1, 4])
    assert np.ma.getmaskarray(second.images[0].get_array()).sum() == 25 - 4
    for axes in (first, second):
        assert axes.images[0].get_clim() == pytest.approx((-23 / 25, 23 / 25))  # zero is white


def test_the_page_shows_what_the_clusters_were_found_from(tmp_path):
    files = {f"similarities_{number:04d}": arrays() for number in (9, 10, 15, 20)}
    folder = make_run(tmp_path / "cfl", ({"tree": TREE},), distances=arrays(), **files)
    html = html_of(folder)
    assert "Clustering evidence" in html
    assert "tree of splits" in html
    assert re.findall(r">round (\d+)<", html) == ["10", "15", "20"]  # the splits and the end
    assert len(re.findall("<image", html)) >= 4
    targets = re.findall(r'href="([^"]*)"', html)
    assert all(target.startswith(("#", "data:image/png;base64,", "data:text/csv;")) for target in targets)
    assert "img-src data:" in html  # or a browser would not show them
    assert html == html_of(folder)


def test_a_large_matrix_stays_small_on_the_page(tmp_path):
    rng = np.random.default_rng(0)
    matrix = rng.random((900, 900), dtype=np.float32)
    folder = make_run(tmp_path / "large", distances=arrays(matrix, rng.integers(40, size=900)))
    assert len(html_of(folder)) < 400_000  # nothing is harder to compress than noise


def test_files_that_are_not_whole_are_left_out_and_named(tmp_path):
    whole = make_run(tmp_path / "whole", distances=arrays())
    torn = (whole / "evidence" / "distances.npz").read_bytes()[:-200]
    wrong = {"matrix": MATRIX[:2], "clients": np.arange(5), "labels": LABELS}
    folder = make_run(tmp_path / "torn", distances=torn, similarities_0010=wrong)
    assert read_pairs(folder / "evidence" / "distances.npz") is None
    assert list(numbered_files(folder, "similarities")) == [10]
    html = html_of(folder)
    assert "Unreadable files, omitted: evidence/distances.npz, evidence/similarities-0010.npz." in html
    assert "Clustering evidence" not in html_of(make_run(tmp_path / "without"))
