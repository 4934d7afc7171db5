"""The Flower client mod of a guarded site."""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Collection, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from coterie.client.budget import ledger_path, spend
from coterie.client.identity import Client
from coterie.client.state import ClientError
from coterie.files import open_private, private_folder
from coterie.guard.guarantee import MAX_RDP
from coterie.guard.report import GUARD, Report
from coterie.guard.terms import Declared, GuardError, Terms
from coterie.logs import printable
from coterie.privacy import Event, epsilon, read_ledger
from coterie.wire.messages import EVALUATE, IDENTITY, REPLY, TRAIN

#: Reason of every error reply of a guarded site: one text, whatever happened.
REFUSAL = "refused by the site's guard, or the app failed; the reason is in the site's own log"

_EXAMPLES = ("num-examples", "num_examples")

Arrays = dict[str, npt.NDArray[Any]]


class Guard:
    """Keeps a site's ledger around an app's own DP training: ``ClientApp(mods=[Guard(...)])``.

    The terms of a deployed site are in its node configuration, which only its owner writes:
    ``epsilon=2.0 delta=1e-5 num-examples=5000 state-dir="/var/lib/guard"``, and optionally ``data``, ``budget-file``,
    ``allow`` and, for an app whose DP training the guard cannot see, ``noise-multiplier``, ``sampling-rate`` and
    ``steps`` of a training message. If it sets ``epsilon``, those of the app's code are ignored.

    The arguments are the terms of nodes without their own, such as simulated ones; see
    :class:`~coterie.guard.terms.Terms`.

    Attributes:
        report_name: name of the record by which the guard reports to :class:`~coterie.guard.GuardedServerApp`.
    """

    report_name: ClassVar[str] = GUARD

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        num_examples: int | None = None,
        state_dir: str | Path | None = None,
        data: str | Path | None = None,
        budget_file: str | Path | None = None,
        allow: Collection[str] = (),
        declared: Declared | None = None,
    ) -> None:
        self._defaults = {
            "epsilon": epsilon,
            "delta": delta,
            "num_examples": num_examples,
            "state_dir": state_dir,
            "data": data,
            "budget_file": budget_file,
            "allow": allow,
            "declared": declared,
        }

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message by the app, within the terms of the site; every failure is the same error reply."""
        try:
            terms = Terms.of_node(context.node_config, self._defaults)
            content = _answered(message, context, call_next, terms)
        except (Exception, SystemExit) as error:
            expected = isinstance(error, GuardError | ClientError)
            log(WARNING, "guard: %s: %s", type(error).__name__, printable(error), exc_info=None if expected else error)
            refusal = Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=REFUSAL)
            return Message(refusal, reply_to=message)
        return Message(content, reply_to=message)


def _answered(message: Message, context: Context, call_next: ClientAppCallable, terms: Terms) -> RecordDict:
    message_type = message.metadata.message_type
    report = Report(terms.num_examples, Counter(), terms.declared is None, tuple(sorted(terms.allow)), terms.site)
    if message_type == IDENTITY:  # of a strategy of Coterie: the answer is in the terms
        identity = ConfigRecord({"client-id": terms.client_id, "evaluates": EVALUATE in terms.allow})
        return RecordDict({REPLY: identity, GUARD: report.record()})
    if message_type.partition(".")[0] == TRAIN:
        return _trained(message, context, call_next, terms)
    if message_type not in terms.allow:
        raise GuardError(f"{printable(message_type)} is not allowed; to allow it, list it under allow")
    reply = _reply(call_next(message, context))
    return RecordDict({**_metrics(reply, terms), GUARD: report.record()})


def _trained(message: Message, context: Context, call_next: ClientAppCallable, terms: Terms) -> RecordDict:
    from coterie.guard.watched_training import Watch, watched  # imports PyTorch

    received = _arrays(message.content)
    details = {
        "run": str(context.run_id),
        "site": terms.site,
        "num_examples": terms.num_examples,
        "allow": sorted(terms.allow),
    }

    def charge(events: Counter[Event]) -> None:
        _charge(terms, events, {**details, "verified": terms.declared is None})

    if terms.declared is not None:
        charge(terms.declared.events())
        reply = _reply(call_next(message, context))
        events, arrays = terms.declared.events(), _like(_arrays(reply), received)
    else:
        watch = Watch(received, terms.num_examples, charge)
        with watched(watch):
            reply = _reply(call_next(message, context))
        events, arrays = watch.events, watch.released()
        sent = _like(_arrays(reply), received)
        if not all(np.array_equal(values, sent[name]) for name, values in arrays.items()):
            raise GuardError("the arrays of the reply are not those that private training produced")
    (name,) = reply.array_records
    report = Report(terms.num_examples, events, terms.declared is None, tuple(sorted(terms.allow)), terms.site)
    record = ArrayRecord({key: Array(np.asarray(values, order="C")) for key, values in arrays.items()})
    return RecordDict({name: record, **_metrics(reply, terms), GUARD: report.record()})


def _charge(terms: Terms, events: Counter[Event], details: Mapping[str, Any]) -> None:
    """Charge the site's ledger, one process at a time.

    Raises:
        GuardError, ClientError: the budget does not allow it, or the ledger cannot be used, or has charges of this run
            under another name of the site.
    """
    if not epsilon(events, terms.delta, "rdp") <= MAX_RDP:
        raise GuardError(f"one epoch or message would cost more than epsilon = {MAX_RDP:g}")
    folder = Path(terms.state_dir)
    budget = (terms.epsilon, terms.delta)
    client = Client(terms.client_id, terms.state_dir, budget, data=terms.data, budget_file=terms.budget_file)
    private_folder(folder)
    path = ledger_path(client, folder)
    private_folder(path.parent)
    with open_private(path.with_name(path.name + ".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _check_name(path, details)
        spend(client, folder, None, 0, events, guard=dict(details))


def _check_name(path: Path, details: Mapping[str, Any]) -> None:
    charges = read_ledger(path)[1] if path.exists() and path.stat().st_size else []
    for entry in (charge.get("guard", {}) for charge in charges):
        site = entry.get("site", details["site"])  # ledgers of before sites had names have none
        if entry.get("run") == details["run"] and site != details["site"]:
            raise GuardError(
                f"the ledger has charges of this run as site {site!r} (empty: without a name): a site keeps its name "
                "within a run"
            )


def _reply(reply: Message) -> RecordDict:
    if reply.has_error():
        raise GuardError(f"the app replies with an error: {printable(reply.error.reason)}")
    return reply.content


def _arrays(content: RecordDict) -> Arrays:
    """The arrays of a message or a reply, which must be in one record."""
    if len(content.array_records) != 1:
        raise GuardError(f"expected one ArrayRecord, not {len(content.array_records)}")
    (record,) = content.array_records.values()
    return {name: array.numpy() for name, array in record.items()}


def _like(arrays: Arrays, received: Arrays) -> Arrays:
    """The arrays of a reply in the order of the message.

    Raises:
        GuardError: a name, shape or type differs, or a value is not finite.
    """
    if set(arrays) != set(received):
        raise GuardError("the reply has other arrays than the message")
    for name, values in received.items():
        if (arrays[name].shape, arrays[name].dtype) != (values.shape, values.dtype):
            raise GuardError(f"array {printable(name)!r} of the reply has another shape or type than in the message")
        if not np.isfinite(arrays[name]).all():
            raise GuardError(f"array {printable(name)!r} of the reply is not finite")
    return {name: arrays[name] for name in received}


def _metrics(reply: RecordDict, terms: Terms) -> dict[str, MetricRecord]:
    """The metrics that may leave: the public number of records, and those that the owner allows."""
    metrics = {}
    for key, record in reply.metric_records.items():
        values: dict[str, Any] = {name: value for name, value in record.items() if name in terms.allow}
        values |= {name: terms.num_examples for name in record if name in _EXAMPLES}
        metrics[key] = MetricRecord(values)
    return metrics
