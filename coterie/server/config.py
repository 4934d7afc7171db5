"""The run configuration: one flat set of kebab-case keys with one schema.

The same keys serve ``[tool.flwr.app.config]``, TOML files and ``--set key=value``. Everything is checked before
anything starts.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from coterie import models as networks
from coterie.datasets import DATASETS, OWN_DATA, SHIFTS, DataError, Facts, assign_groups, facts, parse_groups
from coterie.methods import STRATEGIES
from coterie.privacy import (
    ACCOUNTANTS,
    MECHANISMS,
    PLANS,
    SELECTIONS,
    WEIGHTS,
    Ledger,
    Plan,
    PrivacyError,
    RecordLevel,
    RecordPlan,
)
from coterie.rounds import AGGREGATORS, Aggregator, Averaging, StrategyError
from coterie.strategies import CLUSTERERS, METRICS, REBALANCE_TRAIN, WITHIN, ClusteredStrategy, Reseeding


class ConfigError(ValueError):
    """An invalid configuration; the message names the key, the value, and what is allowed."""


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Attributes:
        default: value of the demo.
        help: one line.
        allowed: description of allowed values.
        ok: whether a value of the right type is allowed.
        auto: a word that is allowed instead of a number ("auto", "none"); empty: none.
        client: whether clients receive it.
    """

    default: Any
    help: str
    allowed: str
    ok: Callable[[Any], bool] = lambda value: True
    auto: str = ""
    client: bool = False

    def parse(self, name: str, value: Any) -> Any:
        """``value`` with the type of the default.

        Raises:
            ConfigError: it has the wrong type, or is not allowed.
        """
        if self.auto and value == self.auto:
            return value
        kind = float if self.auto and isinstance(self.default, str) else type(self.default)
        if self.auto == "none":
            kind = int
        parsed = _convert(kind, value)
        if parsed is None or not self.ok(parsed):
            words = f"{self.auto!r} or " if self.auto else ""
            hint = _nearest(str(value), self.allowed.split(", ")) if kind is str else ""
            raise ConfigError(f"{name} = {value!r}: must be {words}{self.allowed}{hint}")
        return parsed


def _convert(kind: type, value: Any) -> Any:
    """``value`` as ``kind``; None if it cannot be converted."""
    if kind is bool:
        words = {"true": True, "false": False}
        return value if isinstance(value, bool) else words.get(str(value).lower())
    if isinstance(value, bool):
        return None
    try:
        if kind is int:
            number = float(value)
            return int(number) if number.is_integer() else None
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _nearest(word: str, words: Any) -> str:
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _names(table: Mapping[str, Any], own: bool = False) -> dict[str, Any]:
    return {
        "allowed": ", ".join(sorted(table)) + (", or module:function" if own else ""),
        "ok": lambda value: value in table or (own and ":" in value),
    }


def _choice(*words: str) -> dict[str, Any]:
    return {"allowed": ", ".join(words), "ok": lambda value: value in words}


def _number(low: float, high: float = math.inf, *, strict: bool = False) -> dict[str, Any]:
    text = f"{'above' if strict else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
    return {
        "allowed": f"a finite number {text}",
        "ok": lambda value: (low < value if strict else low <= value) and value <= high and math.isfinite(value),
    }


def _whole(low: int) -> dict[str, Any]:
    return {"allowed": f"a whole number, at least {low}", "ok": lambda value: value >= low}


def _text(allowed: str) -> dict[str, Any]:
    return {"allowed": allowed}


#: Every key. The defaults are the demo: private clustered models on real handwritten digits.
SCHEMA: dict[str, Key] = {
    "strategy": Key("ifca", "how clients are clustered and models trained", **_names(STRATEGIES)),
    "clusters": Key(4, "number of models, k, or of clusters of records; 0: find it (rc-dpfl, lcfl, cfl)", **_whole(0)),
    "rebalance-min": Key(0.0, "B, least expected members of a cluster in a round; 0: off", **_number(0)),
    "rebalance-train": Key(
        "own",
        "which model a moved client trains: that of its own cluster, or of the one that it is assigned to",
        **_choice(*REBALANCE_TRAIN),
    ),
    "respawn-every": Key(5, "rounds between two chances to re-seed starving models; 0: never", **_whole(0)),
    "rounds": Key(80, "number of rounds, T", **_whole(1)),
    "sampling-rate": Key(0.2, "probability with which a client takes part in a round, q", **_number(0, 1, strict=True)),
    "local-epochs": Key(4, "passes over a client's data in a round", **_whole(1), client=True),
    "batch-size": Key(7, "examples in a client's mini-batch", **_whole(1), client=True),
    "lr": Key(0.2, "step size of a client's SGD", **_number(0, 1e3, strict=True), client=True),
    "lr-decay": Key(1.0, "lr shrinks by this factor from round to round", **_number(0, 1, strict=True), client=True),
    "average-last": Key(
        0.0, "part of the rounds whose released models are averaged in the end; 0: the last ones", **_number(0, 1)
    ),
    "aggregator": Key(
        "mean",
        "what a cluster's model makes of its updates; others than mean bound dishonest clients; not at client level",
        **_choice(*AGGREGATORS),
    ),
    "byzantine-share": Key(
        0.2,
        "trimmed-mean, krum, multi-krum: share of dishonest clients in a cluster that they stand",
        allowed="a number at least 0 and below 0.5",
        ok=lambda value: 0 <= value < 0.5,
    ),
    "proximal-mu": Key(0.1, "fedprox, lcfl within fedprox: weight of the proximal term, mu", **_number(0, 1e6)),
    "personal-layers": Key(1, "fedper: how many of the last layers never leave a client", **_whole(1)),
    "components": Key(
        0,
        "rc-dpfl: principal components of updates to cluster; 0: as many as groups span; 2: the authors'",
        **_whole(0),
    ),
    "metric": Key(
        "loss",
        "lcfl: how clients differ: in losses of each other's models, in parameters, in directions of first updates",
        **_choice(*METRICS),
    ),
    "clusterer": Key("k-medoids", "lcfl: what makes clusters of distances", **_choice(*CLUSTERERS)),
    "landmarks": Key(0, "lcfl: models that every client evaluates, in place of all; 0: all pairs", **_whole(0)),
    "warm-up-rounds": Key(0, "lcfl: rounds of fedavg before clients are compared", **_whole(0)),
    "models-per-message": Key(32, "lcfl: models that a client receives at once to be evaluated", **_whole(1)),
    "within": Key("fedavg", "lcfl: how the model of a cluster is trained", **_choice(*WITHIN)),
    "stationary-norm": Key(
        "auto",
        "cfl: length of a cluster's mean update below which it may be split, eps_1; auto: from the first round",
        auto="auto",
        **_number(0, strict=True),
    ),
    "incongruent-norm": Key(
        "auto",
        "cfl: length of a client's update from which its cluster is split, eps_2; auto: from the first round",
        auto="auto",
        **_number(0, strict=True),
    ),
    "first-split": Key(20, "cfl: rounds in which no cluster is split or stopped", **_whole(0)),
    "gan": Key(
        "auto",
        "ppfc-gan: the clients' GAN; auto: the one that suits the data, with GroupNorm at record level",
        **_names({"auto": 0, **networks.GANS}),
    ),
    "gan-average": Key(
        0.995,
        "ppfc-gan: how much a client's generator keeps of its average at a step; 0: the last is taken, as in the paper",
        **_number(0, 0.9999),
    ),
    "synthetic-samples": Key(0, "ppfc-gan: samples of each client's GAN; 0: as many as it has records", **_whole(0)),
    "autoencoder": Key(
        "sae",
        "ppfc-gan: the server's autoencoder, with a linear code, or with ReLU behind it as the paper's Table A.8",
        **_choice("sae", "sae-relu"),
    ),
    "pretrain-epochs": Key(10, "ppfc-gan: epochs of the server's autoencoder alone", **_whole(0)),
    "joint-epochs": Key(
        15, "ppfc-gan: epochs of deep clustering after that; 0: k-means of the codes, the ablation", **_whole(0)
    ),
    "dcn-weight": Key(4.0, "ppfc-gan: weight of the distance of codes from their centroids, lambda", **_number(0)),
    "dcn-noise": Key(
        0.4,
        "ppfc-gan: deviation of the noise that the autoencoder learns to take away; data span [-1, 1]",
        **_number(0),
    ),
    "dcn-restarts": Key(
        2, "ppfc-gan: deep clustering networks, of which the one with the least objective is taken", **_whole(1)
    ),
    "precision": Key(
        "float32",
        "ppfc-gan: of matrix products, but for DP-SGD; bfloat16 is faster where a processor has it",
        **_choice("float32", "bfloat16"),
    ),
    "local-centroids": Key(0, "kfed, ffcm: centroids of each client; 0: as many as clusters", **_whole(0)),
    "fuzzifier": Key(1.1, "ffcm: m of fuzzy c-means", **_number(1, 100, strict=True)),
    "device-failures": Key(
        0.0,
        "ppfc-gan, kfed, ffcm: part of the clients that fails before it sends anything, in a simulation",
        **_number(0, 0.99),
    ),
    "upload-limit": Key(256, "ppfc-gan, kfed, ffcm: megabytes that one client's points may take", **_whole(1)),
    "server-lr": Key(
        "auto",
        "step size of the server, eta; auto: 1.5 under client-level privacy, where clipping shortens updates, else 1",
        auto="auto",
        **_number(0, strict=True),
    ),
    "model": Key("mlp-32", "network", **_names(networks.MODELS, own=True), client=True),
    "features": Key("none", "fixed layer in front of the network", **_names(networks.FEATURES), client=True),
    "dataset": Key(
        "digits", "data; own: files of the clients", **_names({**DATASETS, OWN_DATA: None}, own=True), client=True
    ),
    "input-shape": Key(
        "",
        "own: shape of an example, public: channels x height x width of images, or a number of features",
        **_text("such as 1x28x28, or 16"),
        client=True,
    ),
    "num-classes": Key(
        "none", "own: number of classes, public; 0: real targets", auto="none", **_whole(0), client=True
    ),
    "data-dir": Key(
        "",
        "folder of the data, or of client-0.* and so on (own); empty: COTERIE_DATA",
        **_text("a folder"),
        client=True,
    ),
    "shift": Key("rotation", "how the data of hidden groups differ", **_names(SHIFTS), client=True),
    "clients": Key(500, "number of clients, M; public", **_whole(1), client=True),
    "groups": Key("4", "hidden groups: a number, or proportions such as 2:1:1", **_text("4 or 2:1:1"), client=True),
    "dirichlet-alpha": Key(
        0.0, "each client's labels follow its own draw from Dirichlet(alpha); 0: off", **_number(0), client=True
    ),
    "classes-per-client": Key(0, "each client holds so many classes alone; 0: off", **_whole(0), client=True),
    "non-iid-level": Key(
        -1.0,
        "clients divide training and test data together, and share so much of each class by class; -1: off",
        allowed="-1, or a number from 0 to 1",
        ok=lambda value: value == -1 or 0 <= value <= 1,
        client=True,
    ),
    "validation-clients": Key(
        0,
        "clients beside the others that never train, whose data stand in for all test data: for tuning",
        **_whole(0),
        client=True,
    ),
    "samples-per-client": Key(0, "training examples of a client; 0: divide all", **_whole(0), client=True),
    "privacy-unit": Key(
        "client",
        "what the guarantee protects: all data of a client (the server adds noise), one record (the client does)",
        **_choice("client", "record", "none"),
    ),
    "mechanism": Key("joint", "mechanism of client-level privacy", **_names(MECHANISMS)),
    "accountant": Key(
        "auto",
        "how epsilon is counted; auto: pld, and theorem-4.2 for the mechanism paper",
        **_names({"auto": 0, **{name: 0 for name in ACCOUNTANTS if not name.startswith("opacus")}}),
    ),
    "epsilon": Key(8.0, "privacy budget", **_number(0, strict=True)),
    "delta": Key(
        "auto",
        "delta of the guarantee; auto: 1/(100 clients), or 1/(100 records) at record level",
        auto="auto",
        allowed="a number strictly between 0 and 1",
        ok=lambda value: 0 < value < 1,
    ),
    "noise-multiplier": Key(
        "auto",
        "noise of a round over its sensitivity; auto: calibrated to epsilon; a number: rounds end with the budget",
        auto="auto",
        **_number(0.05, 1e4),
    ),
    "clip": Key(
        0.3, "C, L2 bound of a client's update; at record level c, of a record's gradient", **_number(1e-6, 1e6)
    ),
    "first-batch-size": Key(
        "auto",
        "record level: expected size of a batch in round 1; auto: all records where the method asks for it",
        auto="auto",
        **_number(1),
    ),
    "first-noise": Key(1.0, "record level: noise of round 1, in units of the other rounds'", **_number(0.1, 100)),
    "selection": Key(
        "gumbel",
        "record level: how clients choose a cluster by loss: private and charged, or exact and never certified",
        **_choice(*(way for way in SELECTIONS if way != "none")),
    ),
    "selection-epsilon": Key(0.02, "record level: epsilon of one such choice", **_number(0.001, 50)),
    "loss-bound": Key(
        4.0,
        "record level: a record's loss counts no more in such a choice, or in losses of other clients' models",
        **_number(1e-6, 1e6),
        client=True,
    ),
    "loss-noise": Key(
        5.0,
        "record level, lcfl: noise of all losses of other clients' models, over their sensitivity",
        **_number(0.1, 1e4),
    ),
    "weights": Key(
        "examples",
        "record level: how clients of a cluster are weighed: by public numbers of records, or all alike",
        **_choice(*WEIGHTS),
    ),
    "profiles": Key(
        "",
        "record level: what clients 0, 1, ... have of their own, in turn, as 'epsilon=2 batch-size=16; epsilon=10'",
        **_text("settings of epsilon, delta, batch-size and samples-per-client, one or more, parted by semicolons"),
    ),
    "divisor": Key(
        "auto",
        "D_j of the update: fixed is qM/k, released max(B, 1, released size); auto: fixed under joint",
        **_choice("auto", "fixed", "released"),
    ),
    "identifier-share": Key(
        "auto",
        "part of a round's privacy spent on labels or cluster sizes, where used; auto: 0.04, or 0.2 with identifiers",
        auto="auto",
        allowed="a number above 0 and below 1",
        ok=lambda value: 0 < value < 1,
    ),
    "identifier-noise": Key(
        0.0, "paper: fixed noise on identifiers that nobody pays for (its Appendix C has 1); 0: charged", **_number(0)
    ),
    "identifiers": Key("gaussian", "how rr-slot makes labels noisy", **_choice("gaussian", "exponential")),
    "budget-file": Key(
        "",
        "client level: ledger with one budget for all runs on these clients that name it; empty: the run's own alone",
        **_text("a file; the first run that names it sets its budget"),
    ),
    "seed": Key("none", "none: secret randomness; a number: reproducible, not certified", auto="none", **_whole(0)),
    "evaluate": Key(
        "auto",
        "diagnostic: exact accuracies, outside the guarantee; private: their noisy mean, charged; off: none; auto: "
        "diagnostic in a simulation and without privacy, else private at client level and off at record level",
        **_choice("auto", "diagnostic", "private", "off"),
    ),
    "evaluate-noise": Key(
        0.01, "standard deviation of the noise on a private mean accuracy", **_number(0, 1, strict=True)
    ),
    "evaluate-every": Key(5, "rounds between two evaluations on all clients", **_whole(1)),
    "stop-after": Key(0, "end after so many of the planned rounds, at the noise of all of them; 0: never", **_whole(0)),
    "round-timeout": Key(3600.0, "seconds to wait for the replies of a round", **_number(0, strict=True)),
    "wait": Key(60.0, "seconds to wait for clients to register", **_number(0)),
    "min-clients": Key(
        0, "clients that must be there for a round to begin; with privacy-unit client for the first one", **_whole(0)
    ),
    "min-replies": Key(
        0.0,
        "share of the asked clients whose replies a round needs: others are asked again; not with privacy-unit client",
        **_number(0, 1),
    ),
    "metrics-port": Key(
        0,
        "port of this machine where Prometheus reads round, epsilon and accuracy during the run; 0: none",
        allowed="a port, 0 to 65535",
        ok=lambda value: 0 <= value <= 65535,
    ),
    "metrics-host": Key("0.0.0.0", "address at which metrics-port listens", **_text("a name or address")),
    "device": Key("auto", "where clients train", **_choice("auto", "cpu", "cuda"), client=True),
    "out": Key("", "run folder; empty: a new one under runs/", **_text("a folder")),
    "resume": Key(False, "continue the run in the run folder", **_text("true or false")),
}

#: Paths, timeouts and ports: they may change when a run resumes.
PLACES = (
    "out",
    "resume",
    "data-dir",
    "budget-file",
    "device",
    "wait",
    "round-timeout",
    "min-clients",
    "min-replies",
    "metrics-port",
    "metrics-host",
)


#: Settings that are usually tuned on results, outside the guarantee of one run; certificates list their values.
TUNED = (
    "strategy",
    "clusters",
    "rebalance-min",
    "respawn-every",
    "rounds",
    "sampling-rate",
    "local-epochs",
    "batch-size",
    "lr",
    "lr-decay",
    "proximal-mu",
    "personal-layers",
    "components",
    "metric",
    "clusterer",
    "landmarks",
    "warm-up-rounds",
    "within",
    "stationary-norm",
    "incongruent-norm",
    "first-split",
    "gan",
    "gan-average",
    "synthetic-samples",
    "autoencoder",
    "pretrain-epochs",
    "joint-epochs",
    "dcn-weight",
    "dcn-noise",
    "dcn-restarts",
    "precision",
    "local-centroids",
    "fuzzifier",
    "loss-bound",
    "rebalance-train",
    "server-lr",
    "average-last",
    "aggregator",
    "byzantine-share",
    "model",
    "features",
    "clip",
)


# Settings that split one data set among clients, with the values that leave own data unchanged.
_SPLIT = {
    "groups": "1",
    "shift": "none",
    "dirichlet-alpha": 0.0,
    "classes-per-client": 0,
    "non-iid-level": -1.0,
    "validation-clients": 0,
}

# Settings of a client profile.
_PROFILE = ("epsilon", "delta", "batch-size", "samples-per-client")


class RunConfig:
    """A validated configuration; ``config["key"]`` has the type of the schema.

    Args:
        values: keys of the schema; others take their defaults.
        deployed: whether clients are deployed instead of simulated, which decides ``evaluate = "auto"``;
            ``config["evaluate"]`` is the resolved value.

    Raises:
        ConfigError: an unknown key, a value that is not allowed, or a combination that cannot work.
    """

    def __init__(self, values: Mapping[str, Any], *, deployed: bool = False) -> None:
        for name in values:
            if name not in SCHEMA:
                known = "`coterie run --keys` lists all keys"
                raise ConfigError(f"unknown key {name!r}{_nearest(name, SCHEMA)} ({known})")
        self.values = {name: key.parse(name, values.get(name, key.default)) for name, key in SCHEMA.items()}
        if "privacy-unit" not in values and "client" not in self.method.units:
            self.values["privacy-unit"] = self.method.units[0]
        if "clusters" not in values and self.method.grows:
            self.values["clusters"] = 0
        kept = _SPLIT if self["dataset"] == OWN_DATA else {}
        self.values |= {
            name: value for name, value in self.method.defaults.items() if name not in values and name not in kept
        }
        for name, value in self._defaults().items():
            if self[name] == SCHEMA[name].default:
                self.values[name] = value
        self._not_evaluated = ""
        if self["evaluate"] == "auto":
            self.values["evaluate"] = self._automatic_evaluation(deployed)
        self._check_together()

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def _defaults(self) -> dict[str, Any]:
        """Defaults of the method that differ from the demo's."""
        found: dict[str, Any] = {}
        if not self.method.clustered:
            found |= {"respawn-every": 0} | ({} if self.method.produces == "labels" else {"clusters": 1})
        if "client" not in self.method.units or self["privacy-unit"] == "record":
            found |= {"sampling-rate": 1.0, "respawn-every": 0}
        if self["dataset"] == OWN_DATA:
            found |= _SPLIT | ({"model": "regression"} if self["num-classes"] == 0 else {})
        return found

    def _automatic_evaluation(self, deployed: bool) -> str:
        """The value of ``evaluate = "auto"``: private only if private evaluations can be planned."""
        if not deployed or self["privacy-unit"] == "none":
            return "diagnostic"
        if self["privacy-unit"] == "record":
            return "off"
        try:
            _ = RunConfig({**self.values, "evaluate": "private"}).plan
        except (ConfigError, PrivacyError) as error:
            self._not_evaluated = f"evaluate = 'auto' is off: private evaluations cannot be planned ({error})"
            return "off"
        return "private"

    def _check_together(self) -> None:
        try:
            if self["clusters"] == 0 and not self.method.finds_clusters:
                raise ConfigError(f"clusters = 0: {self['strategy']} must be told their number")
            self._check_data()
            if self["privacy-unit"] == "record":
                self._check_records()
            if not self.models <= self["clients"]:
                raise ConfigError(
                    f"clusters = {self['clusters']}: more clusters than clients ({self['clients']}); "
                    "lower clusters or raise clients"
                )
            if not self["min-clients"] <= self["clients"]:
                raise ConfigError(f"min-clients = {self['min-clients']}: there are {self['clients']} clients")
            if self["min-replies"] and self["privacy-unit"] == "client":
                raise ConfigError(
                    f"min-replies = {self['min-replies']:g}: with privacy-unit client a round is released whatever "
                    "came, since to ask again would tell how many did; set it to 0"
                )
            if self["evaluate"] == "private" and self["privacy-unit"] == "none":
                raise ConfigError("evaluate = 'private' has no budget to charge: set privacy-unit or evaluate")
            if self["evaluate"] == "private" and self["validation-clients"]:
                raise ConfigError(
                    f"validation-clients = {self['validation-clients']} with evaluate = 'private': the records of one "
                    "validation client are test data of many clients, so the noise would not hide it; set "
                    "validation-clients to 0, or evaluate to diagnostic or off"
                )
            if self["budget-file"]:
                self._check_shared_budget()
            assign_groups(self["clients"], parse_groups(self["groups"]))
            if self["validation-clients"]:
                assign_groups(self["validation-clients"], parse_groups(self["groups"]))
            sketch = self._sketch
            self.method(
                sketch,
                ledger=Ledger(sketch.delta),
                reseeding=self.reseeding,
                averaging=self.averaging,
                aggregator=self.aggregator,
                rebalance_train=self["rebalance-train"],
                **self.method_options,
            )
        except (StrategyError, DataError, PrivacyError) as error:
            raise ConfigError(str(error)) from None

    def _check_shared_budget(self) -> None:
        """Check that a run with a shared budget can be certified."""
        wrong = {
            "privacy-unit": self["privacy-unit"] != "client",
            "mechanism": bool(PLANS[self["mechanism"]].flaws),
            "seed": self.seed is not None,
        }
        for name in (name for name in wrong if wrong[name]):
            raise ConfigError(
                f"budget-file with {name} = {self[name]!r}: a shared budget is for certified runs with client-level "
                f"privacy; leave out budget-file or change {name}"
            )

    def _check_data(self) -> None:
        """Settings of clients' own data: required for these, rejected for others."""
        said = {"input-shape": self["input-shape"] != "", "num-classes": self["num-classes"] != "none"}
        if self["dataset"] != OWN_DATA:
            for name in (name for name in said if said[name]):
                raise ConfigError(f"{name} = {self[name]!r} is for dataset = 'own'; {self['dataset']!r} says its own")
            return
        for name in (name for name in said if not said[name]):
            raise ConfigError(f"dataset = 'own' needs {name}, {SCHEMA[name].help.removeprefix('own: ')}; set it")
        _ = self.facts
        for name, value in _SPLIT.items():
            if self[name] != value:
                raise ConfigError(
                    f"{name} = {self[name]!r}: clients' own data are not split or shifted; set it to {value!r}"
                )
        if self["samples-per-client"] and self["privacy-unit"] != "record":
            raise ConfigError(
                f"samples-per-client = {self['samples-per-client']}: clients keep all of their own data, and only "
                "record-level privacy needs a public number of records; set it to 0"
            )

    @property
    def method(self) -> type[ClusteredStrategy]:
        """The strategy's class."""
        return STRATEGIES[self["strategy"]]

    @property
    def batched(self) -> bool:
        """Whether many clients train in one batch on a CPU."""
        model = networks.MODELS.get(self["model"])
        return model is not None and model.batched and self.method.produces == "models"

    @property
    def models(self) -> int:
        """Initial number of models; 0 if the method finds it."""
        return 1 if self.method.produces == "labels" else int(self["clusters"])

    @cached_property
    def facts(self) -> Facts:
        """Public facts about the data."""
        return facts(self["dataset"], self["input-shape"], self["num-classes"], self["data-dir"] or None)

    @property
    def examples(self) -> tuple[tuple[int, ...], int]:
        """Shape of an example, behind fixed features, and the number of classes."""
        features = networks.features(self["features"])
        return features(np.zeros((1, *self.facts.shape), np.float32)).shape[1:], self.facts.num_classes

    @property
    def method_options(self) -> dict[str, Any]:
        """Arguments of the strategy's constructor beside those of every method."""
        own = {name.replace("-", "_"): self[name] for name in self.method.options if name in SCHEMA}
        if "true-groups" in self.method.options:
            own["true_groups"] = assign_groups(self["clients"], parse_groups(self["groups"])).tolist()
        if "example-shape" in self.method.options:
            own["example_shape"] = self.examples[0]
        if own.get("gan") == "auto":
            own["gan"] = networks.gan_for(own["example_shape"], private=self["privacy-unit"] == "record")
        return own

    @property
    def seed(self) -> int | None:
        """The seed; None: secret randomness."""
        return None if self["seed"] == "none" else int(self["seed"])

    @property
    def delta(self) -> float:
        """The resolved delta; ``auto`` is 1/(100 M), or 1/(100 records) at record level."""
        many = self["samples-per-client"] if self["privacy-unit"] == "record" else self["clients"]
        return 1 / (100 * many) if self["delta"] == "auto" else float(self["delta"])

    @property
    def server_lr(self) -> float:
        """The resolved step size; 1.5 was chosen on held-out parts of training sets (docs/results.md)."""
        if self["server-lr"] != "auto":
            return float(self["server-lr"])
        return 1.5 if self["privacy-unit"] == "client" else 1.0

    @property
    def budget(self) -> float:
        """The privacy budget; inf without privacy."""
        return float(self["epsilon"]) if self["privacy-unit"] != "none" else math.inf

    @property
    def reseeding(self) -> Reseeding | None:
        """The schedule of re-seeding; None: never."""
        return Reseeding(every=self["respawn-every"]) if self["respawn-every"] and self.models > 1 else None

    @property
    def averaging(self) -> Averaging:
        """Averaging of released models."""
        return Averaging(self["average-last"])

    @property
    def aggregator(self) -> Aggregator:
        """The aggregator of a cluster's updates."""
        return Aggregator(self["aggregator"], self["byzantine-share"])

    @property
    def _identifier_share(self) -> float:
        """Share of a round's privacy for labels or sizes; 0 if they are not used."""
        reads_sizes = bool(self.reseeding or self["rebalance-min"] or self["divisor"] == "released")
        noisy_labels = self.models > 1 and self["mechanism"] != "joint"
        if not (reads_sizes or noisy_labels) or self._uncharged:
            return 0.0
        share = self["identifier-share"]
        return PLANS[self["mechanism"]].usual_share if share == "auto" else float(share)

    @property
    def _uncharged(self) -> float:
        """Noise on identifiers outside the budget."""
        return float(self["identifier-noise"]) if self["mechanism"] == "paper" and self.models > 1 else 0.0

    @property
    def _evaluations(self) -> int:
        """Number of private evaluations in the run."""
        every = self["evaluate-every"] if self["evaluate"] == "private" else 0
        return self.method.evaluations(self["rounds"], every)

    @property
    def _numbers(self) -> dict[str, Any]:
        """Arguments of the plan, without the noise."""
        numbers = {
            "clients": self["clients"],
            "num_clusters": max(self.models, 1),
            "sampling_rate": self["sampling-rate"],
            "rounds": self["rounds"],
            "rebalance_min": self["rebalance-min"],
        }
        if self["divisor"] != "auto":
            numbers["divisor"] = self["divisor"]
        if self["privacy-unit"] == "none":
            return numbers
        if self["accountant"] != "auto":
            numbers["accountant"] = self["accountant"]
        if self["mechanism"] == "rr-slot":
            numbers["identifiers"] = self["identifiers"]
        if self["mechanism"] == "paper":
            numbers["identifier_noise"] = self._uncharged
        return numbers | {
            "clip_norm": self["clip"],
            "epsilon": self["epsilon"],
            "delta": self.delta,
            "identifier_share": self._identifier_share,
            "evaluations": self._evaluations,
            "evaluation_noise": self["evaluate-noise"],
        }

    @property
    def _kind(self) -> type[Plan]:
        return PLANS[self["mechanism"] if self["privacy-unit"] != "none" else "none"]

    @property
    def _sketch(self) -> Plan:
        """A plan without calibrated noise, for fast checks."""
        noise = 1.0 if self["noise-multiplier"] == "auto" else self["noise-multiplier"]
        if self["privacy-unit"] == "record":
            return self._record_level(noise)
        return self._kind(noise_multiplier=0.0 if self["privacy-unit"] == "none" else noise, **self._numbers)

    def _check_records(self) -> None:
        """Check the settings that record-level privacy requires."""
        if self["samples-per-client"] == 0:
            raise ConfigError(
                "samples-per-client = 0: at record level the number of a client's records is a public constant; set it"
            )
        if self["sampling-rate"] != 1:
            raise ConfigError(
                f"sampling-rate = {self['sampling-rate']}: at record level all clients take part in every round; "
                "set it to 1"
            )
        for name in ("rebalance-min", "respawn-every"):
            if self[name]:
                raise ConfigError(
                    f"{name} = {self[name]}: reads noisy cluster sizes of client-level privacy; set it to 0"
                )
        if self["evaluate"] == "private":
            raise ConfigError("evaluate = 'private' is for client-level privacy: at record level use diagnostic or off")
        for plan in self._record_plans(1.0):
            if plan.num_examples > self["samples-per-client"]:
                raise ConfigError("profiles: samples-per-client of a profile must be at most that of the run")

    @property
    def _profiles(self) -> list[dict[str, Any]]:
        """Settings of clients 0, 1, ..., in turn."""
        found = []
        for part in self["profiles"].split(";"):
            own = {}
            for setting in part.split():
                name, _, value = setting.partition("=")
                if name not in _PROFILE:
                    hint = _nearest(name, _PROFILE)
                    raise ConfigError(f"profiles: {setting!r}: must set one of {', '.join(_PROFILE)}{hint}")
                own[name] = SCHEMA[name].parse(name, value)
            found.append(own)
        return found

    def _record_plans(self, noise: float | None = None) -> tuple[RecordPlan, ...]:
        """The plans of clients 0, 1, ..., in turn; calibrated unless ``noise`` is given."""
        choices = self.method.max_selections(self["rounds"])
        compared = self.method.max_compared_models(self["clients"], **self.method_options)
        plans = []
        for own in self._profiles:
            said = {**self.values, **own}
            many, first, ratio = said["samples-per-client"], said["first-batch-size"], said["first-noise"]
            if first == "auto":
                first = many if self.method.full_first_batch else None
            numbers: dict[str, Any] = {
                "num_examples": many,
                "batch_size": min(said["batch-size"], many),
                "rounds": said["rounds"],
                "epsilon": said["epsilon"],
                "delta": 1 / (100 * many) if said["delta"] == "auto" else said["delta"],
                "clip_norm": said["clip"],
                "first_batch_size": None if first is None else int(min(first, many)),
                "local_epochs": said["local-epochs"],
                "selection": said["selection"] if choices else "none",
                "selections": choices,
                "selection_epsilon": said["selection-epsilon"],
                "compared": compared,
                "loss_noise": said["loss-noise"],
                "models_per_message": said["models-per-message"],
                "accountant": "pld" if said["accountant"] == "auto" else said["accountant"],
            }
            if noise is None:
                plans.append(RecordPlan.calibrated(first_noise_ratio=ratio, **numbers))
            else:
                plans.append(RecordPlan(noise_multiplier=noise, first_noise_multiplier=ratio * noise, **numbers))
        return tuple(plans)

    def _record_level(self, noise: float | None = None) -> RecordLevel:
        return RecordLevel.of(
            self._record_plans(noise),
            clients=self["clients"],
            num_clusters=max(self.models, 1),
            weights=self["weights"],
        )

    @cached_property
    def plan(self) -> Plan:
        """The privacy plan, its noise calibrated (about half a second).

        Raises:
            PrivacyError: no noise reaches the target.
        """
        if self["privacy-unit"] == "none" or self["noise-multiplier"] != "auto":
            return self._sketch
        if self["privacy-unit"] == "record":
            return self._record_level()
        return self._kind.calibrated(**self._numbers)

    def about(self) -> dict[str, Any]:
        """What the ledger's header holds beside the plan, for the certificate."""
        return {
            "seed": self.seed,
            "diagnostics": self._diagnostics,
            "public": {
                "server-lr": self.server_lr,
                "average-last": self["average-last"],
                "respawn-every": self["respawn-every"],
            },
            "tuned": {name: self[name] for name in TUNED},
            "unfounded": list(self.method.unfounded),
        }

    @property
    def _diagnostics(self) -> list[str]:
        if self["privacy-unit"] == "client":
            replies = "the total number of replies that could not be used"
        else:
            replies = "in each round, how many clients were there, were asked, and gave a reply that could be used"
        always = [
            replies,
            "the seconds that each round took",
            "whether any reply could be used: a run without one fails",
        ]
        if self["min-clients"]:
            when = "round 1 begins" if self["privacy-unit"] == "client" else "each round begins"
            always.append(f"whether enough clients (min-clients) are there before {when}: a run without them fails")
        if self["evaluate"] != "diagnostic":
            return always
        if self.method.produces == "labels":
            return ["numbers of records by label and class, exact, and the scores of these", *always]
        return [
            "accuracies on clients' held-out data and training losses, exact, every "
            f"{self['evaluate-every']} rounds and at the end",
            "groups found, clustering accuracy, NMI and kappa, from clients' exact labels",
            *always,
        ]

    @property
    def partition_seed(self) -> int:
        """Seed of the split of data among simulated clients: the run's seed, or 0."""
        return self.seed or 0

    def for_clients(self) -> dict[str, Any]:
        """The configuration that clients receive with every message."""
        sent = {name: self[name] for name, key in SCHEMA.items() if key.client}
        sent["partition-seed"] = self.partition_seed
        if self.seed is not None:
            sent["seed"] = self.seed
        return sent

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Keys in which two runs differ, with both values; paths and timeouts do not count."""
        return {name: (self[name], other[name]) for name in SCHEMA if name not in PLACES and self[name] != other[name]}

    def warnings(self) -> list[str]:
        """Warnings to show before the run starts."""
        found = [self._not_evaluated] if self._not_evaluated else []
        whom = {"client": "clients", "record": "samples-per-client"}.get(self["privacy-unit"])
        if whom is not None and self.delta > 1 / (10 * self[whom]):
            one, many = self["privacy-unit"], f"{self['privacy-unit']}s"
            found.append(
                f"delta = {self.delta:g} is above 1/(10 {many}) = {1 / (10 * self[whom]):g}: publishing one {one} at "
                f"random satisfies delta = 1/{many}; use it only to compare with papers"
            )
        if self["privacy-unit"] != "none" and self.method.produces == "models":
            found += self._drowned()
        return found

    def _drowned(self) -> list[str]:
        """A warning if the noise of the run moves a model further than all updates together can."""
        plan = self.plan
        size = sum(value.size for value in networks.initialise(self["model"], *self.examples, 0).values())
        members = plan.expected_members
        if isinstance(plan, RecordLevel):
            own = plan.of_clients[0]
            steps = own.rounds * own.local_epochs * (own.num_examples // own.batch_size)
            noise = own.noise_multiplier * math.sqrt(size / (steps * members)) / own.batch_size
            remedy = "use more records in larger batches, more clients"
        else:
            moved = 1 if plan.sampler == "poisson" else 2  # one client more, or another in its place
            noise = moved * plan.noise_multiplier_updates * math.sqrt(size / plan.rounds) / members
            remedy = f"use privacy-unit = record, about {math.ceil(noise) * self['clients']} clients in place of "
            remedy += f"{self['clients']}"
        if noise <= 1:
            return []
        return [
            f"the noise drowns the signal: over the run it moves a model {noise:.3g} times as far as clipping lets all "
            f"updates together ({size} parameters, {members:.3g} clients a model and round, noise multiplier "
            f"{plan.noise_multiplier:.3g}); {remedy}, a smaller model, or a larger epsilon"
        ]
