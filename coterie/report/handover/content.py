"""What the hand-over page says of a run, in words for those who do not know differential privacy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined

from coterie.privacy.certificate import COMPOSED, UNIT_COLUMN, attacker_right, epsilon_observers
from coterie.report import formats
from coterie.report.graphics import THEME
from coterie.report.handover.handover_template import HANDOVER_PAGE

# How likely the attacker thinks beforehand that the data was used.
_PRIORS = (("as likely as not", 0.5), ("one in ten", 0.1), ("one in a hundred", 0.01))
# How well an attacker can tell, by the largest share of right guesses.
_TELLS = ((0.65, "can hardly tell"), (0.85, "cannot reliably tell"), (1.0, "may often be able to tell"))


def page(certificate: Mapping[str, Any], *, name: str, method: str, finished: str, fingerprint: str) -> str:
    """Return the hand-over page as HTML without scripts or external resources.

    Args:
        certificate: of a finished run, as its ledger gives it.
        name: of the run.
        method: name of the strategy.
        finished: when it ended, in words.
        fingerprint: of the key that signed the run, hexadecimal; empty: it is not signed.
    """
    certified = bool(certificate["certified"])
    verdict = "cannot be recomputed" if certified and certificate["sampler"] == "fixed" else "good"
    private = _private(certificate) if certified else {}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(HANDOVER_PAGE).render(
        title=f"Hand-over of {name}",
        theme=THEME,
        certified=certified,
        reasons=[_sentence(reason) for reason in certificate["reasons"]],
        name=name,
        method=method,
        finished=finished,
        fingerprint=" ".join(fingerprint[i : i + 8] for i in range(0, len(fingerprint), 8)),
        verdict=verdict if certified else "not certified",
        trusted=certificate["unit"] == "client",
        version=certificate["coterie"],
        **private,
    )
    return text.lstrip()


def _private(certificate: Mapping[str, Any]) -> dict[str, Any]:
    one, unit = _protected(certificate)
    shown = epsilon_observers(certificate)
    tuned = [f"{key}: {formats.setting(value)}" for key, value in certificate["tuned_outside"].items()]
    rights = [(words, prior, attacker_right(certificate, prior)) for words, prior in _PRIORS]
    models = "the models, and what was published beside them"
    if certificate["unit"] == "record":
        server = ("the server and its operator", "what each client sends", True, "the client adds the noise itself")
        alone, how = "also together with the server", "messages do not depend on one record"
        member = "That a client takes part, and how many records its settings name."
    else:
        server = ("the server and its operator", "what each client sends, without noise", False, "it must be trusted")
        alone, how = "if they do not work with the server", "the numbers below assume that they see it"
        member = "That a client is part of the federation: membership is no secret."
    exact = "Exact scores, computed from the data without noise: do not publish them."
    return {
        "one": one,
        "unit": unit,
        "in_100": formats.of_100(rights[0][2]),
        "tells": next(words for most, words in _TELLS if rights[0][2] <= most),
        "seen": certificate["unit"] == "client",
        "drawn": certificate["unit"] == "client"
        and any(line["sampling_rate"] < 1 for lines in certificate[COMPOSED] for line in lines),
        "people": [
            ("who gets the models", models, True, "whatever else they know"),
            ("other clients", "the models of every round", True, alone),
            ("who listens on the network", "who takes part, and when", True, how),
            server,
        ],
        "odds": [
            (words, formats.of_100(max(prior, 1 - prior)), formats.of_100(right)) for words, prior, right in rights
        ],
        "epsilon": formats.epsilon(certificate["epsilon"] if shown is None else shown),
        "secret": "" if shown is None else formats.epsilon(certificate["epsilon"]),
        "delta": formats.number(certificate["delta"]),
        "outside": [
            *([exact] if any(", exact" in text for text in certificate["outside"]) else []),
            "Other runs on the same data: their losses add up.",
            member,
            "When the run took place, how long its steps took, and how many replies were lost.",
            "Reports that a client makes of its own data for itself, and keeps.",
            "Theft of the data itself, at a client or by someone with access to it.",
        ],
        "stated": [_sentence(item) for item in certificate["outside"]],
        "tuned": tuned,
    }


def _protected(certificate: Mapping[str, Any]) -> tuple[str, str]:
    """Return the unit as part of a sentence, and as a sentence without its end."""
    column = certificate["public_inputs"].get(UNIT_COLUMN)
    if certificate["unit"] == "client":
        return "the data of a given client", "One client, that is one site or device, with all of its data"
    if column is None:
        return "a given record", "One record of one client, that is one row of its table or one image"
    return (
        f"the data of a given {column}",
        f"All records with the same {column} at one client, such as all visits of a patient",
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."
