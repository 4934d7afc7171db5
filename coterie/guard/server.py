"""The ServerApp of a guarded run: its ledger, by site, its budget and its certificate."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from coterie.files import private_folder, write_atomic
from coterie.guard.guarantee import certificate, costs_of
from coterie.guard.owners import Site, Sites, reporter
from coterie.guard.report import GUARD, Report
from coterie.guard.terms import GuardError
from coterie.privacy import ClientLedger, Event, epsilon
from coterie.privacy.accounting import SLACK, check_delta
from coterie.privacy.ledger_lines import count_events

_TRAIN = "train"
_LEDGER, _CERTIFICATE = "ledger.jsonl", "guard.json"


class GuardedServerApp(ServerApp):
    """A ServerApp whose run has a ledger, a budget and a certificate: use it in place of ``ServerApp``.

    Replies that are not from a guarded site do not reach the app. A site that has spent the budget of the run is sent
    no more training messages; its own budget, which counts all runs, is at the site and not known here. A site is all
    nodes with the name that its owner set (``site`` in the node configuration); nodes without a name are one site.

    Args:
        epsilon: budget of the run for each site; inf: none.
        delta: at which epsilon is stated.
        out: folder for ``ledger.jsonl`` and ``guard.json``; empty: ``guard-RUN`` in COTERIE_RUNS or ~/coterie-runs.
    """

    def __init__(self, *, delta: float, epsilon: float = math.inf, out: str | Path = "") -> None:
        super().__init__()
        if not epsilon > 0:
            raise GuardError(f"epsilon must be positive, not {epsilon}")
        check_delta(delta)
        self._epsilon, self._delta, self._out = epsilon, delta, out

    def __call__(self, grid: Grid, context: Context) -> None:
        """Run the app, and write the certificate whatever happens."""
        runs = Path(os.environ.get("COTERIE_RUNS") or Path.home() / "coterie-runs")
        folder = Path(self._out) if self._out else runs / f"guard-{context.run_id}"
        private_folder(folder)
        run = RunLedger(folder, self._epsilon, self._delta, str(context.run_id))
        try:
            super().__call__(GuardedGrid(grid, run), context)
        finally:
            run.close()
            document = certificate(folder / _LEDGER)
            write_atomic(folder / _CERTIFICATE, (json.dumps(document, indent=2) + "\n").encode())
            log(INFO, "guard: epsilon %s at delta %g; certificate %s", document["epsilon"], self._delta, folder)


class RunLedger:
    """Charges of a run by site, in ``ledger.jsonl``.

    Raises:
        LedgerError: the folder is in use, or has the ledger of another run.
    """

    def __init__(self, folder: Path, budget: float, delta: float, run: str) -> None:
        header = {"guard": "run", "run": run}
        self._ledger = ClientLedger(delta, budget, folder / _LEDGER, about=header)
        self._sites = Sites()
        self._events: dict[Site, Counter[Event]] = defaultdict(Counter)
        self._latest: dict[Site, Counter[Event]] = defaultdict(Counter)
        self._messages: Counter[int] = Counter()
        for charge in self._ledger.charges:
            self._events[self._join(*reporter(charge))] += count_events([charge])

    def site(self, node: int) -> Site:
        """The site of a node, as far as reports tell."""
        return self._sites.of(str(node))

    def allows(self, site: Site, under_way: int = 0) -> bool:
        """Whether one more message like the latest one of the site fits the budget of the run.

        Args:
            site: of the node that the message is for.
            under_way: number of messages to the site that may still be answered.
        """
        budget, delta = self._ledger.budget * SLACK, self._ledger.delta
        latest = Counter({event: count * (under_way + 1) for event, count in self._latest[site].items()})
        events = self._events[site] + latest
        # RDP is fast, and exceeds the budget in the last messages only.
        return epsilon(events, delta, "rdp") <= budget or min(costs_of(events, delta).values()) <= budget

    def record(self, node: int, report: Report) -> None:
        """Add the events of a reply, and sync them to disk."""
        self._messages[node] += 1
        details = {
            "site": report.site,
            "node": str(node),
            "num_examples": report.num_examples,
            "verified": report.verified,
            "allow": list(report.allow),
        }
        self._ledger.record(self._messages[node], report.events, guard=details)
        site = self._join(str(node), report.site)
        self._events[site] += report.events
        if report.events:
            self._latest[site] = report.events

    def _join(self, node: str, name: str) -> Site:
        """Take what a report tells of sites; add up what became one."""
        site, absorbed = self._sites.join(node, name)
        if absorbed != site:
            self._events[site] += self._events.pop(absorbed, Counter())
            self._latest[site] = self._latest.pop(absorbed, Counter()) or self._latest[site]
        return site

    def close(self) -> None:
        """Release the file."""
        self._ledger.close()


class GuardedGrid(Grid):
    """A grid that records what guarded sites report, and keeps other replies from the app."""

    def __init__(self, grid: Grid, run: RunLedger) -> None:
        self._grid, self._run = grid, run
        self._asked: dict[str, int] = {}  # node by id of the message
        self._pushed: dict[str, int] = {}  # the same, of training messages that were pushed and not answered yet

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """See Flower's Grid."""
        allowed = self._allowed(messages)
        replies = list(self._grid.send_and_receive(allowed, timeout=timeout))
        self._asked |= {message.metadata.message_id: message.metadata.dst_node_id for message in allowed}
        return [self._seen(reply) for reply in replies]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Flower's Grid."""
        allowed = self._allowed(messages)
        ids = list(self._grid.push_messages(allowed))
        for name, message in zip(ids, allowed, strict=True):
            if name:
                self._asked[name] = message.metadata.dst_node_id
                if _trains(message):
                    self._pushed[name] = message.metadata.dst_node_id
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Flower's Grid."""
        return [self._seen(reply) for reply in self._grid.pull_messages(message_ids)]

    def _allowed(self, messages: Iterable[Message]) -> list[Message]:
        allowed = []
        under_way = Counter(map(self._run.site, self._pushed.values()))
        for message in messages:
            node = message.metadata.dst_node_id
            site = self._run.site(node)
            if _trains(message) and not self._run.allows(site, under_way[site]):
                log(WARNING, "guard: the site of node %s has spent the budget of the run and is left out", node)
                continue
            under_way[site] += _trains(message)
            allowed.append(message)
        return allowed

    def _seen(self, reply: Message) -> Message:
        # The SuperLink verifies which message a reply answers; src_node_id is under the control of the sender.
        node = self._asked.pop(reply.metadata.reply_to_message_id, None)
        self._pushed.pop(reply.metadata.reply_to_message_id, None)
        if node is None:
            log(WARNING, "guard: a reply that answers no open message is left out")
            return _refused(reply)
        if reply.has_error():
            return reply
        try:
            self._run.record(node, Report.parse(reply.content.get(GUARD)))
        except GuardError as error:
            log(WARNING, "guard: a reply of node %s is left out: %s", node, error)
            return _refused(reply)
        del reply.content[GUARD]
        return reply

    def get_node_ids(self) -> Iterable[int]:
        """See Flower's Grid."""
        return self._grid.get_node_ids()

    def set_run(self, run: Any) -> None:
        """See Flower's Grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """See Flower's Grid."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See Flower's Grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)


def _trains(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == _TRAIN


def _refused(reply: Message) -> Message:
    error = Error(ErrorCode.MOD_FAILED_PRECONDITION, "the reply is not from a guarded site")
    return make_message(metadata=reply.metadata, error=error)
