"""Signed requests for runs: their terms follow from the settings of a run, and the server checks them first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.fields.settings import ConfigError
from coterie.privacy import RecordLevel, Secure
from coterie.server import planning
from coterie.server.config import RunConfig
from coterie.site.errors import DeployError
from coterie.site.roster import RosterFile, authority_beside
from coterie.site.run_request import RunRequest

#: Environment variable of the ServerApp: the operator's roster.
ROSTER = "COTERIE_ROSTER"


@dataclass(frozen=True)
class Submission:
    """Who has started a run.

    Attributes:
        submitter: name in the roster of the run; None: it is not known.
        request: id of the signed request; None without one.
    """

    submitter: str | None = None
    request: str | None = None


def terms_of(config: RunConfig) -> dict[str, Any]:
    """Return the terms of a run that a signed request states, all of :class:`RunRequest` but the app and the times."""
    unit = config.privacy.privacy_unit
    evaluation = ["counts"] if config.method.produces == "labels" else ["scores"]
    evaluation += ["histograms"] if planning.score_share(config) else []
    plan = planning.sketch(config)
    if isinstance(plan, Secure) and config.evaluation.evaluate == "private":
        evaluation = ["masked scores"]
    plans = plan.client_plans[: plan.clients] if isinstance(plan, RecordLevel) else (plan,)
    private = unit != "none"
    trained = [f"masked {what}" if isinstance(plan, Secure) else what for what in config.method.releases]
    return {
        "strategy": config.run.strategy,
        "privacy_unit": unit,
        "epsilon": max(each.epsilon for each in plans) if private else None,
        "delta": max(each.delta for each in plans) if private else None,
        "rounds": config.run.rounds,
        "releases": (*trained, *(evaluation if config.evaluation.evaluate != "off" else [])),
    }


def submission_of(config: RunConfig, app: str | None = None) -> Submission:
    """Check roster and signed request of a deployed run, as its clients will.

    Args:
        config: of the run.
        app: SHA-256 of the app that runs; None: it is not known yet.

    Raises:
        ConfigError: the roster names another app; or the request is invalid, its submitter is not in the roster, or
            the run exceeds it.
    """
    file = roster_of()
    roster = None if file is None else file.roster
    if roster is not None and app is not None and roster.app not in ("", app):
        raise ConfigError(
            f"{ROSTER}: it names the app {roster.app}, and {app or 'an unknown app'} runs: submit that app, or state "
            "the new one (coterie certs --app)"
        )
    if not config.run.signed_request:
        return Submission()
    try:
        request = RunRequest.read(config.run.signed_request)
        name = None if roster is None else request.submitter(roster).name
        request.check_time()
    except DeployError as error:
        raise ConfigError(f"signed-request: {error}") from None
    terms = terms_of(config)
    privacy = tuple(terms.pop(name) for name in ("privacy_unit", "epsilon", "delta"))
    if exceeded := request.refuses(app=app, privacy=privacy, **terms):
        raise ConfigError(f"signed-request: {exceeded}: sign the settings of this run again (coterie sign)")
    return Submission(name, request.id)


def roster_of(seen: Path | None = None) -> RosterFile | None:
    """Return the operator's roster, which COTERIE_ROSTER names; None without one.

    Args:
        seen: file of the largest numbers of rosters that the deployment has used; None: there is none.

    Raises:
        ConfigError: it cannot be used.
    """
    path = os.environ.get(ROSTER)
    try:
        return RosterFile(Path(path), authority_beside(Path(path)), seen) if path else None
    except DeployError as error:
        raise ConfigError(f"{ROSTER}: {error}") from None
