"""Every method trains on every kind of files that clients own."""

import csv
import json
from contextlib import closing

import numpy as np
import pytest
from kit.site_tables import AGE, OUTCOME, SEX

from coterie.engine.in_process import LocalGrid
from coterie.server import RunConfig, RunFolder, run
from coterie.strategies import OneShot
from coterie.strategies.registry import STRATEGIES

CLIENTS, RECORDS = 6, 24
_SCHEMA = "version = 1\n" + OUTCOME + AGE + SEX


def images(path, x, y):
    pixels = np.repeat(np.uint8(np.clip(128 + 40 * x, 0, 255)), 36, axis=1)[:, :64].reshape(-1, 1, 8, 8)
    np.savez(path.with_suffix(".npz"), x=pixels, y=y)


def vectors(path, x, y):
    np.savez(path.with_suffix(".npz"), x=x.astype(np.float32), y=y)


def plain_table(path, x, y):
    with path.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "label"], *(([*row, label]) for row, label in zip(x, y, strict=True))])


def described_table(path, x, y):
    with path.with_suffix(".csv").open("w", newline="") as file:
        rows = [[50 + 10 * a, "fm"[int(b > 0)], ("alive", "dead")[label]] for (a, b), label in zip(x, y, strict=True)]
        csv.writer(file).writerows([["age", "sex", "outcome"], *rows])


#: Writes the files of a client, and the settings that describe them.
KINDS = {
    "images": (images, {"input-shape": "1x8x8", "num-classes": 2}),
    "vectors": (vectors, {"input-shape": "2", "num-classes": 2}),
    "plain table": (plain_table, {"input-shape": "2", "num-classes": 2}),
    "bounded schema": (described_table, {"table-schema": _SCHEMA}),
    "unbounded schema": (described_table, {"table-schema": _SCHEMA.replace("range = [0, 100]\n", "")}),
}
SMALL = {"clients": CLIENTS, "local-epochs": 1, "model": "auto", "privacy-unit": "none", "sampling-rate": 1.0}
SMALL |= {"seed": 1, "device": "cpu"}
#: What a method requires beside these.
MORE = {"ppfc-gan": {"synthetic-samples": 20, "pretrain-epochs": 1, "joint-epochs": 1, "dcn-restarts": 1}}
ONE_MODEL = {"fedavg", "fedper", "fedprox", "local"}


def own_data(folder, kind, rng):
    write, settings = KINDS[kind]
    for client in range(CLIENTS):
        y = rng.integers(0, 2, RECORDS)
        write(folder / f"client-{client}", rng.normal(0, 0.4, (RECORDS, 2)) + 1.5 * (2 * y[:, None] - 1), y)
    if "table-schema" in settings:
        (folder / "schema.toml").write_text(settings["table-schema"])
        settings = {"table-schema": str(folder / "schema.toml")}
    return {"dataset": "own", "data-dir": str(folder), **settings}


def outcome_of(tmp_path, method, kind):
    (tmp_path / "data").mkdir()
    data = own_data(tmp_path / "data", kind, np.random.default_rng(0))
    one_shot = issubclass(STRATEGIES[method], OneShot)
    chosen = ({} if method in ONE_MODEL else {"clusters": 2}) | ({} if one_shot else {"rounds": 2})
    config = RunConfig({**SMALL, **data, **chosen, **MORE.get(method, {}), "strategy": method})
    with closing(RunFolder.create(tmp_path / "run", config)) as folder:
        run(folder, LocalGrid(CLIENTS))
    return [json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("result", "diagnostics")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", STRATEGIES)
def test_a_method_trains_on_own_data(tmp_path, method, kind):
    result, scores = outcome_of(tmp_path, method, kind)
    assert result["rounds"] == (1 if issubclass(STRATEGIES[method], OneShot) else 2)
    assert result.get("clients_labelled", CLIENTS) == CLIENTS
    assert result["notes"].get("missing", []) == []
    assert 0 <= scores["accuracy"] <= 1


@pytest.mark.slow
def test_clusters_of_records_in_units_of_their_schema_are_those_of_scaled_ones(tmp_path):
    """k-FED finds both classes, whatever the range; records beyond it are clamped."""
    for kind in ("vectors", "unbounded schema"):
        (tmp_path / kind).mkdir()
        assert outcome_of(tmp_path / kind, "kfed", kind)[1]["accuracy"] > 0.9
