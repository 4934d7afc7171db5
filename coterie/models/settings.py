"""Settings of the network and of its local training, common to all methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.fields import COUNT, LEARNING_RATE, LOCAL_EPOCHS
from coterie.models.fixed import FEATURES
from coterie.models.networks import MODELS
from coterie.settings import Settings, setting

#: Why no optimizer, scheduler or loss of users runs at record level.
NOT_AT_RECORD_LEVEL = (
    "at record level clients train by DP-SGD, whose steps, and the loss whose gradients it clips, are Coterie's own; "
    "leave it out, or train in an app of your own under coterie.guard (docs/guard.md)"
)


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
    optimizer: str = setting(
        "sgd",
        "optimizer of a client's training, new in each round",
        choices=("sgd",),
        custom="optimizer",
        client=True,
        tuned=True,
    )
    scheduler: str = setting(
        "constant",
        "factor of lr from step to step of a round",
        choices=("constant",),
        custom="scheduler",
        client=True,
        tuned=True,
    )
    loss: str = setting(
        "default",
        "loss of an example: by default the cross-entropy, or the squared error",
        choices=("default",),
        custom="loss",
        client=True,
        tuned=True,
    )
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

    @property
    def plugins(self) -> dict[str, str]:
        """Optimizer, scheduler and loss of users: the name of each that is not Coterie's own, by setting."""
        names = {"optimizer": self.optimizer, "scheduler": self.scheduler, "loss": self.loss}
        return {kind: name for kind, name in names.items() if name != getattr(TrainingSettings, kind)}
