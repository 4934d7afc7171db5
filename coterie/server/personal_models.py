"""Check that a run's clients can personalise its models."""

from __future__ import annotations

from coterie import models as networks
from coterie.fields.settings import ConfigError
from coterie.models import ModelError
from coterie.server.config import RunConfig
from coterie.wire.messages import Layout


def check_personal(config: RunConfig, sent: Layout) -> None:
    """Check the setting ``personalize``.

    Args:
        config: of the run.
        sent: layout of the models that clients receive.

    Raises:
        ConfigError: the method, the network or the data do not support it.
    """
    method, strategy = config.evaluation.personalize, config.run.strategy
    if method == "none":
        return
    shape, classes = config.examples
    network = networks.build(config.training.network, shape, classes)
    whole = Layout.of(networks.trainable(network))
    if not sent.size or (sent.size < whole.size and set(sent.names) < set(whole.names)):
        raise ConfigError(
            f"personalize = {method!r}: with strategy = {strategy!r}, layers of the clients are their own already; set "
            "it to none"
        )
    try:
        networks.check_personal(network, method, config.task, additive=sent.size > whole.size)
    except ModelError as error:
        raise ConfigError(str(error)) from None
