"""Models of single clients: the last layer, which a client can fit to its own records, and the steps of one that trains
alone (client/personal.py).

Plain SGD with one step size ends at a distance from the minimum that grows with the step size. A model that others
share is a mean over clients, which removes most of it; for a model of one client, small last steps do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie.models.errors import ModelError
from coterie.models.trainable import trainable

if TYPE_CHECKING:
    from torch import nn

    from coterie.tasks import Task


#: Step size of the last steps, as a share of that of training.
SMALL_STEP = 0.1
# Share of all steps that are small.
_SMALL = 0.25


def small_steps(total: int) -> int:
    """Return how many of ``total`` epochs or rounds, the last ones, have the small step size."""
    return int(_SMALL * total)


def last_layer(network: nn.Module) -> str:
    """Return the name of the last module with parameters of its own; of a sum of two networks, the cluster's."""
    names: list[str] = [name for name, module in network.named_modules() if [*module.parameters(recurse=False)]]
    return names[-1]


def check_personal(network: nn.Module, method: str, task: Task, *, additive: bool = False) -> None:
    """Check that clients can personalise a network.

    Args:
        network: the network.
        method: one of :data:`~coterie.fields.PERSONAL_METHODS`.
        task: what it predicts.
        additive: whether clients receive sums of two such networks.

    Raises:
        ModelError: they cannot.
    """
    from torch import nn

    if method == "all":
        return
    if method == "mixture" and additive:
        raise ModelError(
            "personalize = 'mixture' adds two networks, but the models of this method are sums of two already; set "
            "personalize to last-layer, all or prior"
        )
    if method == "prior" and not task.has_classes:
        raise ModelError(
            f"personalize = 'prior' corrects for shares of classes, but the task is {task.name}; set personalize to "
            "last-layer or all"
        )
    name = last_layer(network)
    head = network.get_submodule(name)
    if type(head) is not nn.Linear:
        raise ModelError(
            f"personalize = {method!r} requires a network whose last layer is linear, but that of "
            f"{type(network).__name__} is {type(head).__name__}; set personalize to all or none"
        )
    if f"{name}.weight".lstrip(".") not in trainable(network):
        raise ModelError(
            f"personalize = {method!r} requires a last layer that trains, but the weight of '{name}' in "
            f"{type(network).__name__} is frozen or that of another layer; set personalize to all or none"
        )
    if method == "prior" and head.bias is None:
        raise ModelError(
            "personalize = 'prior' moves the bias of the last layer, which this network lacks; set personalize to "
            "last-layer or all"
        )
