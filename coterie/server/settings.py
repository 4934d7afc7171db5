"""Settings of a run as a whole, its evaluation and its deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.fields import MAX_CLUSTERS, PERSONAL_METHODS, ROUNDS, SEED
from coterie.fields.settings import ConfigError, Settings, setting
from coterie.strategies.registry import STRATEGIES


@dataclass(frozen=True)
class RunSettings(Settings):
    """The method, its size, and the run folder. These settings have no table in files."""

    strategy: str = setting(
        "ifca",
        "method that clusters clients and trains models",
        choices=sorted(STRATEGIES),
        custom="strategy",
        tuned=True,
    )
    clusters: int = setting(
        4,
        "number of models, k, or of clusters of records; 0: determined by the method (ifca, rc-dpfl, lcfl, cfl)",
        at_least=0,
        at_most=MAX_CLUSTERS,
        tuned=True,
    )
    max_clusters: int | None = setting(
        None,
        "maximum number of models of ifca with clusters = 0, at which the search begins; public; auto: 8",
        at_least=2,
        at_most=MAX_CLUSTERS,
        tuned=True,
    )
    rounds: int = setting(80, "number of rounds, T", within=ROUNDS, tuned=True)
    stop_after: int = setting(
        0, "stop after this number of rounds, with the noise of all planned rounds; 0: never", at_least=0
    )
    start_from: str = setting(
        "", "run folder whose last models are the initial ones; empty: new models", allowed="a run folder", path=True
    )
    seed: int | None = setting(None, "auto: secret randomness; a number: reproducible, not certified", within=SEED)
    signed_request: str = setting(
        "",
        "what coterie sign makes of these settings, for clients whose policies name submitters; empty: none",
        allowed="a signed request",
        place=True,
    )
    out: str = setting("", "run folder; empty: a new one under runs/", allowed="a folder", place=True, path=True)
    resume: bool = setting(False, "continue the run in the run folder", place=True)


@dataclass(frozen=True)
class EvaluationSettings(Settings):
    """Evaluation at the clients."""

    table: ClassVar[str] = "evaluation"

    evaluate: str | None = setting(
        None,
        "diagnostic: exact accuracies, outside the guarantee; private: their noisy mean, charged; off: none; auto: "
        "diagnostic in a simulation and without privacy, else private at client level and off at record level",
        choices=("diagnostic", "private", "off"),
    )
    evaluate_every: int = setting(
        5,
        "rounds between two evaluations; diagnostics before the last one read at most 2,000 records of a test set",
        at_least=1,
    )
    evaluate_clients: int | None = setting(
        None,
        "clients that evaluate the models, drawn once at random; 0: all; auto: at most 200 for diagnostics in a "
        "simulation, otherwise all",
        at_least=0,
    )
    train_alone: int = setting(
        20,
        "most clients of a simulation that also train a model alone, to tell whether federation pays; 0: none",
        at_least=0,
        place=True,
    )
    evaluate_noise: float = setting(
        0.01, "standard deviation of the noise on a private mean accuracy", above=0, at_most=1
    )
    score_share: float | None = setting(
        None,
        "share of epsilon for a noisy histogram of scores by label, which gives AUC, sensitivity and calibration of "
        "the last private evaluation; at record level of the epsilon that held-out records have to themselves; 0: "
        "none; auto: 0.05 with two classes at client level; with 3 to 10 classes, at client level alone, the mean AUC "
        "of each class against the others",
        at_least=0,
        at_most=1,
    )
    personalize: str = setting(
        "none",
        "how clients fit the released model to their own records, before they evaluate it too; the result stays there",
        choices=("none", *PERSONAL_METHODS),
        tuned=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaluate == "off" and self.personalize != "none":
            raise ConfigError(
                f"personalize = {self.personalize!r} has no effect with evaluate = 'off'; set evaluate to diagnostic "
                "or private, or personalize to none"
            )


@dataclass(frozen=True)
class DeploymentSettings(Settings):
    """Timeouts, and thresholds on participation."""

    table: ClassVar[str] = "deployment"

    round_timeout: float = setting(
        3600.0, "seconds to wait for the replies of a round", above=0, at_most=1e8, place=True
    )
    registration_timeout: float = setting(
        60.0, "seconds to wait for clients to register", at_least=0, at_most=1e8, place=True
    )
    min_clients: int = setting(
        0, "registered clients that a round requires; with privacy-unit client, the first round", at_least=0, place=True
    )
    min_replies: float = setting(
        0.0,
        "share of the requested replies that a round requires, others are requested again; not at client level",
        at_least=0,
        at_most=1,
        place=True,
    )
