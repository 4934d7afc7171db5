"""Generators get new seeds from the operating system: global ones, and those that some code created."""

import math
import random
import subprocess
import sys
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit.tables import for_rows
from randomgen import AESCounter
from torch.utils.data import DataLoader, Dataset

from coterie.flower.generators import collect_generators, reseed_generators


@pytest.mark.parametrize(
    ("seed", "draw"),
    [
        (random.seed, random.random),
        (np.random.seed, np.random.random),
        (torch.manual_seed, lambda: torch.rand(()).item()),
    ],
)
def test_global_generators(seed, draw):
    seed(0)
    expected = draw()
    seed(0)
    reseed_generators()
    assert draw() != expected


@pytest.mark.parametrize("initialised", [False, True])
def test_each_gpu_gets_a_seed_of_its_own(monkeypatch, initialised):
    gpus = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialised)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: 2)

    def seeds():
        if not initialised:  # PyTorch does this when it initialises CUDA
            for queued in filter(None, torch.cuda._lazy_seed_tracker.get_calls()):
                queued[0]()
        return {gpu.initial_seed() for gpu in gpus}

    torch.manual_seed(0)  # as an app may when it is imported
    assert seeds() == {0}
    reseed_generators()
    assert len(seeds() - {0}) == 2


GPU = """
import os
import torch
from coterie.flower.generators import reseed_generators
torch.manual_seed(0)
for _ in range(3):
    if os.fork() == 0:
        reseed_generators()
        assert not torch.cuda.is_initialized()
        print(torch.rand((), device="cuda").item(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="draws on a GPU; this machine has none")
def test_forks_draw_apart_on_a_gpu():
    done = subprocess.run([sys.executable, "-c", GPU], capture_output=True, text=True, timeout=120, check=True)
    assert len(set(done.stdout.split())) == 3


def test_tensorflow(monkeypatch):
    seeds = []
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(random=SimpleNamespace(set_seed=seeds.append)))
    reseed_generators()
    reseed_generators()
    assert len({0, *seeds}) == 3


ALONE = """
import sys
from coterie.flower.generators import collect_generators, reseed_generators
with collect_generators() as created:
    reseed_generators()
print(created, {"numpy", "tensorflow", "torch"} & {*sys.modules})
"""


def test_no_library_is_imported():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[] set()\n"


def second_of_a_pair():
    state = np.random.RandomState(0)
    state.standard_normal()  # the next one is drawn as well
    return state, lambda: state.standard_normal()


def drawing(generator, draw):
    return generator, lambda: draw(generator)


@for_rows(
    "make",
    [
        lambda: drawing(random.Random(0), lambda own: own.random()),
        lambda: drawing(np.random.default_rng(0), lambda own: own.random()),
        lambda: drawing(np.random.default_rng(0), lambda own: own.spawn(1)[0].random()),
        lambda: drawing(np.random.Generator(AESCounter(0)), lambda own: own.random()),
        lambda: drawing(np.random.RandomState(0), lambda own: own.random()),
        second_of_a_pair,
        lambda: drawing(np.random.SeedSequence(0), lambda own: own.spawn(1)[0].generate_state(1)[0]),
        lambda: drawing(torch.Generator(), lambda own: torch.rand((), generator=own).item()),
        lambda: drawing([{"own": (torch.Generator(),)}], lambda own: torch.rand((), generator=own[0]["own"][0]).item()),
        lambda: drawing(lambda own=random.Random(0): own.random(), lambda function: function()),  # noqa: B008
    ],
)
def test_own_generators(make):
    _, draw = make()
    expected = draw()
    with collect_generators() as created:
        _, draw = make()
    reseed_generators(created)
    assert draw() != expected


def test_generators_of_before_are_not_collected():
    before = random.Random(0), np.random.default_rng(0)
    with collect_generators() as created:
        kept = random.Random(0), before
    assert created == [kept[0]]


def test_secret_randomness_needs_no_seed():
    with collect_generators() as created:
        kept = random.SystemRandom()
    reseed_generators(created)
    assert 0 <= kept.random() < 1


def test_pytorch_uses_32_bits_of_a_seed():
    """docs/privacy.md states it, and how many messages share a stream with probability 1/2."""
    first, second = (torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1 + 2**32))
    assert torch.equal(first, second)
    assert 1 - math.exp(-(77_000**2) / 2**33) == pytest.approx(0.5, abs=0.002)


class Draws(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index, random.random(), np.random.random(), torch.rand(()).item()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader:UserWarning")
def test_pytorch_seeds_the_workers_of_a_loader():
    loader = DataLoader(Draws(), batch_size=1, num_workers=3, multiprocessing_context=get_context("fork"))
    columns = zip(*(map(torch.Tensor.item, batch) for batch in loader), strict=True)
    assert [len(set(column)) for column in columns] == [3, 3, 3, 3]
