"""Settings of the network and of its local training, common to all methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.fields import COUNT, LEARNING_RATE, LOCAL_EPOCHS
from coterie.models.fixed import FEATURES
from coterie.models.networks import MODELS
from coterie.settings import Settings, setting


@dataclass(frozen=True)
class TrainingSettings(Settings):
    """Network and local training."""

    table: ClassVar[str] = "training"

    model: str = setting("mlp-32", "network", choices=sorted(MODELS), custom="model", client=True, tuned=True)
    features: str = setting(
        "none",
        "fixed layer in front of the network",
        choices=sorted(FEATURES),
        custom="features",
        client=True,
        tuned=True,
    )
    local_epochs: int = setting(
        4, "passes over a client's data in a round", within=LOCAL_EPOCHS, client=True, tuned=True
    )
    batch_size: int = setting(7, "examples in a client's mini-batch", within=COUNT, client=True, tuned=True)
    lr: float = setting(0.2, "step size of a client's SGD", within=LEARNING_RATE, client=True, tuned=True)
    lr_decay: float = setting(1.0, "factor of lr from round to round", above=0, at_most=1, client=True, tuned=True)
    device: str = setting(
        "auto", "device on which clients train", choices=("auto", "cpu", "cuda"), client=True, place=True
    )
    gpu_precision: str = setting(
        "float32",
        "precision of matrix products and convolutions of local training on a GPU, except for DP-SGD",
        choices=("float32", "tf32", "bfloat16"),
        client=True,
    )

    def mean_lr(self, rounds: int) -> float:
        """Root mean square of ``lr`` over the rounds of a run."""
        return self.lr * float(np.sqrt(np.mean(self.lr_decay ** (2.0 * np.arange(rounds)))))
