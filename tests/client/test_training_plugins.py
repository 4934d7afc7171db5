"""Optimizer and loss of users: what they do in training, what is refused, and what the certificate lists."""

import hashlib
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.tables import for_rows
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss

from coterie.client.backend import train
from coterie.client.penalties import Penalty
from coterie.client.sgd import LocalTrainingConfig
from coterie.client.training_plugins import TrainingPlugins
from coterie.datasets import Shard, TestSet
from coterie.engine.in_process import LocalGrid
from coterie.fields.plugins import PluginError, source_hash
from coterie.server import ConfigError, FolderError, RunConfig, RunFolder, run
from coterie.testing import check_loss, check_optimizer
from coterie.wire.messages import Layout

HERE = "test_training_plugins"


def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr)


def smooth(outputs, targets):
    return cross_entropy(outputs, targets, reduction="none", label_smoothing=0.2)


def absolute(outputs, targets):
    return l1_loss(outputs, targets, reduction="none")


def shards(count=3):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, 9, 4)).astype(np.float32)
    y = rng.integers(0, 3, (count, 9))
    return [Shard(i, 0, x[i], y[i], TestSet(x[i], y[i])) for i in range(count)]


def updates(penalty=None, batched=None, **named):
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    layout = Layout.of(dict(model.named_parameters()))
    start = np.repeat(layout.flatten({k: v.detach() for k, v in model.named_parameters()})[None], 3, 0)
    more = {} if penalty is None else {"penalty": penalty}
    config = LocalTrainingConfig(2, 4, 0.1, plugins=TrainingPlugins(**named), **more)
    rngs = [np.random.default_rng(i) for i in range(3)]
    return train(model, layout, start, shards(), rngs, config, batched=batched), model, layout, start


def by_hand(make, loss=None, mu=0.0):
    """The updates by the loop that a user would write."""
    from coterie.client.sgd import schedule

    loss, result = loss or (lambda o, t: cross_entropy(o, t, reduction="none")), []
    _, _, layout, start = updates()
    for i, shard in enumerate(shards()):
        model = nn.Linear(4, 3)
        with torch.no_grad():
            for value, given in zip(model.parameters(), layout.split(start[i]).values(), strict=True):
                value.copy_(torch.from_numpy(given))
        anchors = [value.detach().clone() for value in model.parameters()]
        optimizer = make(list(model.parameters()), 0.1)
        for batch in schedule(np.random.default_rng(i), 9, LocalTrainingConfig(2, 4, 0.1)):
            optimizer.zero_grad()
            value = loss(model(torch.from_numpy(shard.x[batch])), torch.from_numpy(shard.y[batch])).mean()
            pull = sum((w - a).square().sum() for w, a in zip(model.parameters(), anchors, strict=True))
            (value + mu / 2 * pull).backward()
            optimizer.step()
        trained = layout.flatten({k: v.detach() for k, v in model.named_parameters()})
        result.append(trained - start[i])
    return np.stack(result)


@for_rows(
    ("named", "expected"),
    [
        ({"optimizer": "torch.optim:SGD"}, {"make": torch.optim.SGD}),
        ({"optimizer": f"{HERE}:adam"}, {"make": adam}),
        ({"optimizer": "torch.optim:AdamW"}, {"make": torch.optim.AdamW}),
        ({"loss": f"{HERE}:smooth"}, {"make": torch.optim.SGD, "loss": smooth}),
        ({"optimizer": f"{HERE}:adam", "loss": f"{HERE}:smooth"}, {"make": adam, "loss": smooth}),
    ],
)
def test_training_is_the_loop_that_a_user_would_write(named, expected):
    for batched in (None, True):
        np.testing.assert_allclose(updates(batched=batched, **named)[0], by_hand(**expected), atol=1e-6)


def test_the_penalty_is_part_of_the_gradient():
    with_penalty = updates(Penalty("proximal", 0.5), optimizer=f"{HERE}:adam")[0]
    np.testing.assert_allclose(with_penalty, by_hand(adam, mu=0.5), atol=1e-5)
    assert np.abs(with_penalty - updates(optimizer=f"{HERE}:adam")[0]).max() > 1e-4


# ---- contracts --------------------------------------------------------------------------------------------


@for_rows("function", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, adam])
def test_optimizers_of_pytorch_conform(function):
    check_optimizer(function)


MEMORY = []


def remembering(parameters, lr):
    MEMORY.append(1)
    return torch.optim.SGD(parameters, lr=lr * len(MEMORY))


@for_rows(
    ("function", "text"),
    [
        (lambda p, lr: None, "returns NoneType, expected a torch.optim.Optimizer"),
        (lambda p, lr: torch.optim.SGD(p[:1], lr=lr), "must be given all parameters that it receives"),
        (lambda p, lr: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr), "must be given all parameters"),
        (lambda p, lr: torch.optim.SGD(p, lr=0.0), "change no parameter"),
        (lambda p, lr: torch.optim.SGD(p, lr=math.inf), "NaN or Inf"),
        (lambda p, lr: torch.optim.LBFGS(p, lr=lr), "optimizer fails: TypeError: .*closure"),
        (lambda p, lr: 1 / 0, "optimizer fails: ZeroDivisionError: division by zero"),
        (remembering, "two new optimizers take different steps"),
    ],
)
def test_what_an_optimizer_may_not_be(function, text):
    with pytest.raises(PluginError, match=text):
        check_optimizer(function)


@for_rows(
    ("function", "text"),
    [
        (cross_entropy, r"returns \(\) for 6 examples, expected \(6,\)"),
        (lambda o, t: o, r"returns \(6, 10\)"),
        (lambda o, t: smooth(o, t) - smooth(o, t).mean(), "depends on other examples"),
        (lambda o, t: smooth(o, t) * len(t), "depends on other examples"),
        (lambda o, t: smooth(o, t) / 0, "NaN or Inf"),
        (lambda o, t: (o.argmax(1) != t).float(), "loss fails: RuntimeError|gradient"),
        (lambda o, t: smooth(o, t).tolist(), "returns list for 6 examples"),
    ],
)
def test_what_a_loss_may_not_be(function, text):
    with pytest.raises(PluginError, match=text):
        check_loss(function)
    check_loss(smooth)
    check_loss(absolute, num_classes=0)


# ---- runs -------------------------------------------------------------------------------------------------

SETTINGS = {"dataset": "digits", "clients": 8, "clusters": 2, "rounds": 2, "epsilon": 8.0, "samples-per-client": 20}


def test_a_run_lists_them_in_its_certificate(tmp_path):
    settings = {**SETTINGS, "optimizer": f"{HERE}:adam", "lr": 0.01, "train-alone": 2}
    with closing(RunFolder.create(tmp_path / "run", RunConfig(settings))) as folder:
        result = run(folder, LocalGrid(8))
        certificate = folder.certify()
    assert result["rounds"] == 2
    assert certificate["certified"]
    assert certificate["tuned_outside"]["training.optimizer"] == f"{HERE}:adam"
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert certificate["public_inputs"]["optimizer-sha256"] == digest == source_hash("optimizer", f"{HERE}:adam")


def test_a_run_goes_on_with_the_same_code_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    code = tmp_path / "changing_optimizer.py"
    text = "from torch.optim import SGD\n\ndef sgd(parameters, lr):\n    return SGD(parameters, lr)\n"
    code.write_text(text)
    settings = {**SETTINGS, "optimizer": "changing_optimizer:sgd"}
    with closing(RunFolder.create(tmp_path / "run", RunConfig(settings))) as folder:
        run(folder, LocalGrid(8))
    RunFolder.resume(tmp_path / "run", {}).close()
    code.write_text(text.replace("lr)\n", "lr / 2)\n"))
    with pytest.raises(FolderError, match="the file of optimizer 'changing_optimizer:sgd' differs"):
        RunFolder.resume(tmp_path / "run", {})
    code.unlink()
    with pytest.raises(FolderError, match="differs from that at the start"):
        RunFolder.resume(tmp_path / "run", {})


@for_rows("name", ["builtins:print", "no_such_module:f", "unknown-entry-point", ":"])
def test_a_module_without_a_file_has_no_hash(name):
    assert source_hash("optimizer", name) is None


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("loss", "torch.nn.functional:cross_entropy", r"expected \(6,\)"),
        ("trainer", "test_trainers:NoMethod", "needs a method train"),
    ],
)
def test_a_wrong_one_ends_the_run_before_it_charges(tmp_path, kind, name, text):
    with closing(RunFolder.create(tmp_path / "run", RunConfig({**SETTINGS, kind: name}))) as folder:
        with pytest.raises(PluginError, match=text):
            run(folder, LocalGrid(8))
        assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) <= 1


@pytest.mark.parametrize(("kind", "name"), [("optimizer", "adam"), ("loss", "smooth")])
def test_record_level_refuses_them(kind, name):
    settings = {**SETTINGS, "strategy": "f-cdpfl", kind: f"{HERE}:{name}"}
    with pytest.raises(ConfigError, match=f"{kind} = '{HERE}:{name}': at record level clients train by DP-SGD"):
        RunConfig(settings)
    config = RunConfig({**settings, kind: RunConfig(SETTINGS).values[f"training.{kind}"]})
    assert config.privacy.privacy_unit == "record"


@pytest.mark.parametrize("kind", ["optimizer", "loss"])
def test_an_unknown_name_lists_the_way_out(kind):
    with pytest.raises(ConfigError, match=rf"training.{kind} = 'fast': must be [\w, ]+, or module:function"):
        RunConfig({**SETTINGS, kind: "fast"})
