"""Settings of the network and of its local training, common to all methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.fields import COUNT, LEARNING_RATE, LOCAL_EPOCHS
from coterie.fields.settings import ConfigError, Settings, accepted_by, setting
from coterie.models.adapters import ADAPTERS_FORM, NO_ADAPTERS, LoRA
from coterie.models.fixed import FEATURES
from coterie.models.networks import MODELS
from coterie.models.spec import NetworkSpec
from coterie.tasks import parse_weights

#: Why no object of users for training runs at record level.
NOT_AT_RECORD_LEVEL = (
    "at record level clients train by DP-SGD, whose steps (optimizer = sgd, adam or adamw), and the loss whose "
    "gradients it clips, are Coterie's own; leave it out, or train in an app of your own under coterie.guard "
    "(docs/guard.md)"
)
#: Settings that name objects of users for training.
PLUGINS = ("optimizer", "loss", "trainer")
#: Optimizers of Coterie's own.
OPTIMIZERS = ("sgd", "adam", "adamw")
# The training loop that takes steps of an optimizer, and the loss that weights scale.
_OWN_LOOP, _OWN_LOSS = ("training.trainer", ("default",)), ("training.loss", ("default",))


@dataclass(frozen=True)
class TrainingSettings(Settings):  # large: a setting per line of training
    """Network and local training."""

    table: ClassVar[str] = "training"

    model: str = setting("mlp-32", "network", choices=sorted(MODELS), custom="model", client=True, tuned=True)
    adapters: str = setting(
        NO_ADAPTERS,
        "adapters of low rank, which train while the network is frozen",
        allowed=ADAPTERS_FORM,
        check=accepted_by(LoRA.parse),
        client=True,
        tuned=True,
    )
    frozen: str = setting(
        "",
        "layers and parameters of the network that are frozen; empty: those of the model",
        allowed="names or patterns such as conv*, joined by +",
        client=True,
        tuned=True,
    )
    pretrained: str = setting(
        "",
        "public initial parameters, also of what is frozen; empty: those of the model",
        allowed="a file of safetensors",
        client=True,
        place=True,
        path=True,
    )
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
    lr: float = setting(0.2, "step size of a client's training", within=LEARNING_RATE, client=True, tuned=True)
    lr_decay: float = setting(1.0, "factor of lr from round to round", above=0, at_most=1, client=True, tuned=True)
    optimizer: str = setting(
        "sgd",
        "optimizer of a client's training, new in each round",
        choices=OPTIMIZERS,
        custom="optimizer",
        client=True,
        tuned=True,
        only=_OWN_LOOP,
    )
    loss: str = setting(
        "default",
        "loss of an example: by default that of the task, such as the cross-entropy",
        choices=("default",),
        custom="loss",
        client=True,
        tuned=True,
    )
    class_weights: str = setting(
        "",
        "weight of each class in the loss, in order; of several labels that of positives, of all or of each; from "
        "public numbers, as shares of labels would reveal records",
        allowed="numbers such as 1,5",
        check=accepted_by(parse_weights),
        client=True,
        tuned=True,
        only=_OWN_LOSS,
    )
    trainer: str = setting(
        "default",
        "training loop of a client: by default steps of the optimizer",
        choices=("default",),
        custom="trainer",
        client=True,
        tuned=True,
    )
    device: str = setting(
        "auto", "device on which clients train", choices=("auto", "cpu", "cuda"), client=True, place=True
    )
    precision: str = setting(
        "float32",
        "precision of matrix products and convolutions of local training on a GPU, and of GANs (float32 or bfloat16) "
        "also on a processor; DP-SGD has float32",
        choices=("float32", "tf32", "bfloat16"),
        client=True,
    )

    def mean_lr(self, rounds: int) -> float:
        """Root mean square of ``lr`` over the rounds of a run."""
        return self.lr * float(np.sqrt(np.mean(self.lr_decay ** (2.0 * np.arange(rounds)))))

    def check_rounds(self, rounds: int) -> None:
        """Check that the step size is above 0 in every round, as clients require."""
        if not self.lr * self.lr_decay ** (rounds - 1) > 0:
            raise ConfigError(
                f"lr-decay = {self.lr_decay:g}: lr = {self.lr:g} falls to 0 by round {rounds}; increase lr-decay, or "
                "reduce rounds"
            )

    @property
    def network(self) -> NetworkSpec:
        """The model, and what of it trains."""
        return NetworkSpec(self.model, self.adapters, self.frozen, self.pretrained)

    @property
    def plugins(self) -> dict[str, str]:
        """Objects of users in training: the name of each, by setting."""
        names = {kind: getattr(self, kind) for kind in PLUGINS}
        own = self.declared()
        return {kind: name for kind, name in names.items() if name not in own[kind].choices}
