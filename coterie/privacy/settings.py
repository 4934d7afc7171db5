"""Settings of privacy: of both units, and of record-level privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.fields import CLIP_NORM, COUNT, EPSILON, LOSS_BOUND
from coterie.fields.settings import ConfigError, Settings, setting
from coterie.privacy.accounting import ACCOUNTANTS, certifies
from coterie.privacy.mechanisms import MECHANISMS, PARTICIPATION, PLANS, WEIGHTS
from coterie.privacy.record import SELECTIONS
from coterie.privacy.schedule import DIVISORS

#: Full name of the setting of the unit.
UNIT = "privacy.privacy-unit"
#: Settings that have no effect without privacy.
REQUIRE_PRIVACY = ("privacy.epsilon", "privacy.delta", "privacy.noise-multiplier", "privacy.mechanism")

_RECORD = (UNIT, ("record",))


@dataclass(frozen=True)
class PrivacySettings(Settings):  # large: one field per setting
    """What is protected, by which mechanism, within which budget."""

    table: ClassVar[str] = "privacy"

    privacy_unit: str = setting(
        "client",
        "what the guarantee protects: all data of a client (the server adds noise), one record (the client does)",
        choices=("client", "record", "none"),
    )
    mechanism: str = setting(
        "joint",
        "mechanism of client-level privacy",
        choices=sorted(name for name in MECHANISMS if not PLANS[name].flaws),
        also=MECHANISMS.__contains__,  # those that coterie.audit adds
    )
    accountant: str | None = setting(
        None,
        "accountant of epsilon; auto: pld",
        choices=tuple(filter(certifies, ACCOUNTANTS)),
        also=ACCOUNTANTS.__contains__,
    )
    epsilon: float = setting(8.0, "privacy budget", within=EPSILON)
    delta: float | None = setting(
        None,
        "delta of the guarantee; auto: 1/(100 clients), or 1/(100 records) at record level",
        above=0,
        below=1,
        allowed="a number strictly between 0 and 1",
    )
    noise_multiplier: float | None = setting(
        None,
        "noise of a round over its sensitivity; auto: calibrated to epsilon; a number: rounds end with the budget",
        at_least=0.05,
        at_most=1e4,
    )
    clip_norm: float | None = setting(
        0.3,
        "C, L2 bound of a client's update; at record level c, of a record's gradient; adaptive: half of the median of "
        "the norms of updates (gradients), within the guarantee",
        within=CLIP_NORM,
        none="adaptive",
        tuned=True,
    )
    divisor: str | None = setting(
        None,
        "D_j of the update: fixed is qM/k, released max(B, 1, released size); auto: fixed under joint",
        choices=DIVISORS,
    )
    identifier_share: float | None = setting(
        None,
        "share of a round's privacy for cluster sizes, in rounds that use them, or for labels (rr-slot); auto: 0.04; "
        "0.1 if clusters is 0; 0.2 for labels",
        above=0,
        below=1,
    )
    identifiers: str = setting(
        "gaussian", "noise on labels", choices=("gaussian", "exponential"), only=("privacy.mechanism", ("rr-slot",))
    )
    participation: str | None = setting(
        None,
        "who knows which clients take part: everyone, or the server alone, which amplifies privacy; auto: visible "
        "under banded; the other mechanisms assume that it is secret",
        choices=PARTICIPATION,
        only=("privacy.mechanism", ("banded",)),
    )
    dropout: float = setting(
        0.3,
        "share of a round's clients that may drop out before the round is skipped; the others' noise suffices alone",
        at_least=0,
        at_most=1 / 3,
        allowed="a number of at least 0 and at most 1/3",
        only=("privacy.mechanism", ("secure",)),
    )
    corrupt: int = setting(
        1,
        "clients of a round that may work with the server: the guarantee does not count on their noise",
        at_least=0,
        at_most=1_000_000,
        only=("privacy.mechanism", ("secure",)),
    )
    masks: bool = setting(
        False,
        "whether simulated clients run the whole protocol of masks, which takes time and changes no sum",
        only=("privacy.mechanism", ("secure",)),
    )
    budget_file: str = setting(
        "",
        "client level: ledger of one budget for all runs on these clients that name it; empty: of this run alone",
        allowed="a file; the first run that names it sets its budget",
        place=True,
        path=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.privacy_unit == "record" and self.mechanism != self.declared()["mechanism"].default:
            raise ConfigError(
                f"privacy.mechanism = {self.mechanism!r} is for privacy-unit = client: at record level, clients train "
                "by DP-SGD; leave it out"
            )

    def check_shared_budget(self, seed: int | None) -> None:
        """Check that a run with a shared budget and a seed, None for secret randomness, can be certified."""
        conditions = {
            "privacy-unit": (self.privacy_unit, self.privacy_unit == "client"),
            "mechanism": (self.mechanism, not PLANS[self.mechanism].flaws),
            "seed": (seed, seed is None),
        }
        for name, (value, certified) in conditions.items():
            if self.budget_file and not certified:
                raise ConfigError(
                    f"budget-file with {name} = {value!r}: a shared budget requires certified runs with client-level "
                    f"privacy; leave out budget-file or change {name}"
                )


@dataclass(frozen=True)
class RecordLevelSettings(Settings):
    """Record-level privacy: noise of round 1, private choices of a cluster, released losses, weights."""

    table: ClassVar[str] = "record-level"

    first_batch_size: float | None = setting(
        None,
        "expected batch size in round 1; auto: all records where the method clusters the updates of round 1",
        within=COUNT,
        only=_RECORD,
    )
    first_round_noise_ratio: float | None = setting(
        None,
        "noise of round 1 over that of the other rounds; auto: from public numbers where the method clusters the "
        "updates of round 1 into a given number of clusters, else 1; 1 if first-batch-size or noise-multiplier is set",
        at_least=0.1,
        at_most=100,
        only=_RECORD,
    )
    selection: str = setting(
        "gumbel",
        "how clients choose a cluster by loss: private and charged, or exact and never certified",
        choices=[way for way in SELECTIONS if way != "none"],
        only=_RECORD,
    )
    loss_bound: float = setting(
        4.0,
        "bound to which the loss of a record is clipped in such a choice, or where losses are released",
        within=LOSS_BOUND,
        client=True,
        tuned=True,
        only=_RECORD,
    )
    loss_noise: float = setting(
        5.0, "lcfl: noise of all released losses over their sensitivity", at_least=0.1, at_most=1e4, only=_RECORD
    )
    weights: str = setting(
        "examples",
        "weights of the clients of a cluster: public numbers of records, or equal; without privacy: equal, unless "
        "records are their true numbers of training records",
        choices=(*WEIGHTS, "records"),
        only=(UNIT, ("record", "none")),
    )
    profiles: str = setting(
        "",
        "settings of clients 0, 1, ..., in turn, as 'epsilon=2 batch-size=16; epsilon=10'",
        allowed="epsilon, delta, batch-size and samples-per-client, one or more, separated by semicolons",
        only=_RECORD,
    )
