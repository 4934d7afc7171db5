"""How clients answer a request. The order of the steps is the argument for the privacy of what leaves.

1. The request is parsed and admitted, which reads no data (:mod:`coterie.client.admission`).
2. In a state folder: a server returns the *head*, a random number that the client gave to its last charge for it. If no
   charge in the ledger has this number, charges are lost, and the client refuses. A request that was answered before
   gets the same reply, at no cost; one whose charge is on disk without a reply, after a crash, is computed once more
   without a further charge (:mod:`coterie.client.reply_cache`).
3. What can fail without a look at the data is prepared, such as the network; then each client is charged on its disk;
   only then a handler reads data (:func:`replies`). A failure after the charge costs what was charged.
4. The reply is on disk before it leaves. The owner's copy of the model is made last, and never changes the reply
   (:mod:`coterie.client.own_model`).

A masked round has four steps with a charge in the second, and keeps its replies by itself
(:mod:`coterie.client.masked_rounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from logging import INFO
from pathlib import Path

from flwr.app import RecordDict
from flwr.common.logger import log

from coterie.client import masked_rounds
from coterie.client.admission import admit
from coterie.client.budget import require_head
from coterie.client.cohort import Cohort
from coterie.client.handlers import HANDLERS, ReplyOrError, prepare
from coterie.client.identity import Client, identity_reply
from coterie.client.own_model import keep_for_owner
from coterie.client.record_level import charge_clients
from coterie.client.reply_cache import ReplyCache
from coterie.site.node import NodeConfig
from coterie.wire.masked import RoundRequest
from coterie.wire.messages import CONFIG, HEAD, IDENTITY, MASKED_STEPS, REPLY


def answer(message_type: str, content: RecordDict, client: Client, node: NodeConfig) -> ReplyOrError:
    """Return the reply of a deployed client to a request.

    Raises:
        ClientError, RequestError: the client does not answer.
    """
    request = admit(message_type, content, client, node)
    if isinstance(request, RoundRequest):
        return masked_rounds.answer(message_type, content, client, request)
    if client.folder and request.is_charged:
        return _reply_once(message_type, content, client, Path(client.folder), request)
    if message_type in MASKED_STEPS:
        reply: ReplyOrError = masked_rounds.answer(message_type, content, client, request)
    else:
        reply = replies(request)[0]
    if isinstance(reply, RecordDict):
        keep_for_owner(request, client)
    return reply


def _reply_once(message_type: str, content: RecordDict, client: Client, folder: Path, cohort: Cohort) -> ReplyOrError:
    """Return the cached reply if the request was answered before, otherwise a new one."""
    require_head(client, folder, content.config_records[CONFIG].get(HEAD))
    cache = ReplyCache(folder, client.client_id)
    with cache.lock():
        if (cached := cache.get(message_type, content)) is not None:
            log(INFO, "client %s replays the cached reply to a repeated request", client.client_id)
            return cached
        with cache.attempt(message_type, content) as (head, again):
            client = replace(client, head=head, again=again)
            reply = replies(replace(cohort, clients=[client]))[0]
            if isinstance(reply, RecordDict):
                reply.config_records[REPLY][HEAD] = head
                cache.put(message_type, content, reply)
                keep_for_owner(cohort, client)
        return reply


def replies(cohort: Cohort) -> list[ReplyOrError]:
    """Return the replies of a cohort's clients. What record-level plans pay for is prepared, charged, then computed.

    Raises:
        RequestError: the request does not fit the network or the data.
    """
    return cohort.replies(_charged_replies if cohort.is_charged else HANDLERS[cohort.request.message_type])


def _charged_replies(cohort: Cohort) -> list[ReplyOrError]:
    """Return the replies of clients that can be charged, and the refusals of the others."""
    prepare(cohort)
    return cohort.replies(HANDLERS[cohort.request.message_type], errors=charge_clients(cohort))


def handle(message_type: str, content: RecordDict, clients: Sequence[Client]) -> Sequence[ReplyOrError]:
    """Return the replies of simulated clients to a message.

    Raises:
        RequestError: a field is missing or out of bounds.
    """
    if message_type == IDENTITY:
        return [identity_reply(client) for client in clients]
    if message_type in MASKED_STEPS:
        return masked_rounds.answers(message_type, content, clients)
    return replies(Cohort.of(message_type, content, clients))
