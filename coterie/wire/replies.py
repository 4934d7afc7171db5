"""Replies to an evaluation, one frozen dataclass a kind. The server validates each one before it aggregates any.

The client is the one that the server asked, whatever the reply claims. A reply that is rejected contributes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Self, TypeVar

from flwr.app import MetricRecord

from coterie.fields import Bounds, Fields, Length
from coterie.wire.messages import ReplyError

_MAX_CLASSES = 10_000
_MAX_COUNTS = 1_000_000
# Of records with one label and one class; the sum over a million clients still fits into 64 bits.
_MAX_RECORDS = 2**40 - 1

Index = Annotated[int, Bounds(0, 1_000_000_000)]


@dataclass(frozen=True, kw_only=True)
class Diagnostics(Fields):
    """A reply with diagnostics of one client; :meth:`parse` returns a valid one."""

    error = ReplyError

    @classmethod
    def parse(
        cls,
        record: Mapping[str, Any],
        *,
        client_id: int,
        num_clusters: int,
        num_clients: int,
        assigned: int | None = None,
    ) -> Self:
        """Read and check every field.

        Args:
            record: the diagnostics of the reply.
            client_id: the client that was asked; ``client-id`` of the record is ignored.
            num_clusters: k.
            num_clients: M.
            assigned: cluster that the server assigned to the client; None: the client chose.

        Raises:
            ReplyError: a field is missing, has another type, or is out of bounds.
        """
        reply = cls.from_record({**record, "client-id": client_id})
        reply.check(num_clusters, num_clients, assigned)
        return reply

    def check(self, num_clusters: int, num_clients: int, assigned: int | None) -> None:
        """Check what depends on the run.

        Raises:
            ReplyError: a field is out of bounds.
        """


@dataclass(frozen=True, kw_only=True)
class EvaluationReply(Diagnostics):
    """How well a client's model does on its held-out data.

    Attributes:
        client_id: the client that was asked.
        accuracy: share of the held-out examples that are classified correctly.
        cluster: index of the client's model, below k.
        group: index of the client's true group, below M.
        loss: on the training data; None if the client does not report it.
        num_examples: number of held-out examples; None if the client does not report it.
        personal_accuracy: accuracy of the model that the client fitted to its own records; None without one.
    """

    client_id: Index
    accuracy: Annotated[float, Bounds(0, 1)]
    cluster: Index
    group: Index
    loss: float | None = None
    num_examples: Annotated[int | None, Bounds(1, 1_000_000_000)] = None
    personal_accuracy: Annotated[float | None, Bounds(0, 1)] = None

    def check(self, num_clusters: int, num_clients: int, assigned: int | None) -> None:
        """Check the cluster and the group."""
        for key, value, bound in (("cluster", self.cluster, num_clusters), ("group", self.group, num_clients)):
            if value >= bound:
                raise ReplyError(f"{key} is {value}; expected an integer in [0, {bound})")
        if assigned is not None and self.cluster != assigned:
            raise ReplyError(f"cluster is {self.cluster}; the server assigned cluster {assigned}")


@dataclass(frozen=True, kw_only=True)
class LabelCounts(Diagnostics):
    """Numbers of a client's records by label and class.

    Attributes:
        client_id: the client that was asked.
        classes: number of classes.
        confusion: (k * classes,) numbers of records, label by label.
    """

    client_id: Index
    classes: Annotated[int, Bounds(1, _MAX_CLASSES)]
    confusion: Annotated[tuple[int, ...], Length(_MAX_COUNTS), Bounds(0, _MAX_RECORDS)]

    def check(self, num_clusters: int, num_clients: int, assigned: int | None) -> None:
        """Check the number of counts."""
        if len(self.confusion) != num_clusters * self.classes:
            raise ReplyError(
                f"confusion has {len(self.confusion)} entries; expected {num_clusters} clusters x "
                f"{self.classes} classes"
            )


R = TypeVar("R", bound=Diagnostics)


@dataclass(frozen=True)
class Summary(Generic[R]):
    """An ``evaluate_metrics_aggr_fn`` of replies of one kind: a strategy passes it valid replies only.

    Attributes:
        reply: class of the replies.
        aggregate: computes the metrics of all replies.
    """

    reply: type[R]
    aggregate: Callable[[Sequence[R]], MetricRecord]

    def __call__(self, replies: Sequence[R]) -> MetricRecord:
        """The metrics of all replies."""
        return self.aggregate(replies)


def summary_of(reply: type[R]) -> Callable[[Callable[[Sequence[R]], MetricRecord]], Summary[R]]:
    """Decorate a function that aggregates valid replies of this class."""
    return lambda aggregate: Summary(reply, aggregate)
