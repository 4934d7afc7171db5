"""One run from its configuration to its result, on whatever grid it is given."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from coterie import __version__
from coterie import models as networks
from coterie.files import read_bytes
from coterie.logs import printable
from coterie.privacy import Streams
from coterie.server import planning
from coterie.server.config import RunConfig
from coterie.server.exporter import serve_metrics
from coterie.server.folder import RunFolder
from coterie.server.metrics import OUTSIDE, SCORES, SCORES_OF_CLIENTS, summarise, summarise_records
from coterie.server.recorders import recording
from coterie.strategies import ClusteredStrategy, StrategyError
from coterie.wire import LabelRequest
from coterie.wire.messages import Layout, pack_models, unpack_models
from coterie.wire.model_card import ModelCard, scaling_of

_TRAFFIC = ("messages_down", "messages_up", "bytes_down", "bytes_up")


class RunError(RuntimeError):
    """The run came to its end without doing what was asked."""


def run(folder: RunFolder, grid: Grid) -> dict[str, Any]:
    """Train, certify, and write models, certificate, result and diagnostics into ``folder``.

    Returns:
        what result.json holds, and under ``diagnostics`` what diagnostics.json holds; None without exact scores.

    Raises:
        RunError: no client's reply could be used in the whole run, or the budget ended it early.
        ConfigError: metrics cannot be served or recorded.
    """
    if folder.failure is not None:
        raise RunError(folder.failure)
    with recording(folder):
        return _run(folder, grid)


def _run(folder: RunFolder, grid: Grid) -> dict[str, Any]:
    config = folder.config
    streams = Streams(config.seed)
    strategy = make_strategy(config, folder, streams)
    models, layout = initial_models(config, streams)
    client_config = ConfigRecord({**config.for_clients(), "clients-dir": str(folder.path.absolute() / "clients")})
    rounds = rounds_of(config)
    try:
        with serve_metrics(folder, rounds):
            result = strategy.start(
                grid,
                pack_models(models, layout),
                num_rounds=rounds,
                timeout=config.deployment.round_timeout,
                train_config=client_config,
            )
    except StrategyError as error:
        raise RunError(f"{error}{_most_common(strategy.statistics.dropped, '')}") from error
    trained, layout = unpack_models(result.arrays)
    guarantee = folder.certify()
    folder.write_models(trained, layout, _card(config, strategy, guarantee, folder, len(trained)))
    if strategy.statistics.asked and not strategy.statistics.accepted:
        folder.failure = f"no valid reply in the whole run{_most_common(strategy.statistics.dropped)}"
        raise RunError(folder.failure)
    exact = _diagnostics(config, guarantee, folder, result)
    if exact is not None:
        folder.write_json("diagnostics.json", exact)
    outcome = _result(config, guarantee, folder, result)
    if sites := _sites(config, _clusters_of(strategy, len(folder.metrics()), _last_evaluation(result)[1])):
        outcome["sites"] = sites
    folder.write_json("result.json", outcome)
    if strategy.statistics.dropped:
        log(WARNING, "%s replies were dropped", strategy.statistics.dropped.total())
    if strategy.stopped:
        done, planned = outcome["rounds"], config.run.rounds
        raise RunError(f"the budget is exhausted after {done} of {planned} rounds; models and results are saved")
    return {**outcome, "diagnostics": exact}


def _card(
    config: RunConfig, strategy: ClusteredStrategy, guarantee: Mapping[str, Any], folder: RunFolder, models: int
) -> ModelCard:
    """The card of the first model."""
    request, facts = strategy.evaluation(), config.facts
    of_records = request.encoder if isinstance(request, LabelRequest) else None
    return ModelCard(
        strategy=config.run.strategy,
        dataset=config.data.dataset,
        model=config.training.model,
        features=config.training.features,
        kind=facts.kind,
        shape=facts.shape,
        num_classes=facts.num_classes,
        cluster=0,
        clusters=models if of_records is None else config.run.clusters,
        additive=request.additive,
        encoder=of_records,
        columns=facts.schema.feature_names if facts.schema else None,
        table_schema=config.data.table_schema or None,
        classes=(facts.schema.class_names or None) if facts.schema else None,
        scaling="by the schema of the table" if facts.schema else scaling_of(facts.kind),
        rounds=len(folder.metrics()),
        unit=config.privacy.privacy_unit,
        epsilon=guarantee["epsilon"],
        delta=guarantee["delta"],
        certified=guarantee["certified"],
        certificate=sha256(read_bytes(folder.path / "privacy.json")).hexdigest(),
        version=__version__,
    )


def _sites(config: RunConfig, clusters: Mapping[int, int]) -> list[dict[str, Any]]:
    """The clients whose cluster may be published or that have a name, JSON-ready."""
    names = dict(enumerate(config.client_names))
    return [
        {"client": client}
        | ({"name": names[client]} if client in names else {})
        | ({"cluster": clusters[client]} if client in clusters else {})
        for client in sorted(names.keys() | clusters.keys())
    ]


def _clusters_of(strategy: ClusteredStrategy, rounds: int, evaluation: Mapping[str, Any]) -> dict[int, int]:
    """The cluster of every client, as far as the guarantee allows to publish it.

    At record level clients release their labels, or the server computes them from releases. Without privacy, they also
    report the label of the evaluated model. At client level only noisy sizes of clusters are released.
    """
    if strategy.plan.unit == "client" or not strategy.clustered:
        return {}
    sites = dict(strategy.membership(rounds))
    if not strategy.plan.private:
        sites |= dict(zip(evaluation.get("client_id", ()), evaluation.get("client_cluster", ()), strict=True))
    return sites


def rounds_of(config: RunConfig) -> int:
    """How many rounds there will be."""
    return min(config.run.stop_after or config.run.rounds, config.run.rounds)


def make_strategy(config: RunConfig, folder: RunFolder, streams: Streams) -> ClusteredStrategy:
    """The configured strategy, wired to the run folder."""
    evaluation = config.evaluation
    options = replace(
        config.strategy_options,
        ledger=folder.ledger,
        streams=streams,
        evaluate="private" if evaluation.evaluate == "private" else "diagnostic",
        evaluate_every=evaluation.evaluate_every if evaluation.evaluate != "off" else 0,
        evaluate_clients=evaluation.evaluate_clients or 0,
        recorder=folder,
        resume_from=folder.resumed,
        evaluate_metrics_aggr_fn=summarise_records if config.method.produces == "labels" else summarise,
    )
    return config.strategy(folder.plan, options)


def initial_models(config: RunConfig, streams: Streams) -> tuple[np.ndarray, Layout]:
    """(k, d) independently initialised models, which no data has touched."""
    shape, classes = config.examples
    if config.method.produces == "models":
        networks.check_kind(config.training.model, config.facts.kind)
        networks.check_network(config.training.model, shape, classes, config.facts.kind)
    rng = streams.stream("models")

    def draw(gan: str = "", categories: int = 0) -> dict[str, np.ndarray]:
        seed = int(rng.integers(2**62))
        if gan:
            return networks.drawn(lambda: networks.build_gan(gan, shape, categories), seed)
        return networks.initialise(config.training.model, shape, classes, seed)

    strategy = config.strategy(planning.sketch(config))
    drawn = [strategy.initial_parameters(draw) for _ in range(max(config.models, 1))]
    layout = Layout.of(drawn[0])
    return np.stack([layout.flatten(parameters) for parameters in drawn]), layout


def _most_common(dropped: Counter[str], otherwise: str = ": no client replied") -> str:
    if not dropped:
        return otherwise
    reason, count = dropped.most_common(1)[0]
    return f": {dropped.total()} were dropped, most often ({count} times): {printable(reason)}"


def _skipped_rounds(folder: RunFolder, lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rounds that were charged, and that a crash ended before their release, if they are never repeated."""
    if folder.plan.repeats_rounds:
        return []
    return sorted(folder.ledger.training_rounds - {line["round"] for line in lines})


def _last_evaluation(result: Result) -> tuple[int | None, dict[str, Any]]:
    """The round of the last evaluation, and what it came to; None and nothing without one."""
    evaluations = result.evaluate_metrics_clientapp
    last = max(evaluations, default=None)
    return last, {} if last is None else dict(evaluations[last])


def _diagnostics(
    config: RunConfig, guarantee: dict[str, Any], folder: RunFolder, result: Result
) -> dict[str, Any] | None:
    """Exact scores of the last evaluation; None where there are none, as under ``evaluate = private``."""
    last, evaluation = _last_evaluation(result)
    lines = folder.metrics()
    if lines and last == lines[-1]["round"]:
        folder.amend_last(evaluation)
    if config.evaluation.evaluate == "private":
        return None
    wanted = SCORES if guarantee["certified"] else SCORES + SCORES_OF_CLIENTS
    exact = {score: evaluation[score] for score in wanted if score in evaluation}
    if not exact:
        return None
    groups = evaluation.get("classes") or len(evaluation.get("group_accuracy", ()))
    if "confusion" in evaluation:
        exact["confusion"] = np.reshape(evaluation["confusion"], (-1, groups)).tolist()
    if groups and config.method.produces == "models":
        exact["groups"] = groups
    if config.evaluation.evaluate_clients:
        exact["evaluated_clients"] = min(config.evaluation.evaluate_clients, config.data.clients)
    return {"about": OUTSIDE, "round": last, **exact}


def _result(config: RunConfig, guarantee: dict[str, Any], folder: RunFolder, result: Result) -> dict[str, Any]:
    lines = folder.metrics()
    training = sum(line["seconds"] for line in lines)
    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    evaluation = _last_evaluation(result)[1]
    shown = ("accuracy", "clients_labelled") if config.evaluation.evaluate == "private" else ("clients_labelled",)
    return {
        "strategy": config.run.strategy,
        "dataset": config.data.dataset,
        "seed": config.seed,
        "evaluate": config.evaluation.evaluate,
        **{key: evaluation[key] for key in shown if key in evaluation},  # a private accuracy is noisy and charged
        "notes": {key: value for line in lines for key, value in line.get("notes", {}).items()},
        "epsilon": guarantee["epsilon"],
        "epsilon_rdp": guarantee["accountants"].get("rdp"),
        "delta": guarantee["delta"],
        "certified": guarantee["certified"],
        "rounds": len(lines),
        **({"skipped_rounds": skipped} if (skipped := _skipped_rounds(folder, lines)) else {}),
        **{key: sum(line[key] for line in lines) for key in _TRAFFIC if all(key in line for line in lines)},
        "charges": len(folder.ledger.charges),
        "seconds_total": folder.seconds_total,
        "seconds_training": training,
        "seconds_per_round": training / len(lines) if lines else None,
        "peak_rss_mb": peak / 1024,
        "out": str(folder.path),
    }
