"""Conformance tests of strategies and ClientApps that are not part of Coterie, for use with pytest:

    def test_my_strategy():
        check_strategy(Momentum)

    def test_my_client():
        check_client(app, ArrayRecord(Net().state_dict()), train_config={"lr": 0.1})

docs/extending.md lists the items.
"""

from coterie.testing.clients import check_client
from coterie.testing.failures import ConformanceError, Failure
from coterie.testing.strategies import check_strategy
from coterie.testing.training import check_loss, check_optimizer, check_trainer

__all__ = [
    "ConformanceError",
    "Failure",
    "check_client",
    "check_loss",
    "check_optimizer",
    "check_strategy",
    "check_trainer",
]
