"""Random generators at the boundary of a process.

A fork copies the state of every generator: without new seeds, all children of a process draw the same numbers. Every
process that Coterie forks therefore calls :func:`reseed_generators`. Coterie's own draws do not depend on it: they come
from :class:`coterie.privacy.Streams`, which a process creates when it draws.
"""

from __future__ import annotations

import gc
import random
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def reseed_generators(others: Iterable[object] = ()) -> None:
    """Give every global generator of the loaded libraries, and the ``others``, a new seed from the operating system.

    Global are the generators of `random`, of `numpy.random`, of TensorFlow, and PyTorch's for the CPU and each device.
    Opacus draws from PyTorch's, SciPy and scikit-learn from NumPy's; JAX and randomgen have none. A library that is
    imported later seeds its own from the operating system. CUDA is not initialised.

    Args:
        others: those of :func:`collect_generators`.
    """
    random.seed()
    if "numpy.random" in sys.modules:
        import numpy as np

        np.random.seed()
    if "torch" in sys.modules:
        import torch

        torch.seed()
        for backend in (torch.cuda, torch.xpu):  # torch.seed gives all GPUs one seed, and so the same noise
            _reseed_devices(backend)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(secrets.randbits(63))
    kinds = _kinds()
    for generator in others:
        next(seed for generator_type, seed in kinds.items() if isinstance(generator, generator_type))(generator)


def _reseed_devices(backend: Any) -> None:
    """Seed each device's generator: now, or as soon as the backend is initialised and they exist."""

    def reseed() -> None:
        for generator in backend.default_generators:
            generator.seed()

    backend._lazy_call(reseed, seed_all=True)


@contextmanager
def collect_generators() -> Iterator[list[object]]:
    """Yield a list, to which the end of the context appends the random generators that were created within.

    They may be held by anything: variables of modules, defaults of arguments, attributes.
    """
    created: list[object] = []
    gc.freeze()  # gc.get_objects() then lists new objects only
    try:
        yield created
        kinds = tuple(_kinds())
        created += {
            id(generator): generator for generator in _new_objects() if issubclass(type(generator), kinds)
        }.values()
    finally:
        gc.unfreeze()


def _new_objects() -> Iterator[object]:
    """Yield the objects since `gc.freeze`, some repeatedly: PyTorch's generators are not tracked, but referred to."""
    objects = gc.get_objects()
    while objects:
        yield from objects
        objects = [referent for referent in gc.get_referents(*objects) if not gc.is_tracked(referent)]


def _kinds() -> dict[type, Callable[[Any], object]]:
    """Return how a generator of each type gets a new seed from the operating system, for the loaded libraries."""
    kinds: dict[type, Callable[[Any], object]] = {random.Random: lambda generator: generator.seed()}
    if "numpy.random" in sys.modules:
        import numpy as np

        # A Generator and a RandomState draw from a BitGenerator, which randomgen's classes extend.
        kinds[np.random.BitGenerator] = lambda bits: setattr(bits, "state", type(bits)().state)
        kinds[np.random.SeedSequence] = lambda sequence: sequence.__init__()  # others are spawned from it
        kinds[np.random.RandomState] = _forget_second_normal
    if "torch" in sys.modules:
        import torch

        kinds[torch.Generator] = lambda generator: generator.seed()
    return kinds


def _forget_second_normal(state: Any) -> None:
    """Normal numbers are drawn in pairs."""
    state.set_state(state.get_state(legacy=False) | {"has_gauss": 0, "gauss": 0.0})
