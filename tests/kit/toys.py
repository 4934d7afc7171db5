"""A federation whose every number can be worked out by hand.

Every example is one white pixel (x = 1 after centring). Group 0 labels it 1, group 1 labels it 0. For the linear
model (two weights, two biases, all at zero) both classes have probability 1/2, so one full-batch step moves a
client of group 0 by lr/2 in (-w0, +w1, -b0, +b1): an update of L2 norm lr. Group 1 moves the opposite way.
"""

import os
import signal
import time
from collections import Counter, OrderedDict
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from coterie.datasets import Source
from coterie.logs import report_progress
from coterie.privacy import NoPrivacy

UP = np.array([-0.5, 0.5, -0.5, 0.5])


def pixels() -> Source:
    """Forty training examples and two test examples, all alike."""
    white = np.ones((40, 1, 1, 1), np.float32)
    return Source("pixels", white, np.ones(40, np.int64), white[:2], np.ones(2, np.int64), 2, reuse=True)


#: Centres of three kinds of vectors.
CORNERS = np.array([[0.7, 0.7, 0.7, 0.7], [-0.7, -0.7, 0.7, 0.7], [-0.7, 0.7, -0.7, -0.7]], np.float32)


def blobs() -> Source:
    """Sixty vectors of three kinds, well apart in [-1, 1], and six to test on."""
    noise = 0.05 * np.random.default_rng(0).standard_normal((66, 4))
    kinds = np.arange(66) % 3
    x = (CORNERS[kinds] + noise.clip(-0.3, 0.3)).astype(np.float32)
    return Source("blobs", x[:60], kinds[:60], x[60:], kinds[60:], 3)


def talking() -> Source:
    """The blobs, of which a client talks while it works."""
    report_progress("reading")
    time.sleep(0.6)  # longer than the engine waits before it listens
    return blobs()


def far() -> Source:
    """Blobs that leave [-1, 1]."""
    near = blobs()
    return Source("far", 2 * near.train_x, near.train_y, near.test_x, near.test_y, 3)


def chain(shape, num_classes):
    """x -> body x -> logits; body = 1 and head = 0 at first."""
    network = nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), body=nn.Linear(1, 1, bias=False), head=nn.Linear(1, num_classes, bias=False))
    )
    nn.init.ones_(network.body.weight)
    nn.init.zeros_(network.head.weight)
    return network


class Deadly(nn.Module):
    """A linear model that kills its process where all features are -9."""

    def __init__(self, features, num_classes):
        super().__init__()
        self.output = nn.Linear(features, num_classes)

    def forward(self, x):
        if (x == -9).all():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.output(x)


def deadly(shape, num_classes):
    return Deadly(*shape, num_classes)


#: Environment variable with the folder in which every process that loads :func:`noted` leaves a file.
PLACE = "COTERIE_TEST_PLACE"


def noted() -> Source:
    """The blobs; notes the process that reads them."""
    if PLACE in os.environ:
        (Path(os.environ[PLACE]) / str(os.getpid())).touch()
    return blobs()


class Slow(nn.Linear):
    """A linear model that takes its time to train, or to predict."""

    def forward(self, x):
        time.sleep(0.3)
        return super().forward(x)


def slow(shape, num_classes):
    return Slow(*shape, num_classes)


def strategy_of(method, plan, **options):
    """A strategy whose own settings stand beside the arguments that all strategies have."""
    own = {name: options.pop(name) for name in list(options) if name in method.settings_class.declared()}
    return method(plan, method.settings_class(**own), **options)


@dataclass(frozen=True, kw_only=True)
class Correlated(NoPrivacy):
    """Noise of a round minus that of the round before, which is the state; one charge for each parity of client ids."""

    def new_state(self):
        return {"last": 0.0, "rounds": 0}

    def charges(self, request, cohort=None):
        return Counter({self.event(): len({client % 2 for client in cohort})})

    def perturb(self, contributions, noise, coins, redraw, state=None):
        output = super().perturb(contributions, noise, coins, redraw)
        drawn = noise.standard_normal(output.sums.shape)
        sums = output.sums + drawn - state["last"]
        state |= {"last": drawn, "rounds": state["rounds"] + 1}
        return replace(output, sums=sums)


def trained(folder, settings):
    """Every array of the models of a run, by file and name."""
    from safetensors.numpy import load_file

    from coterie.engine.in_process import LocalGrid
    from coterie.server import RunConfig, RunFolder, run

    config = RunConfig(settings)
    with closing(RunFolder.create(folder, config)) as made:
        run(made, LocalGrid(config.data.clients))
    files = sorted((folder / "models").glob("*.safetensors"))
    return {(file.name, key): value for file in files for key, value in load_file(file).items()}
