"""Runs of own networks whose parts do not all train: every unit and kind of method, engines, resume, own models."""

import json
import os
from contextlib import closing

import numpy as np
import pytest
import torch
from kit.run_folders import run_in
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

import coterie
from coterie.datasets.local_files import LocalRecords
from coterie.engine.in_process import LocalGrid
from coterie.engine.workers import start_server
from coterie.inference import InferenceError
from coterie.models import NetworkSpec, build, call, constants, constants_of, file_hash, fingerprint, initialise, merged
from coterie.privacy import Streams
from coterie.server import ConfigError, RunConfig, RunFolder, run
from coterie.server.folder import FolderError
from coterie.server.run import check_personal, initial_models
from coterie.server.start_models import StartModels
from coterie.wire.messages import Layout

CLIENTS = 6
COMMON = {"clients": CLIENTS, "clusters": 2, "groups": "2", "rounds": 2, "local-epochs": 1, "samples-per-client": 20}
COMMON |= {"seed": 7, "model": "plugged_networks:careful", "train-alone": 0}
UNITS = {
    "none": {"privacy-unit": "none", "sampling-rate": 1.0},
    "client": {"privacy-unit": "client", "sampling-rate": 0.6, "delta": 1e-3, "epsilon": 50.0},
    "record": {"privacy-unit": "record", "batch-size": 10, "first-round-noise-ratio": 1},
}
METHODS = {"ifca": "client", "fedavg": "record", "fedcam": "client", "fedper": "none", "fesem": "none", "cfl": "none"}
METHODS |= {"rc-dpfl": "record", "lcfl": "record"}


def settings(method, unit, **more):
    one = {"clusters": 1} if method in ("fedavg", "fedper", "cfl") else {}
    return {**COMMON, **UNITS[unit], **one, "strategy": method, **{k.replace("_", "-"): v for k, v in more.items()}}


def execute(path, values, workers=0):
    with closing(RunFolder.create(path, RunConfig(values))) as folder, closing(LocalGrid(CLIENTS, workers)) as grid:
        return run(folder, grid)


@pytest.mark.parametrize("method", METHODS)
def test_methods_train_the_trainable_part(tmp_path, method):
    unit = METHODS[method]
    outcome = execute(tmp_path / "run", settings(method, unit))
    assert outcome["rounds"] == 2
    site = {"site": 0} if method == "fedper" else {}
    models = coterie.load(tmp_path / "run", trust_code=True, **site)
    assert np.isfinite(models.outputs(np.zeros((2, 1, 8, 8), np.float32), 0)).all()
    initial = initialise(COMMON["model"], (1, 8, 8), 10, 0)
    tensors = load_file(tmp_path / "run" / "models" / "cluster-0.safetensors")
    parts = {name.removeprefix("global.").removeprefix("cluster.") for name in tensors}
    assert (
        parts
        <= {*initial}
        == {"scale", *(f"{x}.{y}" for x in ("first", "head") for y in ("weight", "bias"))} | {"second.bias"}
    )
    found = load_tensors(tmp_path / "run" / "models" / "constants.safetensors")
    assert fingerprint(found) == fingerprint(constants(build(COMMON["model"], (1, 8, 8), 10)))


@pytest.mark.parametrize("method", ["ifca", "fedavg"])
def test_adapters_of_a_built_in_network_train_alone(tmp_path, method):
    adapters = "lora:rank=2,train=output"
    execute(tmp_path / "run", settings(method, METHODS[method] if method == "fedavg" else "client",
                                       model="mlp-32", adapters=adapters))  # fmt: skip
    network = NetworkSpec("mlp-32", adapters)
    tensors = load_file(tmp_path / "run" / "models" / "cluster-0.safetensors")
    assert {*tensors} == {*initialise(network, (1, 8, 8), 10, 0)} >= {"hidden.up.weight", "output.bias"}
    models = coterie.load(tmp_path / "run")
    assert models.card.network == network
    sizes = (64 + 32) * 2 + 32 * 10 + 10, 64 * 32 + 32 + 32 * 10 + 10 + (64 + 32) * 2
    assert (models.card.trainable_parameters, models.card.parameters) == sizes
    assert models.card.constants == fingerprint(constants_of(network, (1, 8, 8), 10))
    assert [*dict(merged(models[0]).named_parameters())] == [*initialise("mlp-32", (1, 8, 8), 10, 0)]


def test_models_of_clusters_differ_before_training_if_adapters_alone_train():
    config = RunConfig(settings("ifca", "client", model="mlp-32", adapters="lora:rank=2"))
    models, layout = initial_models(config, Streams(0))
    network = build(config.training.network, (1, 8, 8), 10)
    x, named = torch.ones(1, 1, 8, 8), [layout.split(model) for model in models]
    outputs = [call(network, {name: torch.tensor(v) for name, v in values.items()}, x) for values in named]
    assert (outputs[0] != outputs[1]).all()


@pytest.fixture
def base(tmp_path):
    """A file of parameters of mlp-32."""
    save_tensors(build("mlp-32", (1, 8, 8), 10).state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


@pytest.mark.parametrize("frozen", ["hidden", ""])
def test_a_file_of_parameters_is_a_public_input(tmp_path, base, frozen):
    values = settings("ifca", "client", model="mlp-32", frozen=frozen, pretrained=str(base)) | {"seed": "auto"}
    execute(tmp_path / "run", {**values, "stop-after": 1})
    certified = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert certified["public_inputs"]["pretrained-sha256"] == file_hash(base)
    models = coterie.load(tmp_path / "run")
    assert models.card.pretrained == file_hash(base)
    assert torch.equal(models[0].hidden.weight, load_tensors(base)["hidden.weight"]) == bool(frozen)
    records = LocalRecords("records", np.zeros((4, 1, 8, 8), np.float32), np.arange(4), 0)
    with pytest.raises(InferenceError, match="the run started from a file with SHA-256"):
        models.personalised(records, 0, "mixture")
    before = base.read_bytes()
    moved = base.rename(tmp_path / "moved.safetensors")
    run_in(RunFolder.resume(tmp_path / "run", {"stop-after": 2, "pretrained": str(moved)}))
    moved.write_bytes(before[:-1] + b"\x01")
    with pytest.raises(FolderError, match="is another file than at the start of the run, by its SHA-256"):
        RunFolder.resume(tmp_path / "run", {"stop-after": 0, "pretrained": str(moved)})


@pytest.mark.parametrize("workers", [0, 2])
def test_constants_stay_in_certified_rounds_and_a_resumed_run(tmp_path, workers):
    if workers:
        start_server()
    values = settings("ifca", "client", rounds=4, stop_after=2) | {"seed": "auto"}
    execute(tmp_path / "run", values, workers)
    file = tmp_path / "run" / "models" / "constants.safetensors"
    before = file.read_bytes()
    assert run_in(RunFolder.resume(tmp_path / "run", {"stop-after": 0}))["certified"]
    assert file.read_bytes() == before
    assert coterie.load(tmp_path / "run", trust_code=True).card.constants == fingerprint(load_tensors(file))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray
def test_constants_stay_on_ray(tmp_path, monkeypatch):
    from pathlib import Path

    from coterie.engine.ray import ray_workers

    here = Path(__file__)
    monkeypatch.setenv("PYTHONPATH", f"{here.parents[1]}{os.pathsep}{here.parents[2]}")
    values = settings("ifca", "client", rounds=10) | {"seed": "auto", "registration-timeout": 600.0}
    with (
        closing(RunFolder.create(tmp_path / "run", RunConfig(values))) as folder,
        ray_workers(folder=folder.path) as workers,
    ):
        from coterie.engine.ray_workers import RayGrid

        outcome = run(folder, RayGrid(CLIENTS, workers))
    assert outcome["certified"]
    assert outcome["rounds"] == 10


@pytest.mark.parametrize("method", ["last-layer", "prior", "mixture", "all"])
@pytest.mark.parametrize("network", ["careful", "frozen_head", "tied_head"])
def test_clients_fit_the_trainable_part_to_their_records(tmp_path, method, network):
    config = RunConfig(settings("ifca", "none", personalize=method, model=f"plugged_networks:{network}"))
    sent = Layout.of(initialise(config.training.model, *config.examples, 0))
    if network == "careful" or method == "all":
        check_personal(config, sent)
        outcome = execute(tmp_path / "run", config.values)
        assert np.isfinite(outcome["diagnostics"]["personal_accuracy"]).all()
        return
    with pytest.raises(ConfigError, match=r"requires a last layer that trains, but the weight of 'head'.*all or none"):
        check_personal(config, sent)


def test_only_trainable_parameters_count_for_the_note_on_noise():
    config = RunConfig(settings("fedavg", "client") | {"epsilon": 0.5})
    (note,) = [line for line in config.warnings() if "the noise dominates" in line]
    trainable = 12 * 12 + 2 * 12 + 1 + 12 * 10 + 10
    assert f"({trainable} parameters" in note


def test_parameters_without_effect_are_named_before_a_run():
    config = RunConfig(settings("fedavg", "none", model="plugged_networks:auxiliary"))
    (note,) = [line for line in config.warnings() if "do not depend on" in line]
    assert "plugged_networks:auxiliary' do not depend on its parameters spare.weight, spare.bias: they are sent" in note


def test_a_run_starts_from_models_of_the_same_constants_only(tmp_path, monkeypatch):
    execute(tmp_path / "run", settings("ifca", "none"))
    follow = settings("ifca", "none", start_from=str(tmp_path / "run"))
    assert StartModels.of(RunConfig(follow)) is not None
    import plugged_networks

    monkeypatch.setattr(plugged_networks, "values", lambda *shape: shape[0] * plugged_networks.torch.ones(*shape))
    with pytest.raises(ConfigError, match=r"start-from.*other frozen parameters or buffers"):
        StartModels.of(RunConfig(follow))
