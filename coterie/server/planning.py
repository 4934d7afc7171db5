"""Privacy plan of a configuration, further contents of its certificate, and warnings about its noise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie import models as networks
from coterie.datasets import OWN_DATA
from coterie.fields import MAX_COHORT, MAX_PLANS
from coterie.fields.plugins import source_hash
from coterie.fields.settings import ConfigError, suggestion
from coterie.models.settings import NOT_AT_RECORD_LEVEL
from coterie.privacy import PLANS, FirstRound, Plan, RecordLevel, RecordPlan, calibrate, certificate
from coterie.privacy.certificate import UNIT_COLUMN, epsilon_observers
from coterie.privacy.score_histograms import MAX_CLASSES
from coterie.strategies import model_search
from coterie.strategies.adaptive_clipping import INITIAL_NORM
from coterie.strategies.server_optimizer import LARGEST_STEP, ServerOptimizer

if TYPE_CHECKING:
    from coterie.server.config import RunConfig

# Default share of cluster sizes where they determine the number of clusters: sigma_h = 3.2 sigma_eff.
_SEARCH_IDENTIFIER_SHARE = 0.1
# Sampling rate without a setting where full participation is not the best choice.
_SAMPLED = 0.2
# Expected clients of a round without a setting.
_MESSAGES = 5000
# Clients that evaluate models in a simulation of more, without a setting.
_EVALUATED = 200
# Standard deviation of the noise of all rounds in a parameter.
_NOISE_WALK = 0.3
# Default share of epsilon for a histogram of scores.
_SCORE_SHARE = 0.05
# Share of a round's privacy for the number of short updates, which an adaptive clipping norm follows.
_CLIP_SHARE = 0.01
# C of adaptive clipping over the median of norms: less is less noise and shorter steps (docs/results.md).
_CLIP_FACTOR = 0.5


def delta(config: RunConfig) -> float:
    """Return the resolved delta; "auto" is 1/(100 M), or 1/(100 records) at record level."""
    if config.privacy.delta is not None:
        return config.privacy.delta
    record = config.privacy.privacy_unit == "record"
    return 1 / (100 * (config.data.samples_per_client if record else config.data.clients))


def sampling_rate(config: RunConfig) -> float:
    """Return the sampling rate; "auto" follows from public numbers.

    Noise of a mean falls as 1/sqrt(q) if participation is visible. Full participation is therefore the best protection
    against those who observe it, as long as its messages are affordable. Mechanisms with noisy labels need the
    amplification by secret participation; ``banded`` takes turns, and so does ``secure`` where not all can take part.
    """
    if config.aggregation.sampling_rate is not None:
        return config.aggregation.sampling_rate
    if config.privacy.privacy_unit != "client" or config.privacy.mechanism not in ("joint", "secure"):
        return _SAMPLED
    if config.privacy.mechanism == "secure":
        return 1 / math.ceil(config.data.clients / MAX_COHORT)
    return min(1.0, _MESSAGES / config.data.clients)


def evaluate(config: RunConfig, deployed: bool) -> str:
    """Return how clients evaluate models; "auto" is exact in simulations and without privacy.

    In deployed runs with client-level privacy, "auto" is private, at record level off.
    """
    if config.evaluation.evaluate is not None:
        return config.evaluation.evaluate
    by_unit = {"client": "private", "record": "off", "none": "diagnostic"}
    return by_unit[config.privacy.privacy_unit] if deployed else "diagnostic"


def evaluate_clients(config: RunConfig, deployed: bool) -> int:
    """Return the number of clients that evaluate, 0 for all; "auto" reads some in diagnostics of large simulations."""
    if config.evaluation.evaluate_clients is not None:
        return config.evaluation.evaluate_clients
    exact = config.evaluation.evaluate == "diagnostic" and config.method.produces == "models"
    return _EVALUATED if exact and not deployed and config.data.clients > _EVALUATED else 0


def server_lr(plan: Plan, optimizer: ServerOptimizer, lr: float = 1.0, local: str = "sgd") -> float:
    """Return the value of ``server-lr = "auto"``, from public numbers; docs/results.md has the table of its choice.

    The noise of all rounds then moves a parameter by a standard deviation of `_NOISE_WALK`: more noise has smaller
    steps, a larger cohort larger ones. By momentum, the noise moves it no further. Adam divides by at least the noise
    of a round, so that noise moves it by eta instead of eta sigma: its step depends on the number of rounds and on how
    their noise adds up, also where the noise is not known.

    Args:
        plan: plan of the run.
        optimizer: optimizer of the server.
        lr: root mean square over rounds of the step size of the clients.
        local: optimizer of the clients.
    """
    walk = plan.noise_walk(lr, local)
    if optimizer.name == "adam":
        noise = np.array([plan.noise_of_sums(number) for number in range(1, plan.rounds + 1)])
        steps = walk * plan.expected_members / math.sqrt(np.mean(noise**2)) if noise.any() else math.sqrt(plan.rounds)
        return _NOISE_WALK / (steps * optimizer.gain(plan.rounds))
    largest = LARGEST_STEP if plan.unit == "client" else 1.0
    return min(_NOISE_WALK / walk, largest) if walk else 1.0


def plan(config: RunConfig) -> Plan:
    """Return the privacy plan; its noise is calibrated unless it is set.

    Raises:
        PrivacyError: no noise reaches the target.
    """
    if config.privacy.privacy_unit == "none" or config.privacy.noise_multiplier is not None:
        return sketch(config)
    if config.privacy.privacy_unit == "record":
        return _record_level(config)
    kind, share = PLANS[config.privacy.mechanism], score_share(config)
    numbers = _numbers(config)
    return kind.calibrated_with_histogram(share, **numbers) if share else kind.calibrated(**numbers)


def score_share(config: RunConfig) -> float:
    """Return the share of epsilon for a histogram of scores; "auto" is 5 % with two classes, where one can be."""
    evaluation, privacy = config.evaluation, config.privacy
    if evaluation.score_share is not None:
        return evaluation.score_share
    possible = evaluation.evaluate == "private" and privacy.privacy_unit == "client" and not histogram_problem(config)
    possible = possible and config.facts.task.num_classes == 2
    return _SCORE_SHARE if possible and privacy.noise_multiplier is None else 0.0


def histogram_problem(config: RunConfig) -> str:
    """Return why no histogram of scores can be released; empty if one can."""
    if config.method.produces == "labels":
        return f"{config.method.name} trains no classifier"
    task = config.facts.task
    most = MAX_CLASSES if config.privacy.privacy_unit == "client" else 2
    if not 2 <= task.num_classes <= most:
        return f"the task is to predict {task}, not {'two' if most == 2 else f'two to {most}'} classes"
    if config.privacy.privacy_unit != "record":
        largest, share = 0.5, config.evaluation.score_share or 0.0
        return f"it must be at most {largest:g} at client level" if share > largest else ""
    only = "at record level only clients' own data (dataset = own) have held-out records that no other client has"
    return "" if config.data.dataset == OWN_DATA else only


def check_evaluation(config: RunConfig) -> None:
    """Check that a requested histogram of scores can be released, and that noise protects private evaluations.

    Raises:
        ConfigError: it cannot, or noise does not.
    """
    evaluation = config.evaluation
    if share := evaluation.score_share:
        reason = histogram_problem(config)
        if not reason and evaluation.evaluate != "private":
            reason = f"evaluate = {evaluation.evaluate!r} releases none; set it to private"
        if reason:
            raise ConfigError(f"score-share = {share:g}: {reason}; set score-share to 0 or auto")
    if evaluation.evaluate != "private":
        return
    if config.privacy.privacy_unit == "none":
        raise ConfigError("evaluate = 'private' requires privacy: change privacy-unit or evaluate")
    if config.data.validation_clients:
        raise ConfigError(
            f"validation-clients = {config.data.validation_clients} with evaluate = 'private': the records of one "
            "validation client are test data of many clients, so the noise does not protect it; set "
            "validation-clients to 0, or evaluate to diagnostic or off"
        )


def sketch(config: RunConfig) -> Plan:
    """Return a plan without calibrated noise, for fast checks."""
    noise = config.privacy.noise_multiplier or 1.0
    if config.privacy.privacy_unit == "record":
        return _record_level(config, noise)
    if config.privacy.privacy_unit == "none":
        return PLANS["none"](noise_multiplier=0.0, **_numbers(config))
    histogram: dict[str, Any] = {}
    if share := score_share(config):
        alone = calibrate(share * config.privacy.epsilon, delta(config), 1.0, 1)  # what it needs by itself
        histogram = {"histograms": 1, "histogram_noise": alone}
    return PLANS[config.privacy.mechanism](noise_multiplier=noise, **_numbers(config), **histogram)


def _numbers(config: RunConfig) -> dict[str, Any]:
    """Arguments of the plan, without the noise."""
    privacy = config.privacy
    every = config.evaluation.evaluate_every if config.evaluation.evaluate == "private" else 0
    numbers: dict[str, Any] = {
        "clients": config.data.clients,
        "num_clusters": max(config.models, 1),
        "sampling_rate": config.sampling_rate,
        "rounds": config.run.rounds,
        "rebalance_min": _rebalance_min(config),
    }
    if privacy.divisor is not None:
        numbers["divisor"] = privacy.divisor
    if privacy.privacy_unit == "none":
        return numbers
    if privacy.accountant is not None:
        numbers["accountant"] = privacy.accountant
    mechanism = PLANS[privacy.mechanism]
    share = privacy.identifier_share
    if share is None:
        share = _SEARCH_IDENTIFIER_SHARE if config.searches else mechanism.default_identifier_share
    options = {name: getattr(privacy, name, None) for name in mechanism.options}
    return {
        **numbers,
        **{name: value for name, value in options.items() if value is not None},
        **_clipping(config),
        "epsilon": privacy.epsilon,
        "delta": delta(config),
        "identifier_share": share if sizes_until(config) else 0.0,
        "sizes_until": sizes_until(config) or math.inf,
        "evaluations": config.method.evaluations(config.run.rounds, every),
        "evaluation_noise": config.evaluation.evaluate_noise,
        **({"histogram_classes": config.facts.task.num_classes} if score_share(config) else {}),
    }


def _clipping(config: RunConfig) -> dict[str, float]:
    """Return the clipping norm, or that of round 1 with the parameters of adaptive clipping."""
    privacy = config.privacy
    if privacy.clip_norm is not None:
        return {"clip_norm": privacy.clip_norm}
    return {"clip_norm": _CLIP_FACTOR * INITIAL_NORM, "clip_factor": _CLIP_FACTOR, "clip_share": _CLIP_SHARE}


def _rebalance_min(config: RunConfig) -> float:
    """Return B; "auto" is 0, or a third of a cluster's expected members for a method that always rebalances."""
    if config.aggregation.rebalance_min is not None:
        return config.aggregation.rebalance_min
    if not config.method.rebalances:
        return 0.0
    return max(1.0, config.sampling_rate * config.data.clients / max(config.models, 1) // 3)


def sizes_until(config: RunConfig) -> float:
    """Return the last round whose cluster sizes (or noisy labels) something reads: inf if all, 0 if none."""
    noisy_labels = config.models > 1 and PLANS[config.privacy.mechanism].noisy_labels
    if noisy_labels or _rebalance_min(config) or config.privacy.divisor == "released":
        return math.inf
    if config.searches:
        return model_search.last(config.run.rounds)
    return config.reseeding.last(config.run.rounds) if config.reseeding else 0


# ---- record level -----------------------------------------------------------------------------------------


def check_records(config: RunConfig) -> None:
    """Check the settings that record-level privacy requires.

    Raises:
        ConfigError: one of them is missing or invalid.
    """
    if config.record_level.weights == "records":
        raise ConfigError(
            "weights = 'records' is for privacy-unit = none: true numbers of records are private; use examples, the "
            "public ones, or equal"
        )
    if config.data.samples_per_client == 0:
        raise ConfigError("samples-per-client = 0: record level requires a public number of records per client; set it")
    if config.sampling_rate != 1:
        raise ConfigError(
            f"sampling-rate = {config.sampling_rate}: at record level all clients participate in every "
            "round; set it to 1"
        )
    if config.units and config.method.produces == "labels":
        raise ConfigError(
            f"the schema names a unit of several records (column {config.units!r}), but {config.method.name} clusters "
            "single records: use another strategy, privacy-unit = none, or a schema without [unit]"
        )
    for name in ("rebalance-min", "reseed-every"):
        if config[name]:
            raise ConfigError(
                f"{name} = {config[name]} requires noisy cluster sizes, which only client-level privacy releases; "
                "set it to 0"
            )
    for kind, name in config.training.plugins.items():
        raise ConfigError(f"{kind} = {name!r}: {NOT_AT_RECORD_LEVEL}")
    for client_plan in _record_plans(config, 1.0):
        if client_plan.num_examples > config.data.samples_per_client:
            raise ConfigError("profiles: samples-per-client of a profile must be at most that of the run")


def _profiles(config: RunConfig) -> list[dict[str, Any]]:
    """Return the settings of clients 0, 1, ..., assigned cyclically, by the last part of their names."""
    names = ("privacy.epsilon", "privacy.delta", "training.batch-size", "data.samples-per-client")
    settings = {config.declared[name].key: config.declared[name] for name in names}
    profiles = []
    for text in config.record_level.profiles.split(";"):
        profile = {key: config[key] for key in settings}
        for assignment in text.split():
            name, _, value = assignment.partition("=")
            if name not in settings:
                hint = suggestion(name, settings)
                raise ConfigError(f"profiles: {assignment!r} must set one of {', '.join(settings)}{hint}")
            profile[name] = settings[name].parse(value)
        profiles.append(profile)
    if len(profiles) > MAX_PLANS:
        raise ConfigError(f"profiles has {len(profiles)} profiles: must have at most {MAX_PLANS}")
    return profiles


def _record_plans(config: RunConfig, noise: float | None = None) -> tuple[RecordPlan, ...]:
    """Return the plans of clients 0, 1, ..., assigned cyclically; calibrated unless ``noise`` is given."""
    level, privacy = config.record_level, config.privacy
    choices = config.method.max_selections(config.run.rounds)
    first_round = None  # the public numbers from which its noise follows, unless settings determine it
    chosen = level.first_batch_size is not None or level.first_round_noise_ratio is not None
    if noise is None and not chosen and config.method.full_first_batch and config.models:  # else it needs more signal
        first_round = FirstRound(clients=config.data.clients, groups=config.models, parameters=_parameters(config))
    plans = []
    for profile in _profiles(config):
        many, first = profile["samples-per-client"], level.first_batch_size
        if first is None and config.method.full_first_batch:
            first = many
        numbers: dict[str, Any] = {
            "num_examples": many,
            "batch_size": min(profile["batch-size"], many),
            "rounds": config.run.rounds,
            "epsilon": profile["epsilon"],
            "delta": 1 / (100 * many) if profile["delta"] is None else profile["delta"],
            **_clipping(config),
            "first_batch_size": None if first is None else int(min(first, many)),
            "local_epochs": config.training.local_epochs,
            "selection": level.selection if choices else "none",
            "selections": choices,
            "loss_noise": level.loss_noise,
            **config.method.released_losses(config.data.clients, config.options),
            "accountant": "pld" if privacy.accountant is None else privacy.accountant,
            "held_out_epsilon": score_share(config) * profile["epsilon"],
        }
        ratio = level.first_round_noise_ratio or 1.0
        if first_round is not None:
            plans.append(first_round.calibrated(**numbers))
        elif noise is None:
            plans.append(RecordPlan.calibrated(first_noise_ratio=ratio, **numbers))
        else:
            plans.append(RecordPlan(noise_multiplier=noise, first_noise_multiplier=ratio * noise, **numbers))
    return tuple(plans)


def _record_level(config: RunConfig, noise: float | None = None) -> RecordLevel:
    return RecordLevel.of(
        _record_plans(config, noise),
        clients=config.data.clients,
        num_clusters=max(config.models, 1),
        weights=config.record_level.weights,
    )


# ---- for the ledger's header and the user -----------------------------------------------------------------


def about(config: RunConfig) -> dict[str, Any]:
    """Return the entries of the ledger's header for the certificate, beside the plan."""
    declared, constants = config.declared, networks.fingerprint(config.constants)
    return {
        "seed": config.seed,
        "diagnostics": _diagnostics(config),
        "public": {
            "server-lr": config.server_lr,
            "average-last": config.averaging.last,
            **({UNIT_COLUMN: config.units} if config.units and config.privacy.privacy_unit == "record" else {}),
            "reseed-every": config.aggregation.reseed_every,
            **({"constants": constants} if constants else {}),
            **({"pretrained-sha256": config.pretrained_hash} if config.pretrained_hash else {}),
            **{f"{kind}-sha256": source_hash(kind, name) for kind, name in config.training.plugins.items()},
        },
        "tuned": {name: value for name, value in config.values.items() if declared[name].tuned},
        "unfounded": list(config.method.unfounded),
    }


def _diagnostics(config: RunConfig) -> list[str]:
    """Return descriptions of what the run reveals outside the guarantee."""
    client_level, evaluation = config.privacy.privacy_unit == "client", config.evaluation
    if client_level:
        replies = "the total number of replies that could not be used"
    else:
        replies = (
            "in each round, how many clients were there and were asked, which gave a reply that could be used, and why "
            "others were dropped"
        )
    always = [
        replies,
        "when each charge was made, and the seconds that each round and the run took",
        "the peak memory of the run",
        "whether any reply could be used, to training and to evaluations: a run without one fails",
    ]
    if client_level:
        always.append("whether any client is registered when a session of the run begins: it ends without one")
    if config.deployment.min_clients:
        when = "round 1 begins" if client_level else "each round begins"
        always.append(f"whether enough clients (min-clients) are there before {when}: a run without them fails")
    if evaluation.evaluate != "diagnostic":
        return always
    if config.method.produces == "labels":
        return ["numbers of records by label and class, exact, and the scores of these", *always]
    sampled = f"of {evaluation.evaluate_clients} clients, " if evaluation.evaluate_clients else ""
    own = ["accuracies of the models that clients fit to their own records, exact, at the end"]
    own = own if evaluation.personalize != "none" else []
    if config.trains_alone:
        own.append("mean and lowest accuracy of models that some clients train alone, exact, at the end")
    return [
        f"{sampled}accuracies on clients' held-out data and training losses, exact, every "
        f"{evaluation.evaluate_every} rounds and at the end",
        *own,
        "groups found, clustering accuracy, NMI and kappa, from clients' exact labels",
        *always,
    ]


def warnings(config: RunConfig) -> list[str]:
    """Return warnings about delta, sampling rate and noise."""
    unit = config.privacy.privacy_unit
    if unit == "none":
        return []
    messages = []
    many = config.data.clients if unit == "client" else config.data.samples_per_client
    if delta(config) > 1 / (10 * many):
        messages.append(
            f"delta = {delta(config):g} exceeds 1/(10 {unit}s) = {1 / (10 * many):g}: publishing one random {unit} "
            f"satisfies delta = 1/{unit}s; use it only to compare with papers"
        )
    if config.method.produces == "labels":
        return messages
    plan, clients, size = config.plan, config.data.clients, _parameters(config)
    if abs(plan.rate / plan.sampling_rate - 1) >= 0.01:
        messages.append(
            f"sampling-rate = {plan.sampling_rate:g}: a cohort of mechanism {plan.mechanism} has a share of "
            f"{plan.rate:.3g} of the clients"
        )
    members = plan.expected_members
    if isinstance(plan, RecordLevel):
        client_plan = plan.client_plans[0]
        steps = client_plan.rounds * client_plan.local_epochs * (client_plan.num_examples // client_plan.batch_size)
        noise = client_plan.noise_of_gradients(False) * math.sqrt(size / (steps * members)) / client_plan.batch_size
        remedy = "use more records in larger batches, more clients"
    else:
        moved = 1 if plan.sampler == "poisson" else 2  # an additional client, or a replaced one
        noise = moved * plan.noise_multiplier_updates * math.sqrt(size / plan.rounds) / members
        remedy = f"use privacy-unit = record, about {math.ceil(noise) * clients} clients instead of {clients}"
    if noise > 1:  # it moves a model further than all updates together can
        messages.append(
            f"the noise dominates the signal: over the run it moves a model {noise:.3g} times as far as all clipped "
            f"updates can ({size} parameters, {members:.3g} clients per model and round, noise multiplier "
            f"{plan.noise_multiplier:.3g}); {remedy}, a smaller model, or a larger epsilon"
        )
    return messages


def _parameters(config: RunConfig) -> int:
    """Return the number of parameters of a model."""
    return sum(value.size for value in networks.initialise(config.training.network, *config.examples, 0).values())


def participation_warnings(plan: Plan) -> list[str]:
    """Return a warning for deployed runs if epsilon is larger for those who see which clients take part."""
    if plan.unit != "client":
        return []
    stated = certificate({"plan": plan.terms()}, [])
    visible = epsilon_observers(stated)
    if visible is None or math.isinf(visible):
        return []
    return [
        "messages on the network and the SuperLink's log show which clients take part: against those who see them, "
        f"epsilon is {visible:.3g}, not {stated['epsilon']:.3g}; sampling-rate = 1 keeps epsilon, and so does "
        "mechanism = banded with visible participation, and secure"
    ]
