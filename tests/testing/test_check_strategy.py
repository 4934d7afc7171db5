"""check_strategy passes every strategy of Coterie, and finds planted bugs by the item that names them."""

from typing import ClassVar

import numpy as np
import plugged
import pytest

from coterie.strategies import FedAvg
from coterie.strategies.registry import STRATEGIES
from coterie.testing import ConformanceError, check_strategy
from coterie.testing.strategies import STRATEGY_ITEMS
from coterie.wire.messages import unpack_models


@pytest.mark.parametrize("name", [n for n, method in STRATEGIES.items() if method.produces == "models"])
def test_the_strategies_of_coterie_conform(name):
    check_strategy(STRATEGIES[name])


def test_a_strategy_of_a_user_conforms_with_its_settings():
    check_strategy(plugged.Momentum, settings=plugged.MomentumSettings(0.9))


class Bad(FedAvg):
    """FedAvg at client level, with a bug in a subclass."""

    def __init_subclass__(cls):
        cls.name = cls.__name__.lower()
        cls.units = vars(cls).get("units", ("client",))
        cls.row_wise = vars(cls).get("row_wise", True)


class Diverging(Bad):
    def round(self, number, models):
        yield from super().round(number, models)
        return models * np.float32(np.inf)


class Failing(Bad):
    def round(self, number, models):
        yield from super().round(number, models)
        raise KeyError("velocity")


class Random(Bad):
    def round(self, number, models):
        new = yield from super().round(number, models)
        return new + np.random.default_rng().random(new.shape, np.float32)


class SharedState(Bad):
    rounds: ClassVar = []

    def round(self, number, models):
        new = yield from super().round(number, models)
        self.rounds.append(number)
        return new * np.float32(0.9 ** len(self.rounds))


class OwnState(Bad):
    """Keeps momentum in an attribute, which no checkpoint holds."""

    velocity = 0.0

    def round(self, number, models):
        new = yield from super().round(number, models)
        self.velocity = self.velocity / 2 + new - models
        return np.asarray(models + self.velocity, np.float32)


class Spying(Bad):
    """Sees what the grid sends and receives, before replies are validated."""

    def start(self, grid, *args, **more):
        self.grid, self.send = grid, grid.send_and_receive

        def watched(messages, **options):
            self.messages = self.ask(list(messages))
            replies = list(self.send(self.messages, **options))
            if self.messages and self.messages[0].metadata.message_type == "train":
                self.see([reply for reply in replies if reply.has_content()])
            return replies

        grid.send_and_receive = watched
        return super().start(grid, *args, **more)

    def ask(self, messages):
        return messages

    def see(self, replies):
        self.sent = [unpack_models(reply.content["update"])[0] for reply in replies]


class RawMean(Spying):
    """Averages what clients send, without noise and without a charge."""

    def round(self, number, models):
        new = yield from super().round(number, models)
        return new + np.mean(self.sent, axis=0) if self.sent else new


class Uncharged(Spying):
    """Asks the clients once more, without a charge."""

    def round(self, number, models):
        new = yield from super().round(number, models)
        self.see(list(self.send(self.messages)))
        return new


class Peeking(Spying):
    """Sends every client the model that fits client 0 best, which it sees in the reply."""

    seen = 0.0

    def see(self, replies):
        for reply in replies:
            if reply.content["reply"]["client-id"] == 0:
                self.seen = self.value(unpack_models(reply.content["update"])[0])

    def value(self, update):
        return float(update.sum())

    def round(self, number, models):
        new = yield from self.sums(self.training(), models + np.float32(self.seen))
        return self.step(models, new)


class Glancing(Peeking):
    """Sees only the sign of an update; silence looks like the usual sign."""

    def value(self, update):
        return 0.0 if update[0, 0] > 0 else 0.1


class Concealing(Bad):
    """Does not say that the budget ended the run."""

    stopped = None


class DividesByReplies(Spying):
    def see(self, replies):
        self.share = 1 / len(replies)


class Trusting(Spying):
    """Counts replies before they are validated."""

    row_wise, units = False, ("none",)

    def round(self, number, models):
        new = yield from super().round(number, models)
        return new * np.float32(1 / (1 + self.count))

    def see(self, replies):
        self.count = len(replies)


class UnreadableRequest(Spying):
    def ask(self, messages):
        for message in messages:
            if message.metadata.message_type == "train":
                message.content["config"]["round"] = str(message.content["config"]["round"])
        return messages


class SpoiledLedger(Bad):
    def round(self, number, models):
        new = yield from super().round(number, models)
        self.ledger.header["public"] = {"model": new}
        return new


@pytest.mark.parametrize(
    ("strategy", "items"),
    [
        (Diverging, {"models"}),
        (Failing, {"runs"}),
        (Random, {"deterministic"}),
        (SharedState, {"deterministic"}),
        (OwnState, {"resume"}),
        (RawMean, {"row-wise"}),
        (Uncharged, {"charges"}),
        (Peeking, {"row-wise"}),
        (Glancing, {"row-wise"}),
        (Concealing, {"budget"}),
        (DividesByReplies, {"silent"}),
        (Trusting, {"malformed"}),
        (UnreadableRequest, {"requests"}),
        (SpoiledLedger, {"certificate"}),
        (plugged.Undeclared, {"class"}),
        (plugged.ShortRound, {"class"}),
        (plugged.halves, {"class"}),
    ],
)
def test_a_planted_bug_is_found(strategy, items):
    with pytest.raises(ConformanceError) as caught:
        check_strategy(strategy)
    found = {failure.item for failure in caught.value.failures}
    assert items <= found, str(caught.value)
    assert all(failure.problem and failure.solution for failure in caught.value.failures)
    assert all(str(failure) in str(caught.value) for failure in caught.value.failures)


def test_every_item_finds_a_bug():
    (cases,) = test_a_planted_bug_is_found.pytestmark
    assert set().union(*(items for _, items in cases.args[1])) == set(STRATEGY_ITEMS)


def test_items_can_be_skipped():
    check_strategy(OwnState, skip=["resume"])
    with pytest.raises(ValueError, match=r"skip = resumption: must be some of class, "):
        check_strategy(OwnState, skip=["resumption"])
