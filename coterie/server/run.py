"""One run from its configuration to its result, on whatever grid it is given."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from logging import WARNING
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from coterie import __version__
from coterie import models as networks
from coterie.client.state import KeptStates
from coterie.fields.plugins import sources
from coterie.fields.settings import ConfigError
from coterie.files import read_bytes
from coterie.logs import printable
from coterie.privacy import Secure, Streams
from coterie.results import Diagnostics, Outcome, RoundRecord, Site, Traffic
from coterie.rounds.score_estimates import estimated
from coterie.server import planning
from coterie.server.config import RunConfig
from coterie.server.exporter import serve_metrics
from coterie.server.folder import RunFolder, seal
from coterie.server.metrics import summarise, summarise_records
from coterie.server.recorders import recording
from coterie.server.run_requests import roster_of
from coterie.strategies import ClusteredStrategy, StrategyError
from coterie.wire import LabelRequest
from coterie.wire.messages import Layout, pack_models, unpack_models
from coterie.wire.model_card import ModelCard, scaling_of
from coterie.wire.requests import Request


class RunError(RuntimeError):
    """The run came to its end without doing what was asked."""


#: Adds to exact scores, given the (k, d) models, their layout, and the request with which clients evaluate them.
Compare: TypeAlias = Callable[[Diagnostics, npt.NDArray[np.float32], Layout, Request], Diagnostics]


def run(folder: RunFolder, grid: Grid) -> dict[str, Any]:
    """Train, certify, and write models, certificate, result and diagnostics into ``folder``.

    Returns:
        what result.json holds, and under ``diagnostics`` what diagnostics.json holds; None without exact scores.

    Raises:
        RunError: no client's reply could be used in the whole run, or the budget ended it early.
        ConfigError: metrics cannot be served or recorded.
    """
    return execute(folder, grid).document


def execute(folder: RunFolder, grid: Grid, compare: Compare | None = None) -> Outcome:
    """:func:`run` that returns the outcome as a record.

    Args:
        folder: folder of the run.
        grid: its clients.
        compare: adds scores that need the clients' data, which a simulation has, to exact ones.
    """
    done = folder.resumed.round if folder.resumed else 0
    if folder.failure is not None and done >= rounds_of(folder.config):
        raise RunError(folder.failure)
    with recording(folder):
        return _run(folder, grid, compare)


def _run(folder: RunFolder, grid: Grid, compare: Compare | None) -> Outcome:
    config = folder.config
    streams = Streams(config.seed)
    strategy = make_strategy(config, folder, streams)
    models, layout = initial_models(config, streams)
    if (start := folder.start_models()) is not None:
        models = start.models if start.mean is None else start.mean
    client_config = ConfigRecord({**config.for_clients(), "clients-dir": str(folder.path.absolute() / "clients")})
    if (constants := networks.fingerprint(config.constants)) is not None:
        client_config["constants"] = constants
    if config.pretrained_hash is not None:
        client_config["pretrained-sha256"] = config.pretrained_hash
    if plugins := config.training.plugins:
        client_config["sources"] = sources(plugins)
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
    KeptStates(folder.path / "clients").as_client_files()
    trained, layout = unpack_models(result.arrays)
    guarantee = folder.certify()
    folder.write_models(trained, layout, _card(config, strategy, guarantee, folder, len(trained)))
    seal(folder.path)
    if strategy.statistics.asked and not strategy.statistics.accepted:
        folder.failure = f"no valid reply in the whole run{_most_common(strategy.statistics.dropped)}"
        raise RunError(folder.failure)
    if strategy.statistics.accepted:
        folder.failure = None
    evaluated = _last_evaluation(config, folder, result)
    scores = evaluated.scores.last(evaluated.round)
    exact = config.evaluation.evaluate != "private" and scores != Diagnostics().last(evaluated.round)
    if compare is not None and exact:
        scores = compare(scores, trained, layout, strategy.evaluation())
    outcome = _outcome(config, strategy, guarantee, folder, evaluated, scores if exact else None)
    folder.write_outcome(outcome)
    if strategy.statistics.dropped:
        log(WARNING, "%s replies were dropped", strategy.statistics.dropped.total())
    if strategy.stopped:
        done, planned = outcome.rounds, config.run.rounds
        raise RunError(f"the budget is exhausted after {done} of {planned} rounds; models and results are saved")
    if strategy.statistics.unevaluated and not strategy.statistics.evaluated:
        raise RunError(
            f"no client could evaluate the models: {printable(strategy.statistics.unevaluated)}; models and results "
            "are saved without scores: remove the cause and continue with --resume, or set evaluate to off in a new run"
        )
    return outcome


def _card(
    config: RunConfig, strategy: ClusteredStrategy, guarantee: Mapping[str, Any], folder: RunFolder, models: int
) -> ModelCard:
    """The card of the first model."""
    request, facts = strategy.evaluation(), config.facts
    of_records = request.encoder if isinstance(request, LabelRequest) else None
    trains = config.method.produces == "models"
    sizes = networks.sizes_of(config.training.network, *config.examples) if trains else (None, None)
    return ModelCard(
        strategy=config.run.strategy,
        dataset=config.data.dataset,
        model=config.training.model,
        adapters=config.training.adapters,
        frozen=config.training.frozen,
        pretrained=config.pretrained_hash,
        trainable_parameters=sizes[0],
        parameters=sizes[1],
        features=config.training.features,
        kind=facts.kind,
        shape=facts.shape,
        num_classes=facts.task.num_outputs,
        task=config.task.given_name,
        weights=config.task.weights or None,
        cluster=0,
        clusters=models if of_records is None else config.run.clusters,
        additive=request.additive,
        constants=networks.fingerprint(config.constants),
        encoder=of_records,
        columns=facts.schema.feature_names if facts.schema else facts.columns or None,
        table_schema=config.data.table_schema or None,
        classes=(facts.schema.class_names or None) if facts.schema else None,
        scaling="by the schema of the table" if facts.schema else scaling_of(facts.kind),
        rounds=len(folder.rounds()),
        unit=config.privacy.privacy_unit,
        epsilon=guarantee["epsilon"],
        delta=guarantee["delta"],
        certified=guarantee["certified"],
        certificate=sha256(read_bytes(folder.path / "privacy.json")).hexdigest(),
        version=__version__,
    )


def _clusters_of(strategy: ClusteredStrategy, rounds: int, scores: Diagnostics) -> dict[int, int]:
    """The cluster of every client, as far as the guarantee allows to publish it.

    At record level clients release their labels, or the server computes them from releases. Without privacy, they also
    report the label of the evaluated model. At client level only noisy sizes of clusters are released.
    """
    if strategy.plan.hides_clients or not strategy.clustered:
        return {}
    sites = dict(strategy.membership(rounds))
    if not strategy.plan.private:
        sites |= dict(zip(scores.client_id or (), scores.client_cluster or (), strict=True))
    return sites


def rounds_of(config: RunConfig) -> int:
    """How many rounds there will be."""
    return min(config.run.stop_after or config.run.rounds, config.run.rounds)


def make_strategy(config: RunConfig, folder: RunFolder, streams: Streams) -> ClusteredStrategy:
    """The configured strategy, wired to the run folder."""
    deployed = folder.seen_rosters is not None
    options: dict[str, Any] = {
        "server_lr": config.server_lr,
        "ledger": folder.ledger,
        "streams": streams,
        "recorder": folder,
        "resume_from": folder.resumed,
        "masks": config.privacy.masks or (deployed and isinstance(folder.plan, Secure)),
        "roster": roster_of(folder.seen_rosters) if deployed else None,
        "audit": folder.on_audit,
        "evaluate_metrics_aggr_fn": summarise_records if config.method.produces == "labels" else summarise,
    }
    return config.strategy(folder.plan, options)


def initial_models(config: RunConfig, streams: Streams) -> tuple[np.ndarray, Layout]:
    """(k, d) independently initialised models, which no data has touched."""
    shape, classes = config.examples
    if config.method.produces == "models":
        networks.check_kind(config.training.model, config.facts.kind)
        _check_training(config)
    rng = streams.stream("models")

    def draw(gan: str = "", categories: int = 0) -> dict[str, np.ndarray]:
        seed = int(rng.integers(2**62))
        if gan:
            return networks.drawn(lambda: networks.build_gan(gan, shape, categories), seed)
        return networks.initialise(config.training.network, shape, classes, seed)

    strategy = config.strategy(planning.sketch(config))
    drawn = [strategy.initial_parameters(draw) for _ in range(max(config.models, 1))]
    layout = Layout.of(drawn[0])
    return np.stack([layout.flatten(parameters) for parameters in drawn]), layout


def check_personal(config: RunConfig, sent: Layout) -> None:
    """Check the setting ``personalize``.

    Args:
        config: configuration of the run.
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
    except networks.ModelError as error:
        raise ConfigError(str(error)) from None


def _check_training(config: RunConfig) -> None:
    """Check what users provide: their network, at record level also that it has gradients of records, and plug-ins."""
    model, kind, shape = config.training.network, config.facts.kind, config.examples[0]
    _ = config.unused
    if config.privacy.privacy_unit == "record" and (config.units or not networks.is_tested(model)):
        from coterie.client.gradients import check_supported  # imports Opacus, for seconds

        network = networks.build(model, *config.examples)
        check_supported(network, shape, config.task, kind, config.units is not None)
    if not config.training.plugins:
        return
    from coterie.client.trainers import check_trainer, random_examples  # import PyTorch
    from coterie.client.training_plugins import TrainingPlugins

    plugins = TrainingPlugins.of(config.training)
    plugins.check(config.task)
    if (trainer := plugins.trainer_class) is not None:
        network = networks.build(config.training.model, *config.examples)
        examples = random_examples(shape, config.task, kind)
        check_trainer(trainer, f"trainer '{plugins.trainer}'", network, *examples)


def _most_common(dropped: Counter[str], otherwise: str = ": no client replied") -> str:
    if not dropped:
        return otherwise
    reason, count = dropped.most_common(1)[0]
    first = next(iter(dropped))
    begin = "" if first == reason else f"; first: {printable(first)}"
    return f": {dropped.total()} were dropped, most often ({count} times): {printable(reason)}{begin}"


def _last_evaluation(config: RunConfig, folder: RunFolder, result: Result) -> RoundRecord:
    """The last evaluation, of round 0 without one; it is added to its round if a crash prevented that."""
    evaluations = result.evaluate_metrics_clientapp
    number = max(evaluations, default=0)
    metrics = dict(evaluations.get(number) or {})
    records = folder.rounds()
    if not evaluations and records and records[-1].accuracy is not None:  # released in an earlier session
        return records[-1]
    if records and records[-1].round == number:
        folder.amend_last(metrics)
    return RoundRecord.of({"round": number, **metrics}, noisy=config.evaluation.evaluate == "private")


def _outcome(
    config: RunConfig,
    strategy: ClusteredStrategy,
    guarantee: Mapping[str, Any],
    folder: RunFolder,
    evaluated: RoundRecord,
    scores: Diagnostics | None,
) -> Outcome:
    records = folder.rounds()
    released = {record.round for record in records if "skipped" not in record.notes}
    training = sum(record.seconds or 0.0 for record in records)
    if scores is not None:
        groups = scores.classes or len(scores.group_accuracy or ())
        sampled = config.evaluation.evaluate_clients
        scores = replace(
            scores.without_clients() if guarantee["certified"] else scores,
            confusion=scores.confusion and np.reshape(scores.confusion, (-1, groups)).tolist(),
            groups=groups if groups and config.method.produces == "models" else None,
            evaluated_clients=min(sampled, config.data.clients) if sampled else None,
        )
    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Outcome(
        strategy=config.run.strategy,
        dataset=config.data.dataset,
        seed=config.seed,
        evaluate=config.evaluation.evaluate,
        accuracy=evaluated.accuracy,
        estimates=estimated(evaluated),
        clients_labelled=evaluated.clients_labelled,
        notes={key: value for record in records for key, value in record.notes.items()},
        epsilon=guarantee["epsilon"],
        epsilon_rdp=guarantee["accountants"].get("rdp"),
        delta=guarantee["delta"],
        certified=guarantee["certified"],
        rounds=len(records),
        # Those that were charged and released nothing, if they are never repeated, as after a crash.
        skipped_rounds=() if folder.plan.repeats_rounds else tuple(sorted(folder.ledger.training_rounds - released)),
        **Traffic.total(records),
        charges=len(folder.ledger.charges),
        seconds_total=folder.seconds_total,
        seconds_training=training,
        seconds_per_round=training / len(records) if records else None,
        peak_rss_mb=peak / 1024,
        out=str(folder.path),
        sites=tuple(
            Site(client=client, cluster=cluster)
            for client, cluster in sorted(_clusters_of(strategy, len(records), evaluated.scores).items())
        ),
        diagnostics=scores,
    )
