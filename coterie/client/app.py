"""The Flower ClientApp: validates a message, and calls its handler in :mod:`coterie.client.handlers`."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from coterie import logs
from coterie import models as networks
from coterie.client.audited import audited
from coterie.client.consent import Consent
from coterie.client.identity import Client, identity_reply
from coterie.client.masking_keys import keys_or_none
from coterie.client.state import ClientError
from coterie.datasets import DATASETS, OWN_DATA, DataError, Declared
from coterie.fields.plugins import sources
from coterie.logs import printable
from coterie.privacy.mechanisms.score_sums import TRAINING
from coterie.site.errors import DeployError
from coterie.site.node import APP_HASH, MIN_COHORT, NodeConfig
from coterie.site.policy import Policy
from coterie.tasks import TaskError
from coterie.wire import ClientConfig, EvaluateRequest, LabelRequest, RequestError
from coterie.wire.guarantees import ANSWERS
from coterie.wire.masked import OpenRequest
from coterie.wire.messages import (
    CENTROIDS,
    CHARGED_REQUESTS,
    CONFIG,
    EVALUATE,
    GAN,
    HEAD,
    IDENTITY,
    LABEL,
    LOSSES,
    MASKED,
    MASKED_SCORES,
    MASKED_STEPS,
    OPEN,
    REPLY,
    RUN_REQUEST,
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

if TYPE_CHECKING:
    from coterie.client.cohort import Cohort
    from coterie.client.handlers import ReplyOrError


def _handle(message: Message, context: Context) -> Message:
    if "client-id" in context.node_config:
        return Message(_deployed_reply(message, context), reply_to=message)
    from coterie.client.handlers import handle  # imports PyTorch

    client = Client(int(context.node_config["partition-id"]))
    _name_in_logs(client, message, context)
    reply = handle(message.metadata.message_type, message.content, [client])[0]
    if isinstance(reply, ClientError):
        raise reply
    return Message(reply, reply_to=message)


def _deployed_reply(message: Message, context: Context) -> RecordDict:
    """Return the reply of a deployed client, within its policy and its budget, recorded in its audit log.

    Raises:
        ClientError: the client does not reply. Its text is what the server gets: no other exception leaves, since
            Flower sends the text of an exception to the server, and the text may contain data.
    """
    began = time.monotonic()
    try:
        node = NodeConfig.from_record(context.node_config)
        client = client_of(node)
    except (DeployError, DataError) as error:  # its text may hold values of the configuration
        log(ERROR, "node configuration: %s", error)
        raise ClientError("the node configuration has errors; see the client's own log") from None
    message_type, content = message.metadata.message_type, message.content
    config = content.config_records.get(CONFIG, ConfigRecord())
    consent = Consent.of(node, config.get(RUN_REQUEST))
    client = replace(client, run=str(context.run_id), app=os.environ.get(APP_HASH, ""), consent=consent)
    _name_in_logs(client, message, context)
    try:
        if message_type in (IDENTITY, *MASKED_STEPS) and client.refusal(OPEN, priced=False) is None:
            client = replace(client, keys=keys_or_none(node))
        if message_type == IDENTITY:
            return identity_reply(client)
        reply = audited(client, message_type, config, partial(_reply_to, message_type, content, client, node))
        from coterie.flower.sizes import fix_size

        fix_size(reply)
        return reply
    except ClientError:
        raise
    except Exception as error:
        log(ERROR, "client %s: %s", client.client_id, printable(error, 1000), exc_info=True)
        raise ClientError(f"client {client.client_id} failed; see its own log for details") from None
    finally:
        # The same time for all replies, so that it reveals less.
        least, taken = node.reply_seconds or 0.0, time.monotonic() - began
        if least and taken > least:
            log(WARNING, "a reply took %.3g s, longer than reply-seconds = %g: increase reply-seconds", taken, least)
        time.sleep(max(0.0, least - taken))


def _name_in_logs(client: Client, message: Message, context: Context) -> None:
    group = message.metadata.group_id  # of messages of a round: its number
    number = int(group) if group.isdigit() else None
    logs.install(run=str(context.run_id), node=str(context.node_id), client=client.client_id, round=number)


def client_of(node: NodeConfig) -> Client:
    """Return the client of a node configuration.

    Raises:
        DataError: what it declares about the data is invalid.
        DeployError: its policy cannot be used, limits epsilon without a budget, or names submitters without a roster.
    """
    policy = Policy.read(Path(node.policy)) if node.policy else None
    if policy and policy.limits_epsilon and not node.budget:
        raise DeployError(f"policy {node.policy}: epsilon-per-run and epsilon-per-month require epsilon and delta")
    if policy and policy.submitters is not None and node.roster is None:
        raise DeployError(f"policy {node.policy}: submitters require roster, a file that holds their keys")
    return Client(
        node.client_id,
        node.state_dir or "",
        node.budget,
        diagnostics=node.diagnostics,
        guarantee=node.declared_guarantee,
        data=node.data,
        pretrained=node.pretrained,
        declared=Declared.of(*node.declaration),
        budget_file=node.budget_file,
        policy=policy,
        server=node.server or "",
        personalize=node.personalize,
        local_report=node.local_report,
        min_cohort=MIN_COHORT if node.min_cohort is None else node.min_cohort,
        min_corrupt=node.min_corrupt or 0,
    )


def _validated(message_type: str, content: RecordDict, client: Client, node: NodeConfig) -> Cohort:
    """Parse a request, and validate it against bounds and the node configuration.

    This does not read the client's data: neither text nor time of a rejection depends on them.

    Raises:
        ClientError: a field is out of bounds, the request is for other data, or it names code that is not allowed.
    """
    from coterie.client.cohort import Cohort

    who = f"client {client.client_id} rejects the request"
    try:
        # LOSSES: a diverged model of another client gets the largest loss
        cohort = Cohort.of(message_type, content, [client], finite=message_type != LOSSES)
    except RequestError as error:
        raise ClientError(f"{who}: {error}") from None
    config = cohort.config
    _check_policy(client, _refused(client, cohort))
    _check_guarantee(client, message_type, priced=bool(cohort.plans))
    if config.data.dataset == OWN_DATA and client.data is None:
        raise ClientError(
            f"{who}: the run uses the clients' own data, but no data are configured; set data in the node "
            "configuration",
            "no-data",
        )
    _check_code(who, config, node)
    _check_pretrained(who, client.pretrained, config.pretrained_sha256)
    if client.data is not None and client.declared is None and config.data.table_schema:
        raise ClientError(
            f"{who}: the run reads tables by a schema, but the node configuration declares none; set schema (coterie "
            "client --schema)"
        )
    if client.data is not None and client.declared is not None:
        declared, data = client.declared, config.data
        try:
            asked = data.facts()
            asked.task.weighted(config.training.class_weights)
        except (DataError, TaskError) as error:
            raise ClientError(f"{who}: {error}") from None
        other_columns = declared.columns != () and asked.columns != declared.columns
        if other_columns or (asked.shape, asked.task, asked.fingerprint) != (
            declared.shape,
            declared.task,
            declared.fingerprint,
        ):
            raise ClientError(f"{who}: it is for {asked}, but the node configuration declares {declared}")
    return cohort


def _check_guarantee(client: Client, message_type: str, *, priced: bool) -> None:
    if (error := client.refusal(message_type, priced=priced)) is not None:
        log(WARNING, "run %s: %s", client.run, error)
        raise error


def _check_policy(client: Client, refused: str) -> None:
    if refused:
        who = f"client {client.client_id} rejects the request"
        log(WARNING, "%s of run %s: its policy: %s", who, client.run, refused)
        raise ClientError(f"{who}: the policy of its owner does not allow it: {refused}", "policy")


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


def _refused(client: Client, cohort: Cohort) -> str:
    """Return why the policy of a client's owner refuses a request; empty if it allows it."""
    policy, strategy, releases = client.policy, cohort.config.strategy, [_RELEASES[cohort.request.message_type]]
    if policy is None:
        return ""
    if isinstance(cohort.request, EvaluateRequest) and cohort.plans:
        releases = ["histograms"]
    if isinstance(cohort.request, LabelRequest) and not cohort.request.release_counts:
        releases = []
    refused = policy.refuses(strategy, releases)
    if refused or policy.submitters is None:
        return refused
    plan = cohort.plan(client.client_id) if cohort.plans else None
    request = cohort.request
    masked = isinstance(request, MaskedRequest)
    if isinstance(request, EvaluateRequest) and not masked and request.histogram and client.allows("histograms"):
        releases = [*releases, "histograms"]
    number = cohort.request.round
    return client.consent.refuses(
        policy.submitters, app=client.app, strategy=strategy, round=number, releases=releases, plan=plan
    )


def _masked_reply(message_type: str, content: RecordDict, client: Client, node: NodeConfig) -> RecordDict:
    from coterie.client.masked_rounds import answer, read_plan, read_round_request

    _check_guarantee(client, message_type, priced=False)
    if MASKED_STEPS[message_type] == 1:
        from coterie.client.own_model import keep_for_owner

        cohort = _validated(message_type, content, client, node)
        reply = answer(message_type, content, client, cohort)
        keep_for_owner(cohort, client)
        return reply
    try:
        request = read_round_request(message_type, content)
    except RequestError as error:
        raise ClientError(f"client {client.client_id} rejects the request: {error}") from None
    if isinstance(request, OpenRequest) and client.policy is not None:
        release = _RELEASES[MASKED if request.release == TRAINING else MASKED_SCORES]
        strategy = content.config_records[CONFIG].get("strategy")
        named = strategy if isinstance(strategy, str) else None
        refused = client.policy.refuses(named, [release])
        if not refused and client.policy.submitters is not None:
            plan = read_plan(request.plan)
            refused = client.consent.refuses(
                client.policy.submitters,
                app=client.app,
                strategy=named,
                round=request.round,
                releases=[release],
                plan=plan,
            )
        _check_policy(client, refused)
    return answer(message_type, content, client)


def _reply_to(message_type: str, content: RecordDict, client: Client, node: NodeConfig) -> ReplyOrError:
    """Return the reply: the cached one if the request was charged before, otherwise a new one."""
    if message_type in MASKED_STEPS:
        return _masked_reply(message_type, content, client, node)
    from coterie.client.budget import require_head
    from coterie.client.handlers import HANDLERS  # imports PyTorch
    from coterie.client.own_model import keep_for_owner
    from coterie.client.reply_cache import ReplyCache

    cohort, handler = _validated(message_type, content, client, node), HANDLERS[message_type]
    if not (client.folder and message_type in (*CHARGED_REQUESTS, EVALUATE) and cohort.plans):
        reply = cohort.replies(handler)[0]
        if isinstance(reply, RecordDict):
            keep_for_owner(cohort, client)
        return reply
    folder = Path(client.folder)
    require_head(client, folder, content.config_records[CONFIG].get(HEAD))
    cache = ReplyCache(folder, client.client_id)
    with cache.lock():
        if (cached := cache.get(message_type, content)) is not None:
            log(INFO, "client %s replays the cached reply to a repeated request", client.client_id)
            return cached
        with cache.attempt(message_type, content) as (head, again):
            client = replace(client, head=head, again=again)
            reply = replace(cohort, clients=[client]).replies(handler)[0]
            if isinstance(reply, RecordDict):
                reply.config_records[REPLY][HEAD] = head
                cache.put(message_type, content, reply)
        if isinstance(reply, RecordDict):
            keep_for_owner(cohort, client)
        return reply


app = ClientApp()
_KINDS = {"train": app.train, "query": app.query, "evaluate": app.evaluate}
for _message_type in ANSWERS:
    _kind, _, _action = _message_type.partition(".")
    (_KINDS[_kind](_action) if _action else _KINDS[_kind]())(_handle)
