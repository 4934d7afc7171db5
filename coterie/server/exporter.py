"""A Prometheus endpoint for the metrics of a run, updated after every round."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coterie.fields.settings import ConfigError
from coterie.results import RoundRecord
from coterie.server.folder import RunFolder

#: Environment variable with host:port of the endpoint; not set: there is none.
VARIABLE = "COTERIE_METRICS"


def address() -> tuple[str, int] | None:
    """Host and port at which metrics are served; None: nowhere.

    Raises:
        ConfigError: COTERIE_METRICS is no address, or the library is missing.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return None
    host, _, port = value.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise ConfigError(f"{VARIABLE} = {value!r}: must be host:port, such as 127.0.0.1:9100")
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"{VARIABLE} = {value!r} requires prometheus-client, which is not installed: pip install "
            "'coterie[metrics]', or unset it"
        ) from None
    return host.strip("[]"), int(port)


@contextmanager
def serve_metrics(folder: RunFolder, rounds: int) -> Iterator[None]:
    """Serve metrics at the address that COTERIE_METRICS names, during the folder's run of ``rounds``.

    Raises:
        ConfigError: the library is missing, or the port is not available.
    """
    if (served := address()) is None:
        yield
        return
    host, port = served
    from prometheus_client import CollectorRegistry, start_http_server

    registry, gauges, previous = CollectorRegistry(auto_describe=False), _Gauges(folder, rounds), folder.on_metrics
    registry.register(gauges)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"{VARIABLE} = '{host}:{port}': cannot listen there ({error.strerror}); choose another address"
        ) from None

    def observe(record: RoundRecord) -> None:
        gauges.observe(record)
        previous(record)

    folder.on_metrics = observe
    try:
        yield
    finally:
        folder.on_metrics = previous
        server.shutdown()
        server.server_close()
        thread.join()


class _Gauges:
    """Latest metrics of a run; a collector of prometheus_client.

    At client level participation is secret: metrics of such runs contain neither replies nor clients. Exact scores are
    those of runs without privacy.
    """

    def __init__(self, folder: RunFolder, rounds: int) -> None:
        config = folder.config
        self._exact = not folder.plan.private
        self.about = {"strategy": config.run.strategy, "dataset": config.data.dataset}
        done = folder.resumed.round if folder.resumed else 0
        self.values: dict[str, float] = {"round": done, "rounds": rounds, "epsilon_budget": config.budget}
        self.replies: dict[str, int] = {}

    def observe(self, record: RoundRecord) -> None:
        values = {"round": record.round, "epsilon": record.epsilon, "accuracy": record.accuracy}
        values["clients_present"] = record.clients_present
        if self._exact and record.scores.accuracy is not None:
            values["accuracy"] = record.scores.accuracy
        replies = dict(self.replies)
        if record.replies is not None and record.dropped is not None:
            for result, count in (("accepted", record.replies["accepted"]), ("dropped", record.dropped)):
                replies[result] = replies.get(result, 0) + count
        available = {name: value for name, value in values.items() if value is not None}
        self.values, self.replies = {**self.values, **available}, replies  # one assignment: another thread reads

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("coterie_run", "The run.", value=self.about)
        for name, value in self.values.items():
            yield GaugeMetricFamily(f"coterie_{name}", _HELP[name], value=value)
        if self.replies:
            replies = CounterMetricFamily("coterie_replies", "Replies to training and evaluation.", labels=["result"])
            for result, count in self.replies.items():
                replies.add_metric([result], count)
            yield replies


_HELP = {
    "round": "Last completed round.",
    "rounds": "Rounds of the run.",
    "epsilon": "Privacy spent so far; +Inf without privacy.",
    "epsilon_budget": "Privacy budget of the run; +Inf without privacy.",
    "accuracy": "Latest mean accuracy of the clients: noisy and charged; exact in a run without privacy.",
    "clients_present": "Connected clients in the last round.",
}
