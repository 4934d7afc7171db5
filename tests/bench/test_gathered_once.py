"""Runs of a table that differ in what becomes of clients' points gather them once."""

import json
import shutil

import pytest

from coterie.bench.cells import Cell, _ready, run_all
from coterie.bench.table import read_table
from coterie.server import applicable

pytestmark = pytest.mark.slow

TABLE = """
title = "Digits"
source = "nobody, Table 0"
seeds = [0]

[set]
strategy = "ppfc-gan"
clients = 3
clusters = 3
rounds = 1
local-epochs = 1
pretrain-epochs = 1
joint-epochs = 1
dcn-restarts = 1
label-skew = "non-iid:0"
privacy-unit = "none"

[[columns]]
name = "one"

[[rows]]
name = "in sequence"
set = { joint-epochs = 0 }

[[rows]]
name = "joint"

[[rows]]
name = "few"
set = { synthetic-samples = 5 }
"""
SETTINGS = {"strategy": "ppfc-gan", "privacy-unit": "none", "joint-epochs": 1}


def cell(seed=0, central="", **changes):
    settings = SETTINGS | {name.replace("_", "-"): value for name, value in changes.items()}
    return Cell("row", "column", seed, applicable(settings), central=central)


def test_ablations_send_the_same():
    assert cell().upload_key == cell(joint_epochs=0).upload_key == cell(dcn_noise=0.1, dcn_restarts=3).upload_key != ""
    others = [cell(seed=1), cell(local_epochs=3), cell(ema_decay=0.0), cell(strategy="kfed")]
    assert len({cell().upload_key, *(other.upload_key for other in others)}) == 5


@pytest.mark.parametrize(
    "alone", [cell(privacy_unit="record"), cell(strategy="ifca"), cell(central="dcn"), Cell("row", "column", 0, {})]
)
def test_who_pays_or_gathers_no_points_shares_none(alone):
    assert alone.upload_key == ""


def test_who_sends_the_same_waits_for_the_first(tmp_path):
    first, second, other, plain = [
        (one, tmp_path) for one in (cell(), cell(joint_epochs=0), cell(seed=1), cell(strategy="ifca"))
    ]
    waiting = [first, second, other, plain, plain]
    assert _ready(waiting, {}, ()) == [first, other, plain, plain]
    assert _ready([second, plain], {}, [first[0].upload_key]) == [plain]
    assert _ready([second], {first[0].upload_key: tmp_path}, [first[0].upload_key]) == [second]


def test_points_are_gathered_once(tmp_path):
    (tmp_path / "toy.toml").write_text(TABLE)
    table, trained = read_table(str(tmp_path / "toy.toml")), []

    def run():
        trained.clear()
        done, _ = run_all(
            table,
            tmp_path / "out",
            places={"device": "cpu"},
            jobs=2,
            progress=lambda what: trained.append(what.split(",")[0]) if "GAN of client" in what else None,
        )
        return {one.cell.row: one for one in done}

    done = run()
    assert set(trained) == {"in sequence", "few"}
    folders = [done[row].folder for row in ("in sequence", "joint", "few")]
    sequence, joint, few = (folder / "evidence" / "points-0002.npz" for folder in folders)
    assert sequence.samefile(joint)
    assert few.stat().st_size < joint.stat().st_size
    lines = [json.loads((folder / "metrics.jsonl").read_text()) for folder in folders]
    names = ("messages_down", "messages_up", "bytes_down", "bytes_up")
    sequence, joint, few = ([line[name] for name in names] for line in lines)
    assert sequence == joint != few
    assert joint[:2] == [6, 6]  # points, then labels
    results = {row: one.result for row, one in done.items()}
    assert results["in sequence"]["confusion"] != results["joint"]["confusion"]

    shutil.rmtree(done["in sequence"].folder)
    again = run()["in sequence"]
    assert trained == []
    assert (again.folder / "evidence" / "points-0002.npz").samefile(folders[1] / "evidence" / "points-0002.npz")
    assert again.result["nmi"] > 0
