"""Strategies, clusterers, features, models and data sets by name: module:object, and entry points."""

import importlib
import subprocess
import sys
from contextlib import closing

import numpy as np
import plugged
import pytest
from kit.tables import for_rows
from kit.toys import trained

from coterie.clustering.clusterers import cluster
from coterie.datasets import load
from coterie.fields import plugins
from coterie.fields.settings import Settings
from coterie.models import FEATURES, ModelError, build, features
from coterie.server import ConfigError, FolderError, RunConfig, RunFolder
from coterie.strategies import IFCA, StrategyError
from coterie.strategies import registry as methods
from coterie.strategies.registry import STRATEGIES, strategy_class

SMALL = {"clients": 12, "groups": "2", "clusters": 2, "rounds": 2, "samples-per-client": 10, "local-epochs": 1}
MOMENTUM = {**SMALL, "strategy": "plugged:Momentum", "seed": 1}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with entry points; returns a function that registers lines of entry_points.txt."""

    def install(text, name="plug"):
        folder = tmp_path / f"{name}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (folder / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        plugins.installed.cache_clear()
        methods._custom.cache_clear()

    yield install
    monkeypatch.undo()
    plugins.installed.cache_clear()


REGISTERED = """
[coterie.strategies]
momentum = plugged:Momentum
ifca = plugged:NotRowWise
[coterie.clusterers]
halves = plugged:halves
[coterie.features]
flip = plugged:flip
[coterie.datasets]
my-blobs = kit.toys:blobs
[coterie.models]
my-chain = kit.toys:chain
"""


def test_entry_points_are_found_by_name(package):
    package(REGISTERED)
    config = RunConfig({**SMALL, "strategy": "momentum", "momentum.beta": 0.25, "features": "flip"})
    assert config.method is plugged.Momentum
    assert config.options == plugged.MomentumSettings(0.25)
    assert config.for_clients()["features"] == "flip"
    assert load("my-blobs").name == "blobs"
    assert sum(p.numel() for p in build("my-chain", (1, 1, 1), 3).parameters()) == 4
    assert cluster(np.zeros((4, 4)), "halves", 2).labels.tolist() == [0, 0, 1, 1]
    assert RunConfig({**SMALL, "strategy": "lcfl", "clusterer": "halves"}).options.clusterer == "halves"


def test_names_of_coterie_come_first(package):
    package(REGISTERED)
    assert strategy_class("ifca") is STRATEGIES["ifca"]


def test_two_packages_with_one_name_are_told_apart(package):
    package(REGISTERED)
    package("[coterie.strategies]\nmomentum = plugged:Other\n", "other")
    with pytest.raises(StrategyError, match=r"plugged:Momentum \(plug 1.5\) and plugged:Other \(other 1.5\) registers"):
        strategy_class("momentum")


def test_listings_name_the_package(package, coterie):
    package(REGISTERED)
    for what, names in {"strategies": ["momentum"], "datasets": ["my-blobs"], "models": ["my-chain", "flip"]}.items():
        _, out, _ = coterie(what)
        assert "plug 1.5" in out
        assert all(name in out for name in names)
    assert "NotRowWise" not in coterie("strategies")[1]


def test_a_strategy_of_a_user_runs_with_its_own_settings(tmp_path):
    plain = trained(tmp_path / "ifca", {**MOMENTUM, "strategy": "ifca"})
    off = trained(tmp_path / "off", {**MOMENTUM, "momentum.beta": 0})
    on = trained(tmp_path / "on", {**MOMENTUM, "beta": 0.9})
    assert plain.keys() == on.keys()
    assert all(np.array_equal(plain[key], off[key]) for key in plain)
    assert not any(np.array_equal(plain[key], on[key]) for key in plain)


def test_its_run_resumes_with_its_settings(tmp_path):
    config = RunConfig({**MOMENTUM, "momentum.beta": 0.3})
    RunFolder.create(tmp_path / "run", config).close()
    with closing(RunFolder.resume(tmp_path / "run", {})) as folder:
        assert folder.config == config
        assert folder.config["beta"] == 0.3
    with pytest.raises(FolderError, match=r"momentum.beta was 0.3, now 0.4"):
        RunFolder.resume(tmp_path / "run", {"momentum.beta": 0.4})


@for_rows(
    ("settings", "message"),
    [
        ({"momentum.beta": 1}, r"momentum.beta = 1: must be a finite number at least 0 and below 1"),
        ({"momentum.bta": 0.5}, r"unknown setting 'momentum.bta'; did you mean 'momentum.beta'"),
        ({"strategy": "ifca", "momentum.beta": 0.5}, r"unknown setting 'momentum.beta'"),
        ({"strategy": "no_such_module:A"}, r"there is no module no_such_module; use module:Class, with its folder on"),
        ({"strategy": "json.no_such:A"}, r"there is no module json.no_such"),
        ({"strategy": "plugged_missing:A"}, r"plugged_missing imports no_such_library, which is not installed"),
        ({"strategy": "plugged_broken:A"}, r"fails with ZeroDivisionError: .*plugged_broken.py:3\)"),
        ({"strategy": "plugged:Momentun"}, r"has no such name; use module:Class; did you mean plugged:Momentum\?"),
        ({"strategy": "plugged:halves"}, r"a function is not a subclass of coterie.strategies.ClusteredStrategy"),
        ({"strategy": "plugged:MomentumSettings"}, r"MomentumSettings is not a subclass of"),
        ({"strategy": "plugged:Undeclared"}, r"Undeclared must declare row_wise itself: True if"),
        ({"strategy": "plugged:NotRowWise"}, r"not-row-wise supports privacy-unit none, not 'client': its labels"),
        ({"strategy": "plugged:Taken"}, r"name = 'ifca' is that of a method of Coterie"),
        ({"strategy": "plugged:NoRound"}, r"NoRound must define round"),
        ({"strategy": "plugged:ShortRound"}, r"round\(self, models\) must accept \(self, number, models\)"),
        (
            {"strategy": "plugged:Closed"},
            r"Closed\(plan, settings=None\) must accept \(plan, settings\) and the options",
        ),
        (
            {"strategy": "plugged:Needy"},
            r"needs = weather: must be some of true_groups, example_shape, feature_range, device",
        ),
        ({"strategy": "plugged:Units"}, r"units = \('clients',\) must name some of client, record, none"),
        ({"strategy": "plugged:Tableless"}, r"Loose must declare table"),
        ({"strategy": "plugged:Bare"}, r"Undecorated must be decorated with @dataclass\(frozen=True\)"),
        ({"strategy": "plugged:Shadow"}, r"table = 'privacy' is taken"),
        ({"strategy": "plugged:Labels"}, r"produces must be 'models'"),
        ({"features": "plugged:nothing"}, r"features .* has no such name; use module:function"),
        (
            {"strategy": "lcfl", "clusterer": "plugged:three"},
            r"three\(a, b, c\) must accept \(distances, num_clusters\)",
        ),
        ({"strategy": "lcfl", "clusterer": "plugged:alone"}, r"plugged:alone determines the number of clusters itself"),
        ({"strategy": "lcfl", "clusterer": "plugged:short"}, r"returns int64 \(1,\) for 12 clients; expected integers"),
        ({"strategy": "lcfl", "clusterer": "plugged:floats"}, r"returns float64 \(12,\) for 12 clients"),
        ({"strategy": "lcfl", "clusterer": "plugged:many"}, r"labels span 0..11; allowed: 0..1"),
        ({"strategy": "lcfl", "clusterer": "plugged:fails"}, r"fails for 12 clients: RuntimeError: no"),
        (
            {"strategy": "lcfl", "clusterer": "plugged:random"},
            r"two calls with equal distances return different labels",
        ),
    ],
)
def test_a_wrong_contract_is_one_line_before_anything_starts(settings, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        _ = RunConfig({**MOMENTUM, **settings}).examples


def test_a_method_that_is_not_row_wise_runs_without_privacy():
    assert RunConfig({**MOMENTUM, "strategy": "plugged:NotRowWise", "privacy-unit": "none"}).method.row_wise is False


def test_a_clusterer_finds_the_number_of_clusters():
    near = np.abs(np.subtract.outer([0, 1, 50, 51, 52, 2], [0, 1, 50, 51, 52, 2])).astype(float)
    assert cluster(near, "plugged:split", None).labels.tolist() == [0, 0, 1, 1, 1, 0]
    assert cluster(near, "plugged:alone", None).labels.tolist() == [0, 0, 1, 1, 1, 0]
    assert cluster(near, "plugged:split", 2).labels.tolist() == [0, 0, 1, 1, 1, 0]


@for_rows(
    ("name", "message"),
    [
        ("batch_mean", r"is not row-wise: feature \(0, 0, 0\) of an image changes with one other image: use constants"),
        ("noisy", r"returns different values for equal images"),
        ("doubles", r"returns a float64 array, not a float32 array"),
        ("lists", r"returns a list, not a float32 array"),
        ("flat", r"returns shape \(16, 64\) for images \(16, 1, 8, 8\); expected \(16, C', H', W'\)"),
        ("first", r"returns shape \(1, 1, 8, 8\) for images \(16, 1, 8, 8\)"),
        ("infinite", r"returns NaN or Inf"),
        ("fails", r"fails with images \(16, 1, 8, 8\): RuntimeError: no"),
    ],
)
def test_features_are_checked_before_any_data(name, message):
    with pytest.raises(ModelError, match=f"features 'plugged:{name}': the function {message}"):
        _ = RunConfig({**SMALL, "features": f"plugged:{name}"}).examples


def test_features_of_a_user():
    apply = features("plugged:flip")
    x = np.random.default_rng(0).random((7, 2, 4, 4), np.float32)
    np.testing.assert_array_equal(apply(x), x[..., ::-1])
    assert features("plugged:flip") is apply  # federations are cached by function
    assert apply(np.zeros((0, 2, 4, 4), np.float32)).shape == (0, 2, 4, 4)
    with pytest.raises(ModelError, match="require images"):
        apply(np.zeros((3, 5), np.float32))
    with pytest.raises(ModelError, match=r"returns features of shapes \(1, 4, 4\) and \(1, 3, 3\)"):
        features("plugged:growing")(np.zeros((6, 1, 3, 3), np.float32))
    with pytest.raises(ModelError, match="did you mean 'pool2'"):
        features("pool")


def test_features_change_what_clients_train_on(tmp_path):
    settings = {**MOMENTUM, "strategy": "fedavg", "clusters": 1}
    plain = trained(tmp_path / "plain", settings)
    flipped = trained(tmp_path / "flipped", {**settings, "features": "plugged:flip"})
    assert plain.keys() == flipped.keys()
    assert not any(np.array_equal(plain[key], flipped[key]) for key in plain)


def test_a_wrong_strategy_is_refused_without_torch(tmp_path):
    code = (
        "import sys; from coterie.cli import main; sys.argv = ['coterie', 'run', '--strategy', 'mine:Nothing']\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    (tmp_path / "mine.py").write_text("x = 1\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("False\n", 1)
    assert done.stderr.splitlines() == [
        "error: strategy 'mine:Nothing': cannot import Nothing from mine: the module has no such name; use module:Class"
    ]


def test_every_kind_is_a_setting():
    kinds = {"strategy": "strategy", "data.dataset": "dataset", "training.model": "model"}
    kinds |= {"training.features": "features", "lcfl.clusterer": "clusterer"}
    kinds |= {f"training.{kind}": kind for kind in ("optimizer", "loss", "trainer")}
    from coterie.server import SETTINGS

    assert set(kinds.values()) == set(plugins.GROUPS)
    for name, kind in kinds.items():
        assert SETTINGS[name].allowed.endswith(f"or {plugins.form(kind)}")
    assert "plugged:flip" not in FEATURES


def test_a_strategy_with_a_hook_of_flower_is_refused_with_what_to_override(tmp_path, monkeypatch):
    (tmp_path / "hooked.py").write_text(
        "from coterie.strategies import FedAvg\n\nclass Mine(FedAvg):\n    def aggregate_train(self, *_): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="Mine overrides aggregate_train, which no run calls: override round"):
        RunConfig({"strategy": "hooked:Mine"})


def test_a_class_without_settings_of_its_own_needs_no_table():
    assert issubclass(plugged.NotRowWise, IFCA)
    assert plugged.NotRowWise.settings_class is Settings
