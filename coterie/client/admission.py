"""What a deployed client answers at all: checks of a request by its declarations, before its data are read.

Neither text nor time of a refusal depends on the client's data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from logging import ERROR, WARNING
from typing import Any

from flwr.app import RecordDict
from flwr.common.logger import log

from coterie import models as networks
from coterie.client.cohort import Cohort
from coterie.client.identity import Client
from coterie.client.masked_rounds import read_plan, read_round_request
from coterie.client.state import ClientError
from coterie.datasets import DATASETS, OWN_DATA, DataError
from coterie.fields.plugins import sources
from coterie.logs import printable
from coterie.privacy import Guarantee
from coterie.privacy.mechanisms.score_sums import TRAINING
from coterie.site.node import NodeConfig
from coterie.tasks import TaskError
from coterie.wire import ClientConfig, EvaluateRequest, LabelRequest, RequestError
from coterie.wire.masked import OpenRequest, RoundRequest
from coterie.wire.messages import (
    CENTROIDS,
    CONFIG,
    EVALUATE,
    GAN,
    LABEL,
    LOSSES,
    MASKED,
    MASKED_SCORES,
    MASKED_STEPS,
    TRAIN,
)
from coterie.wire.requests import MaskedRequest

# What replies hold, in the words of a policy.
_RELEASES = {
    TRAIN: "updates",
    MASKED: "masked updates",
    MASKED_SCORES: "masked scores",
    LOSSES: "losses",
    GAN: "samples",
    CENTROIDS: "centroids",
    LABEL: "counts",
    EVALUATE: "scores",
}


def admit(message_type: str, content: RecordDict, client: Client, node: NodeConfig) -> Cohort | RoundRequest:
    """Parse a request, and check that the client answers it.

    Returns:
        the request of a step of a masked round that has no models; of all others, the client with their content.

    Raises:
        ClientError: a field is out of bounds; the guarantee or the policy of the client's owner excludes the request;
            or it is for other data than the declared ones, or names code that is not allowed.
    """
    who = f"client {client.client_id} rejects the request"
    if message_type in MASKED_STEPS:
        _check_guarantee(client, message_type, priced=False)
    try:
        if MASKED_STEPS.get(message_type, 1) != 1:
            request = read_round_request(message_type, content)
            if isinstance(request, OpenRequest):
                _check_opening_policy(client, request, content[CONFIG].get("strategy"))
            return request
        # LOSSES: a diverged model of another client gets the largest loss
        cohort = Cohort.of(message_type, content, [client], finite=message_type != LOSSES)
    except RequestError as error:
        raise ClientError(f"{who}: {error}") from None
    config = cohort.config
    _check_cohort_policy(client, cohort)
    _check_guarantee(client, message_type, priced=bool(cohort.plans))
    _check_code(who, config, node)
    _check_pretrained(who, client.pretrained, config.pretrained_sha256)
    _check_data(who, client, config)
    return cohort


def _check_guarantee(client: Client, message_type: str, *, priced: bool) -> None:
    if (error := client.refusal(message_type, priced=priced)) is not None:
        log(WARNING, "run %s: %s", client.run, error)
        raise error


def _check_policy(
    client: Client, releases: Sequence[str], plan: Callable[[], Guarantee | None], *, if_allowed: str = "", **asked: Any
) -> None:
    """Check that the policy of the client's owner, and the signed request for the run, allow a request.

    Args:
        client: whose policy it is.
        releases: what the reply holds, in the words of a policy.
        plan: returns the client's record-level plan, or that of masked rounds; called if submitters are named.
        if_allowed: what the reply holds as well if the policy allows it.
        asked: method and round, as the server names them.
    """
    policy = client.policy
    if policy is None:
        return
    refused = policy.refuses(asked["strategy"], releases)
    if not refused and policy.submitters is not None:
        held = [*releases, if_allowed] if if_allowed and client.allows(if_allowed) else releases
        refused = client.consent.refuses(policy.submitters, app=client.app, releases=held, plan=plan(), **asked)
    if refused:
        who = f"client {client.client_id} rejects the request"
        log(WARNING, "%s of run %s: its policy: %s", who, client.run, refused)
        raise ClientError(f"{who}: the policy of its owner does not allow it: {refused}", "policy")


def _check_cohort_policy(client: Client, cohort: Cohort) -> None:
    request, releases, more = cohort.request, [_RELEASES[cohort.request.message_type]], ""
    if isinstance(request, EvaluateRequest) and cohort.plans:
        releases = ["histograms"]
    elif isinstance(request, EvaluateRequest) and not isinstance(request, MaskedRequest) and request.histogram:
        more = "histograms"
    elif isinstance(request, LabelRequest) and not request.release_counts:
        releases = []
    plan = partial(cohort.plan, client.client_id) if cohort.plans else lambda: None
    asked: dict[str, Any] = {"strategy": cohort.config.strategy, "round": request.round}
    _check_policy(client, releases, plan, if_allowed=more, **asked)


def _check_opening_policy(client: Client, request: OpenRequest, strategy: object) -> None:
    release = _RELEASES[MASKED if request.release == TRAINING else MASKED_SCORES]
    asked: dict[str, Any] = {"strategy": strategy if isinstance(strategy, str) else None, "round": request.round}
    _check_policy(client, [release], partial(read_plan, request.plan), **asked)


def _check_data(who: str, client: Client, config: ClientConfig) -> None:
    """Check that a request is for data as the client declares them."""
    declared, data = client.declared, config.data
    if client.data is None:
        if data.dataset == OWN_DATA:
            missing = (
                "the run uses the clients' own data, but no data are configured; set data in the node configuration"
            )
            raise ClientError(f"{who}: {missing}", "no-data")
    elif declared is None:
        if data.table_schema:
            missing = "the run reads tables by a schema, but the node configuration declares none; set schema"
            raise ClientError(f"{who}: {missing} (coterie client --schema)")
    else:
        try:
            asked = data.facts()
            asked.task.weighted(config.training.class_weights)
        except (DataError, TaskError) as error:
            raise ClientError(f"{who}: {error}") from None
        same = (asked.shape, asked.task, asked.fingerprint) == (declared.shape, declared.task, declared.fingerprint)
        if not same or declared.columns not in ((), asked.columns):
            raise ClientError(f"{who}: it is for {asked}, but the node configuration declares {declared}")


def _check_code(who: str, config: ClientConfig, node: NodeConfig) -> None:
    """Check that a request names no code but what the owner allows, and that this is what the server has.

    Raises:
        ClientError: it does not.
    """
    # An entry point is code, too; an unknown name gets the same reply, which does not reveal what is installed.
    for key, value, builtin_names in (
        ("dataset", config.data.dataset, (*DATASETS, OWN_DATA)),
        ("model", config.training.model, networks.MODELS),
        ("features", config.training.features, networks.FEATURES),
        *((kind, name, ()) for kind, name in config.training.plugins.items()),
    ):
        if value not in builtin_names and value not in (node.code or "").split():
            raise ClientError(
                f"{who}: {key} = {value!r} names code chosen by the server; to allow it, list it under code in the "
                "node configuration"
            )
    if config.sources is not None and config.sources != (here := sources(config.training.plugins)):
        differing = [pair.partition("=")[0] for pair in here.split() if pair not in config.sources.split()]
        raise ClientError(
            f"{who}: the file of {', '.join(differing)} differs here from that at the server; use the server's version"
        )


def _check_pretrained(who: str, path: str | None, expected: str | None) -> None:
    if expected is None:
        return
    wanted = f"{who}: the run starts from public parameters in a file with SHA-256 {printable(expected)}"
    if path is None:
        raise ClientError(f"{wanted}: name it under pretrained in the node configuration (coterie client --pretrained)")
    try:
        same = networks.file_hash(path) == expected
    except networks.ModelError as error:
        log(ERROR, "%s: %s", who, error)
        same = False
    if not same:
        raise ClientError(f"{wanted}, and pretrained of the node configuration names another file")
