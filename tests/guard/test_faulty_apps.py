"""Apps with faults, run in two worlds that differ in one extreme record.

The guard's coins and noise are the same in both worlds, and the extreme record is in every batch. What leaves as
verified may then differ by no more than the clipped gradients of this record; otherwise both replies are refused.
"""

import copy
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federation import BATCH, QUIET, STEPS, TERMS, N, client_app, context, message, records
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from coterie.guard import REFUSAL, Guard
from coterie.guard.report import GUARD, Report
from coterie.guard.watched_training import GuardedOptimizer
from coterie.privacy import read_ledger
from coterie.privacy.ledger_lines import count_events

pytestmark = QUIET
LR, NOISE, CLIP, MOMENTUM = 1e-3, 50.0, 1.0, 0.9
# A clipped gradient of norm CLIP moves parameters by LR / BATCH, and by 1 / (1 - MOMENTUM) of that in the long run.
PER_STEP = LR * CLIP / BATCH / (1 - MOMENTUM)


class Statistic(nn.Module):
    """Adds what its buffers hold."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("shift", torch.zeros(3), persistent=False)

    def forward(self, x):
        return x + self.mean + self.shift


class Net(nn.Module):
    """A network whose gradients grow with its inputs; it has a buffer in its state, and one outside."""

    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(3)  # torch.manual_seed notes the stack for every kind of GPU
        self.first, self.statistic, self.second = nn.Linear(4, 3), Statistic(), nn.Linear(3, 2)

    def forward(self, x):
        return self.second(nn.functional.leaky_relu(self.statistic(self.first(x)), 0.5))


# ---- two worlds ------------------------------------------------------------------------------------------------


def data(extreme):
    """N records, and an extreme one: large features, and the label that the network excludes."""
    x, y = records().tensors
    if extreme:
        x = torch.cat([x, 1e3 * x[:1]])
        y = torch.cat([y, 1 - Net()(x[-1:]).argmax(1)])
    return TensorDataset(x, y)


def test_the_gradient_of_the_extreme_record_is_extreme():
    x, y = data(True)[-1]
    app = SimpleNamespace(model=Net(), rows=TensorDataset(x[None], y[None]))
    assert all(values.norm() > 100 * CLIP for name, values in exact(app).items() if "weight" in name)


class Coins:
    """Coins that are the same for the N records, and put any further one into every batch."""

    def __init__(self):
        self._rng = np.random.default_rng(7)

    def random(self, size):
        return np.append(self._rng.random(N), 0.0)[:size]


class SameStreams:
    """The same coins and noise in both worlds."""

    def stream(self, name):
        return Coins() if name == "batches" else np.random.default_rng(11)


class World:
    """One site without or with the extreme record."""

    def __init__(self, folder, patch, extreme):
        self.node = TERMS | {"state-dir": str(folder / f"extreme-{extreme}")}
        self.data, self.changes, step = data(extreme), 0, GuardedOptimizer.step

        def counted(optimizer, closure=None):
            """A step; counts those that change a parameter."""
            before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
            result = step(optimizer, closure)
            after = [p.detach() for group in optimizer.param_groups for p in group["params"]]
            self.changes += any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
            return result

        patch.setattr("coterie.guard.watched_training.Streams", SameStreams)
        patch.setattr(GuardedOptimizer, "step", counted)

    def answer(self, train, make, reply):
        """The reply, and how many steps the ledger paid for."""
        app = client_app(Guard(), lambda model, config: train(model, self.data), reply=reply, make=make)
        content = app(message(model=make()), context(**self.node))
        path = Path(self.node["state-dir"]) / "client-0.ledger.jsonl"
        return content, count_events(read_ledger(path)[1]).total() if path.exists() else 0


def outcome(folder, train, bound=PER_STEP, make=Net, reply=None):
    """Run an app in both worlds: "reply" if both replies leave and agree within the bound, "refused" if none does."""
    replies = []
    for extreme in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            world = World(folder, patch, extreme)
            answer, charged = world.answer(train, make, reply)
        if answer.has_error():
            assert answer.error.reason == REFUSAL
            replies.append(None)
            continue
        report = Report.parse(answer.content[GUARD])
        arrays = {name: array.numpy().astype(float) for name, array in answer.content["arrays"].items()}
        start = {name: values.numpy() for name, values in make().state_dict().items()}
        moved = any(not np.array_equal(values, start[name]) for name, values in arrays.items())
        assert report.verified
        assert report.events.total() == charged
        assert charged >= max(world.changes, moved), "an uncharged step"
        replies.append((arrays, charged))
    if None in replies:
        assert replies == [None, None], "the refusal depends on the record"
        return "refused"
    (one, charged), (other, also) = replies
    assert charged == also
    distance = math.sqrt(sum(float(((one[name] - other[name]) ** 2).sum()) for name in one))
    assert distance <= bound * charged * 1.1 + 1e-6, f"the record moved the arrays by {distance:.3g}"
    return "reply"


# ---- an app with faults ----------------------------------------------------------------------------------------

PLACES = ("before make_private", "after make_private", "before forward", "before step", "after step", "at the end")


def make_private(model, base, rows, **changes):
    """The model, the optimizer and the loader of Opacus."""
    options = {"noise_multiplier": NOISE, "max_grad_norm": CLIP} | changes
    loader = DataLoader(rows, batch_size=BATCH)
    return PrivacyEngine(accountant="rdp").make_private(module=model, optimizer=base, data_loader=loader, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def app_with(*faults, base=sgd, epochs=1, **changes):
    """An app that trains as it should, but for faults: pairs of a place and an action."""

    def train(model, rows):
        app = SimpleNamespace(model=model, base=base(model), rows=rows, batch=rows.tensors)

        def act(place):
            for where, action in faults:
                if where == place:
                    action(app)

        act("before make_private")
        app.module, app.optimizer, app.loader = make_private(model, app.base, rows, **changes)
        act("after make_private")
        for _ in range(epochs):
            for batch in app.loader:
                app.batch = batch
                app.optimizer.zero_grad()
                act("before forward")
                cross_entropy(app.module(app.batch[0]), app.batch[1]).backward()
                act("before step")
                app.optimizer.step()
                act("after step")
        act("at the end")

    return train


def exact(app):
    """Exact gradients of the records, without Opacus; by name."""
    twin = Net()
    twin.load_state_dict(app.model.state_dict())
    with torch.enable_grad():
        loss = cross_entropy(twin(app.rows.tensors[0]), app.rows.tensors[1])
    values = torch.autograd.grad(loss, list(twin.parameters()))
    return dict(zip((name for name, _ in twin.named_parameters()), values, strict=True))


# ---- actions ---------------------------------------------------------------------------------------------------


def mean(app):
    """A number that the extreme record changes."""
    return float(app.rows.tensors[0].mean())


def named(app):
    return dict(app.model.named_parameters())


@torch.no_grad()
def edit_parameter(app):
    app.model.first.weight -= exact(app)["first.weight"]


def exchange_data(app):
    app.model.first.weight.data = app.model.first.weight.data - exact(app)["first.weight"]


def edit_by_numpy(app):
    app.model.first.weight.detach().numpy()[:] -= exact(app)["first.weight"].numpy()


def edit_buffer(app):
    app.model.statistic.mean += mean(app)


def edit_hidden_buffer(app):
    app.model.statistic.shift += mean(app)


def exchange_buffer(app):
    app.model.statistic.shift = torch.full((3,), mean(app))


def add_parameter(app):
    app.model.more = nn.Parameter(torch.zeros(3))


def exchange_parameter(app):
    other = nn.Parameter(app.model.first.weight.detach() - exact(app)["first.weight"])
    other.__dict__.update(app.model.first.weight.__dict__)  # what Opacus keeps at a parameter
    app.model.first.weight = other


def exchange_layer(app):
    layer = nn.Linear(4, 3)
    layer.load_state_dict(app.model.first.state_dict())
    app.model.first = layer


def load_model(app):
    state = {name: values.clone() for name, values in app.model.state_dict().items()}
    state["first.weight"] -= exact(app)["first.weight"]
    app.model.load_state_dict(state)


def for_all(change):
    """An action on each parameter."""
    return lambda app: [change(parameter) for parameter in app.model.parameters()] and None


def set_all(attribute, kind=lambda values: values):
    """An action that sets an attribute of each parameter to its exact gradient."""
    return lambda app: [setattr(named(app)[name], attribute, kind(values)) for name, values in exact(app).items()]


write_grad = set_all("grad")


def scale_grad(parameter):
    if parameter.grad is not None:
        parameter.grad *= 1e6


def add_group(app):
    spare = nn.Parameter(torch.zeros(2))
    spare.grad_sample = None
    app.base.add_param_group({"params": [spare]})


def split_groups(app):
    *rest, last = app.base.param_groups[0]["params"]
    app.base.param_groups[0]["params"] = rest
    app.base.add_param_group({"params": [last], "lr": 2 * LR})


def base_step(app):
    write_grad(app)
    app.base.step()


def second_optimizer(of):
    def step(app):
        write_grad(app)
        torch.optim.SGD(of(app.model).parameters(), lr=LR).step()

    return step


def write_momentum(app):
    for name, values in exact(app).items():
        app.base.state[named(app)[name]]["momentum_buffer"] = values


def edit_momentum(app):
    for state in app.base.state.values():
        state["momentum_buffer"] += mean(app)


def read_momentum(app):
    """Leaves empty entries where there is none."""
    for parameter in app.model.parameters():
        assert app.base.state[parameter].get("momentum_buffer") is not app


def load_optimizer(app):
    state = app.base.state_dict()
    state["state"] = {i: {"momentum_buffer": values} for i, values in enumerate(exact(app).values())}
    app.base.load_state_dict(state)


def exchange_base(app):
    other = sgd(app.model)
    if hasattr(app, "optimizer"):
        app.optimizer.original_optimizer = other
    app.base = other


def patch_base_step(app):
    step = type(app.base).step
    app.base.step = lambda *args: (write_grad(app), step(app.base, *args))[1]


def hook_gradients(parameter):
    if parameter.requires_grad:
        parameter.register_hook(lambda values: values * 1e6)


def hook_accumulated_gradients(parameter):
    def descend(parameter):
        parameter.data -= LR * parameter.grad

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(descend)


def hook_forward(buffer):
    def count(layer, x, y):
        getattr(layer, buffer).add_(x[0].detach().mean(0))

    return lambda app: app.model.statistic.register_forward_hook(count)


def override_state_dict(app):
    state_dict = type(app.model).state_dict

    def tampered(*args, **kwargs):
        state = {name: values.clone() for name, values in state_dict(app.model, *args, **kwargs).items()}
        state["first.weight"] += float(app.rows.tensors[0].abs().max())
        return state

    app.model.state_dict = tampered


def hook_state_dict(app):
    def tamper(module, state, prefix, metadata):
        state["first.weight"] = state["first.weight"] + float(app.rows.tensors[0].abs().max())

    app.model.register_state_dict_post_hook(tamper)


def samples(change):
    """An action on the gradients of the records of each parameter."""
    return for_all(lambda parameter: setattr(parameter, "grad_sample", change(parameter.grad_sample)))


def repeat_a_grad_sample(app):
    parameter = app.model.first.weight
    parameter.grad_sample = torch.cat([parameter.grad_sample] * 2)


def skip_a_step(app):
    if not hasattr(app, "skipped"):
        app.skipped = True
        app.optimizer.signal_skip_step(True)


def pass_again(app):
    cross_entropy(app.module(app.batch[0]), app.batch[1]).backward()


def scale_option(name, factor):
    """An action that changes an option of the private optimizer."""
    return lambda app: setattr(app.optimizer, name, factor * getattr(app.optimizer, name))


def change_learning_rate(app):
    for group in app.base.param_groups:
        group["lr"] *= 0.9


@torch.no_grad()
def evaluate(app):
    app.model.eval()(app.rows.tensors[0])
    app.model.train()


BEFORE, AFTER, FORWARD, STEP, AFTER_STEP, END = PLACES
ALL = set(PLACES)

#: Of each action: the places where it is tried, those where the app's reply leaves since it is harmless or has no
#: effect there, and why the app is refused elsewhere.
CHANGED, THAWED = "changed other than by a private step", "frozen or unfrozen after make_private"
OTHERS, PLAN = "other parameters (or buffers )?than|another parameter", "the base optimizer has other parameters"
STATE, UNCLEARED = "state of the base optimizer|has a state", "not compatible with grad accumulation"
FOREIGN, OTHER_ARRAYS = "Module parameters are different", "other arrays than|not those that private training produced"
INSIDE, UNUSED = ALL - {BEFORE}, {AFTER, FORWARD, AFTER_STEP, END}
NO_SAMPLES = "Per sample gradient"
ACTIONS = {
    "freeze a layer": (lambda app: app.model.first.requires_grad_(False), ALL, {BEFORE, END}, THAWED),
    "freeze all": (
        lambda app: app.model.requires_grad_(False),
        ALL,
        {END},
        f"{THAWED}|no parameter of the optimizer requires|element 0 of tensors does not require",
    ),
    "freeze a bias": (lambda app: app.model.second.bias.requires_grad_(False), ALL, {BEFORE, END}, THAWED),
    "edit a parameter": (edit_parameter, ALL, set(), CHANGED),
    "edit data": (lambda app: app.model.first.weight.data.sub_(exact(app)["first.weight"]), ALL, set(), CHANGED),
    "exchange data": (exchange_data, ALL, set(), CHANGED),
    "edit by NumPy": (edit_by_numpy, ALL, set(), CHANGED),
    "load a model": (load_model, ALL, set(), CHANGED),
    "edit a buffer": (edit_buffer, ALL, set(), CHANGED),
    # before: the preparation of the data, which is assumed
    "edit a hidden buffer": (edit_hidden_buffer, ALL, {BEFORE, END}, CHANGED),
    "exchange a buffer": (exchange_buffer, ALL, {BEFORE, END}, CHANGED),
    "add a buffer": (
        lambda app: app.model.statistic.register_buffer("more", torch.zeros(3), persistent=False),
        ALL,
        {BEFORE, END},
        OTHERS,
    ),
    "add a parameter": (add_parameter, ALL, set(), OTHERS),
    "exchange a parameter": (exchange_parameter, ALL, set(), OTHERS),
    "exchange a layer": (exchange_layer, ALL, {END}, f"{OTHERS}|{FOREIGN}"),
    "write gradients": (write_grad, ALL, ALL, ""),
    "scale gradients": (for_all(scale_grad), ALL, ALL, ""),
    "clip gradients": (lambda app: nn.utils.clip_grad_norm_(app.model.parameters(), 1e-3), ALL, ALL, ""),
    "add a group": (add_group, ALL, {END}, f"{PLAN}|{FOREIGN}"),
    "drop from a group": (lambda app: app.base.param_groups[0]["params"].pop(0), ALL, {END}, f"{PLAN}|{UNCLEARED}"),
    "split groups": (split_groups, ALL, {BEFORE, END}, PLAN),
    "step of the base": (base_step, ALL, set(), CHANGED),
    "second optimizer": (second_optimizer(lambda model: model), ALL, set(), CHANGED),
    "second optimizer of a layer": (second_optimizer(lambda model: model.second), ALL, set(), CHANGED),
    "write momentum": (write_momentum, ALL, {END}, STATE),
    "load an optimizer": (load_optimizer, ALL, {END}, STATE),
    # there is none before the first step
    "edit momentum": (edit_momentum, ALL, {BEFORE, AFTER, END}, STATE),
    "reset momentum": (lambda app: app.base.state.clear(), ALL, {BEFORE, AFTER, END}, STATE),
    "read momentum": (read_momentum, ALL, ALL, ""),
    "exchange the base": (exchange_base, ALL, {BEFORE, END}, PLAN),
    "hook before the base's step": (
        lambda app: app.base.register_step_pre_hook(lambda *_: write_grad(app) and None),
        ALL,
        {END},
        "has a hook",
    ),
    "hook after the base's step": (
        lambda app: app.base.register_step_post_hook(lambda *_: edit_parameter(app)),
        ALL,
        {END},
        "has a hook",
    ),
    "patch the base's step": (patch_base_step, ALL, ALL, ""),  # the guard calls the class' method
    "attach a step hook": (lambda app: app.optimizer.attach_step_hook(lambda _: write_grad(app)), INSIDE, ALL, ""),
    "attach an editing step hook": (
        lambda app: app.optimizer.attach_step_hook(lambda _: edit_parameter(app)),
        INSIDE,
        {END},
        CHANGED,
    ),
    "hook gradients": (for_all(hook_gradients), ALL, ALL, ""),
    "hook accumulated gradients": (for_all(hook_accumulated_gradients), ALL, {END}, CHANGED),
    "hook forward": (hook_forward("mean"), ALL, {END}, CHANGED),
    "hook forward, hidden": (hook_forward("shift"), ALL, {END}, CHANGED),
    "override state_dict": (override_state_dict, ALL, set(), OTHER_ARRAYS),
    "hook state_dict": (hook_state_dict, ALL, set(), OTHER_ARRAYS),
    "remove gradients of records": (for_all(lambda p: setattr(p, "grad_sample", None)), INSIDE, UNUSED, NO_SAMPLES),
    "remove those of a bias": (
        lambda app: setattr(app.model.second.bias, "grad_sample", None),
        INSIDE,
        UNUSED,
        NO_SAMPLES,
    ),
    "scale gradients of records": (samples(lambda values: values * 1e6), {STEP}, {STEP}, ""),
    "infinite gradients of records": (samples(lambda values: values * math.inf), {STEP}, {STEP}, ""),
    "repeat gradients of records": (samples(lambda values: torch.cat([values] * 2)), {STEP}, set(), "other records"),
    "repeat those of a weight": (repeat_a_grad_sample, {STEP}, set(), "stack expects each tensor to be equal size"),
    "write sums of gradients": (set_all("summed_grad", torch.Tensor.double), ALL, ALL, ""),
    "zero_grad": (lambda app: app.optimizer.zero_grad(), INSIDE, UNUSED, NO_SAMPLES),
    "forget zero_grad": (lambda app: setattr(app.optimizer, "zero_grad", lambda: None), {AFTER}, {AFTER}, ""),
    "step again": (lambda app: app.optimizer.step(), INSIDE, set(), ""),
    "skip a step": (skip_a_step, INSIDE, {END}, "other records"),
    "pass again": (pass_again, {FORWARD, STEP, AFTER_STEP}, {AFTER_STEP}, UNCLEARED),
    "more noise": (scale_option("noise_multiplier", 1.1), INSIDE, ALL, ""),
    "less noise": (scale_option("noise_multiplier", 0.9), INSIDE, {AFTER, END}, "reduced within an epoch"),
    "lower clipping norm": (scale_option("max_grad_norm", 0.9), INSIDE, ALL, ""),
    "no clipping norm": (scale_option("max_grad_norm", math.inf), INSIDE, {END}, "clip"),
    "learning rate": (change_learning_rate, ALL, ALL, ""),
    "larger divisor": (lambda app: setattr(app.optimizer, "expected_batch_size", 2 * BATCH), INSIDE, ALL, ""),
    "evaluate": (evaluate, ALL, ALL, ""),
    "exchange the batch": (lambda app: setattr(app, "batch", app.rows.tensors), {FORWARD}, set(), "other records"),
}
freeze_a_layer, freeze_all, step_again = (ACTIONS[name][0] for name in ("freeze a layer", "freeze all", "step again"))


@pytest.mark.parametrize(("action", "tried", "leaves", "reason"), ACTIONS.values(), ids=ACTIONS)
def test_an_action_at_each_place_of_an_app(tmp_path, action, tried, leaves, reason, caplog):
    found = {}
    for place in sorted(tried, key=PLACES.index):
        caplog.clear()
        found[place] = outcome(tmp_path / place.replace(" ", "-"), app_with((place, action)))
        reasons = {BEFORE: f"{reason}|differs from the message", END: f"{reason}|{OTHER_ARRAYS}"}
        if found[place] == "refused" and not re.search(reasons.get(place, reason), caplog.text):
            found[place] = caplog.text
    assert found == {place: "reply" if place in leaves else "refused" for place in found}


@pytest.mark.parametrize("seed", range(40))
def test_several_actions(tmp_path, seed):
    """Whether the app is refused is not known; what leaves is checked in any case."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(list(ACTIONS), 3, replace=False)
    outcome(tmp_path, app_with(*((PLACES[rng.integers(len(PLACES))], ACTIONS[action][0]) for action in chosen)))


# ---- apps that fit no place -------------------------------------------------------------------------------------


def thaw(app):
    app.model.requires_grad_(True)


def backward(app, x, y, scale=1.0):
    app.optimizer.zero_grad()
    loss = scale * cross_entropy(app.module(x), y)
    loss.backward()
    return loss


def loop(step, own_loader=False):
    """An app whose training is a step for each batch, of its own loader or that of make_private."""

    def train(model, rows):
        app = SimpleNamespace(model=model, rows=rows)
        app.module, app.optimizer, loader = make_private(model, sgd(model), rows)
        for x, y in DataLoader(rows, batch_size=BATCH) if own_loader else loader:
            step(app, x, y)

    return train


def honest(app, x, y, scale=1.0):
    backward(app, x, y, scale)
    app.optimizer.step()


def frozen_for_the_step(app, x, y):
    """No parameter requires a gradient when the optimizer steps: nothing is charged without a batch."""
    backward(app, x, y)
    freeze_all(app)
    app.optimizer.step()
    thaw(app)


def closure_that_edits(app, x, y):
    @torch.no_grad()
    def edit():
        for parameter in app.model.parameters():
            parameter -= LR * parameter.grad

    app.optimizer.step(lambda: (backward(app, x, y), edit())[0])


def accumulation(app, x, y):
    """As many passes as a batch needs: their number depends on the records, and must not be the divisor."""
    app.module.allow_grad_accumulation()
    app.optimizer.zero_grad()
    for some, labels in zip(x.split(3), y.split(3), strict=True):
        cross_entropy(app.module(some), labels).backward()
    app.optimizer.step()


def accumulation_over_batches(app, x, y):
    app.module.allow_grad_accumulation()
    app.batches = getattr(app, "batches", 0) + 1
    cross_entropy(app.module(x), y).backward()
    if app.batches % 2 == 0:
        app.optimizer.step()
        app.optimizer.zero_grad()


def global_hook(register, action):
    def train(model, rows):
        app = SimpleNamespace(model=model, rows=rows)
        handle = register(lambda *_: action(app))
        try:
            app_with()(model, rows)
        finally:
            handle.remove()

    return train


def memory_manager(*faults):
    def train(model, rows):
        app = SimpleNamespace(model=model, rows=rows, base=sgd(model))
        app.module, app.optimizer, app.loader = make_private(model, app.base, rows)
        with BatchMemoryManager(data_loader=app.loader, max_physical_batch_size=3, optimizer=app.optimizer) as physical:
            for x, y in physical:
                app.optimizer.zero_grad()
                cross_entropy(app.module(x), y).backward()
                for action in faults:
                    action(app)
                app.optimizer.step()

    return train


def edit_running_sum(app):
    """What a parameter accumulated over physical batches."""
    for name, parameter in app.model.named_parameters():
        if getattr(parameter, "summed_grad", None) is not None:
            parameter.summed_grad += exact(app)[name]


def sends_a_copy(model, rows):
    app_with()(model, rows)
    return copy.deepcopy(model)


def sends_a_tuned_copy(model, rows):
    app_with()(model, rows)
    other = copy.deepcopy(model)
    edit_parameter(SimpleNamespace(model=other, rows=rows))
    return other


def sends_an_average(model, rows):
    average = torch.optim.swa_utils.AveragedModel(model)
    app_with((AFTER_STEP, lambda app: average.update_parameters(app.model)))(model, rows)
    return average.module


def trains_a_copy(model, rows):
    other = copy.deepcopy(model)
    app_with()(other, rows)
    return other


def copies_the_optimizer(model, rows):
    def copied(app):
        app.optimizer = copy.deepcopy(app.optimizer)

    app_with((AFTER, copied))(model, rows)


def private_twice(model, rows):
    app_with()(model, rows)
    app_with()(Net(), rows)


def drops_large_batches(app, x, y):
    if len(x) <= BATCH:
        honest(app, x, y)


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=LR)


class Peeking(torch.optim.SGD):
    """An optimizer that adds the exact sum of what Opacus leaves at a parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad_sample.sum(0)
        return super().step(closure)


def base_that_also(action):
    """An optimizer whose step does something else to the model."""

    def base(model):
        class Also(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                action(model)

        return Also([parameter for parameter in model.parameters() if parameter.requires_grad], lr=LR)

    return base


def shift_bias(model):
    model.first.bias.data += 1


def shift_buffer(model):
    model.statistic.shift += 1


class Embedded(Net):
    """Its first layer renormalises the rows of the records in a batch."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(4, 3, max_norm=1e-2)

    def forward(self, x):
        return self.second(super().forward(x)[:, :1] + self.rows((x[:, 0].abs() * 1e3).long() % 4))


UNSET, NO_GRADIENT = "Per sample gradient is not initialized", "no parameter of the optimizer requires a gradient"
OTHER_RECORDS, ITS_HOOK = "other records than those of its batch", "hook that runs in its steps"
REFUSED = {
    "unused loader": (loop(honest, own_loader=True), "a step without a batch of the loader"),
    "frozen, and unused loader": (loop(frozen_for_the_step, own_loader=True), THAWED),
    "frozen in backward, thawed for the step": (app_with((FORWARD, freeze_a_layer), (STEP, thaw)), UNSET),
    "frozen from the start, thawed for training": (app_with((BEFORE, freeze_a_layer), (AFTER, thaw)), THAWED),
    "frozen from the start, thawed for a step": (app_with((BEFORE, freeze_a_layer), (STEP, thaw)), THAWED),
    "all frozen from the start": (app_with((BEFORE, freeze_all)), NO_GRADIENT),
    "all frozen from the start, thawed for training": (app_with((BEFORE, freeze_all), (AFTER, thaw)), NO_GRADIENT),
    "all frozen for a step, with exact gradients": (app_with((STEP, freeze_all), (STEP, write_grad)), THAWED),
    "closure that edits": (loop(closure_that_edits), CHANGED),
    "hook of all optimizers before a step": (global_hook(register_optimizer_step_pre_hook, write_grad), ITS_HOOK),
    "hook of all optimizers after a step": (global_hook(register_optimizer_step_post_hook, edit_parameter), ITS_HOOK),
    "accumulation over batches": (loop(accumulation_over_batches), OTHER_RECORDS),
    "tuned copy": (sends_a_tuned_copy, OTHER_ARRAYS),
    "average over steps": (sends_an_average, OTHER_ARRAYS),
    "copied optimizer": (copies_the_optimizer, "no attribute 'original_optimizer'"),
    "private twice": (private_twice, "make_private twice"),
    "large batches dropped": (loop(drops_large_batches), OTHER_RECORDS),
    "half of a batch": (loop(lambda app, x, y: honest(app, x[::2], y[::2])), OTHER_RECORDS),
    "two steps for a batch": (loop(lambda app, x, y: [honest(app, x, y) for _ in range(2)]), "a step without a batch"),
    "LBFGS": (app_with(base=lbfgs), "missing 1 required positional argument: 'closure'"),
    "optimizer that changes a frozen parameter": (
        app_with((BEFORE, freeze_a_layer), base=base_that_also(shift_bias)),
        CHANGED,
    ),
    "optimizer that changes a buffer": (app_with(base=base_that_also(shift_buffer)), CHANGED),
    "optimizer that reads gradients of records": (
        app_with(base=lambda model: Peeking(model.parameters(), lr=LR)),
        "'NoneType' object has no attribute 'sum'",
    ),
}


@pytest.mark.parametrize(("train", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_faulty_app_is_refused(tmp_path, train, reason, caplog):
    assert outcome(tmp_path, train) == "refused"
    assert re.search(reason, caplog.text)


FEWER = "other parameters than the message"


class Partial(Net):
    """Its state leaves out a layer, which may have been trained otherwise."""

    def state_dict(self, *args, **kwargs):
        return {name: values for name, values in super().state_dict().items() if "first" not in name}

    def load_state_dict(self, state):
        return super().load_state_dict(state, strict=False)


class Extra(Net):
    """Its state has an entry that is no parameter or buffer."""

    def get_extra_state(self):
        return torch.zeros(2)

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(("make", "text"), [(Partial, FEWER), (Extra, FEWER), (Embedded, CHANGED)])
def test_a_model_with_more_or_less_state_than_parameters_is_refused(tmp_path, make, text, caplog):
    assert outcome(tmp_path, app_with(), make=make) == "refused"
    assert text in caplog.text


HARMLESS = {
    "frozen layer with exact gradients by hand": app_with((BEFORE, freeze_a_layer), (STEP, write_grad)),
    "closure": loop(lambda app, x, y: app.optimizer.step(lambda: backward(app, x, y))),
    "accumulation within a batch": loop(accumulation),
    "memory manager, edited running sums": memory_manager(edit_running_sum),
    "copy": sends_a_copy,
    "trained copy": trains_a_copy,
    "frozen after each step, thawed before the next": app_with((AFTER_STEP, freeze_all), (FORWARD, thaw)),
    "scaled loss": loop(partial(honest, scale=1e6)),
    "loss of infinite scale": loop(partial(honest, scale=math.inf)),
}


@pytest.mark.parametrize("train", HARMLESS.values(), ids=HARMLESS)
def test_a_fault_without_effect_is_accepted(tmp_path, train):
    assert outcome(tmp_path, train) == "reply"


# ---- honest apps -------------------------------------------------------------------------------------------------


class Tied(Net):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.between = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between.weight = self.first.weight
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.second(self.last(self.between(self.first(x))))


def groups(model):
    return torch.optim.SGD([{"params": model.first.parameters()}, {"params": model.second.parameters(), "lr": LR / 2}])


def one_layer(model):
    model.first.requires_grad_(False)
    return torch.optim.SGD(model.second.parameters(), lr=LR)


def adaptive(kind, **options):
    """An optimizer whose step is almost linear in small gradients: eps is large."""
    return lambda model: kind(model.parameters(), lr=LR, eps=10.0, **options)


def schedule(of_base):
    def train(model, rows):
        base = sgd(model)
        module, optimizer, loader = make_private(model, base, rows)
        scheduler = torch.optim.lr_scheduler.StepLR(base if of_base else optimizer, 1, 0.5)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(module(x), y).backward()
                optimizer.step()
            scheduler.step()

    return train


def noise_schedule(model, rows):
    def lower(app):
        app.epoch = getattr(app, "epoch", 0) + 1
        if app.epoch == STEPS:
            app.optimizer.noise_multiplier = NOISE / 2

    app_with((AFTER_STEP, lower), epochs=2)(model, rows)


def unwrapped(model, rows):
    def bare(app):
        app.module = model

    app_with((AFTER, bare), wrap_model=False)(model, rows)


def without_epochs(model, rows):
    make_private(model, sgd(model), rows)


HONEST = {
    "SGD": app_with(base=lambda model: torch.optim.SGD(model.parameters(), lr=LR)),
    "SGD with momentum": app_with(),
    "SGD with weight decay": app_with(base=lambda model: torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.1)),
    "Adam": app_with(base=adaptive(torch.optim.Adam)),
    "AMSGrad": app_with(base=adaptive(torch.optim.Adam, amsgrad=True)),
    "AdamW": app_with(base=adaptive(torch.optim.AdamW)),
    "Adagrad": app_with(base=adaptive(torch.optim.Adagrad, initial_accumulator_value=1.0)),
    "RMSprop": app_with(base=adaptive(torch.optim.RMSprop, momentum=0.5)),
    "parameter groups": app_with(base=groups),
    "optimizer of one layer": app_with(base=one_layer),
    "frozen layer": app_with((BEFORE, freeze_a_layer)),
    "two epochs": app_with(epochs=2),
    "many epochs": app_with(epochs=7),
    "no epoch": without_epochs,
    "schedule of step sizes": schedule(of_base=False),
    "schedule of the base optimizer's step sizes": schedule(of_base=True),
    "noise schedule": noise_schedule,
    "memory manager": memory_manager(),
    "sum of losses": app_with(loss_reduction="sum", base=lambda model: torch.optim.SGD(model.parameters(), LR / BATCH)),
    "without a wrapper": unwrapped,
}


@pytest.mark.parametrize("train", HONEST.values(), ids=HONEST)
def test_an_honest_app_gets_its_reply(tmp_path, train):
    assert outcome(tmp_path, train) == "reply"


def test_a_batch_in_parts_is_one_step(tmp_path):
    """However many passes it takes, the step is that of the whole batch."""
    found = []
    for name, train in (("whole", app_with()), ("parts", memory_manager()), ("passes", loop(accumulation))):
        with pytest.MonkeyPatch.context() as patch:
            answer, _ = World(tmp_path / name, patch, extreme=True).answer(train, Net, None)
        found.append(torch.cat([torch.tensor(array.numpy()).flatten() for array in answer.content["arrays"].values()]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-6)


def test_a_model_with_tied_parameters_gets_its_reply(tmp_path):
    assert outcome(tmp_path, app_with(), make=Tied) == "reply"
