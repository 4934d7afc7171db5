"""The Flower ClientApp: who is asked, by the node configuration, and the reply of :mod:`coterie.client.answer`."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from logging import ERROR, WARNING
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from coterie import logs
from coterie.client.audited import audited
from coterie.client.consent import Consent
from coterie.client.identity import Client, identity_reply
from coterie.client.masking_keys import keys_or_none
from coterie.client.state import ClientError
from coterie.datasets import DataError, Declared
from coterie.logs import printable
from coterie.site.errors import DeployError
from coterie.site.node import APP_HASH, MIN_COHORT, NodeConfig
from coterie.site.policy import Policy
from coterie.wire.guarantees import ANSWERS
from coterie.wire.messages import CONFIG, IDENTITY, MASKED_STEPS, OPEN, RUN_REQUEST


def _handle(message: Message, context: Context) -> Message:
    if "client-id" in context.node_config:
        return Message(_deployed_reply(message, context), reply_to=message)
    from coterie.client.answer import handle  # imports PyTorch

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

        def answer() -> RecordDict | ClientError:
            from coterie.client.answer import answer  # imports PyTorch

            return answer(message_type, content, client, node)

        reply = audited(client, message_type, config, answer)
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


app = ClientApp()
_KINDS = {"train": app.train, "query": app.query, "evaluate": app.evaluate}
for _message_type in ANSWERS:
    _kind, _, _action = _message_type.partition(".")
    (_KINDS[_kind](_action) if _action else _KINDS[_kind]())(_handle)
