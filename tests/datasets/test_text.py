import numpy as np
import pytest

from coterie.datasets import ALPHABET, DATASETS, DataError, Partition, download, federate, load

SPEECH = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\n"


def write_play(root, *blocks):
    path = root / "shakespeare" / "tinyshakespeare.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n\n".join(blocks), "utf-8")


def text(tokens):
    return "".join((ALPHABET + "¤")[token] for token in tokens)


def test_windows_of_each_speaker(tmp_path):
    """Bob's two speeches are one text; Carol says too little; é is no character of the alphabet."""
    bob = "abcé" * 30
    write_play(tmp_path, f"BOB:\n{bob}", f"ANN:\n{SPEECH * 3}", "CAROL:\nNay.", f"BOB:\n{bob}\n")
    source = load("shakespeare", str(tmp_path))
    assert (source.kind, source.owners, source.num_classes) == ("tokens", 2, 66)
    texts = {0: f"{bob}\n{bob}", 1: (SPEECH * 3).rstrip("\n")}
    for owner, said in texts.items():
        cut = int(0.8 * len(said))
        for x, y, owners, part in (
            (source.train_x, source.train_y, source.train_owner, said[:cut]),
            (source.test_x, source.test_y, source.test_owner, said[cut:]),
        ):
            rows = np.flatnonzero(owners == owner)
            windows = [part[i : i + 25] for i in range(0, len(part) - 24, 3)]
            assert [text([*x[row], y[row]]).replace("¤", "é") for row in rows] == windows
    assert (source.train_x == 65).any()


def test_a_play_without_speakers_is_refused(tmp_path):
    write_play(tmp_path, "A long text. " * 100)
    with pytest.raises(DataError, match=r"no speaker with 200 characters; expected .* a line `NAME:`, then text"):
        load("shakespeare", str(tmp_path))


def test_download(tmp_path, monkeypatch):
    import torchvision.datasets.utils

    calls = []
    monkeypatch.setattr(torchvision.datasets.utils, "download_url", lambda *arguments: calls.append(arguments))
    folder = tmp_path / "shakespeare"
    assert download("shakespeare", str(tmp_path)) == folder
    ((url, *rest),) = calls
    assert url.startswith("https://")
    assert rest == [folder, "tinyshakespeare.txt", "6fb458f1232090904fb40fe944165e91"]


def test_the_real_play(data_dir):
    source, info = load("shakespeare", data_dir), DATASETS["shakespeare"]
    assert source.owners == 227
    assert (len(source.train_x), len(source.test_x)) == (info.train_size, info.test_size)
    assert source.train_x.shape[1:] == info.shape
    assert source.kind == info.kind
    assert source.train_x.max() < len(ALPHABET)  # nothing in the play is outside the alphabet
    federation = federate("shakespeare", Partition(clients=227, groups="1", shift="none"), data_dir=data_dir)
    sizes = [len(federation.shard(i).y) for i in range(227)]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == info.train_size
    assert sum(len(federation.shard(i).test.y) for i in range(227)) == info.test_size
    assert federation.shard(0).x.dtype == federation.shard(0).test.x.dtype == np.int64
    assert federation.input_shape == (24,)
