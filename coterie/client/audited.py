"""A client's audit log: each request of a server, the decision, and what is spent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

from flwr.app import RecordDict
from flwr.common.logger import log

from coterie.client.identity import Client
from coterie.client.state import ClientError
from coterie.logs import printable
from coterie.wire.messages import CHARGED_REQUESTS, MASKED, MASKED_SCORES

# What the entry of an answered message says beside its type.
_RELEASED = {MASKED: {"released": "masked updates"}, MASKED_SCORES: {"released": "masked scores"}}


def audited(
    client: Client, message_type: str, config: Mapping[str, Any], answer: Callable[[], RecordDict | ClientError]
) -> RecordDict:
    """Return the reply to a request, recorded before it leaves, unless the client has no state folder of its own.

    An exception is a decision, too, and stays the reply if it cannot be recorded.

    Args:
        client: whose request it is.
        message_type: of the request.
        config: what the server sent; its values are recorded in printable form.
        answer: computes the reply.

    Raises:
        ClientError: the reply is one, or it cannot be recorded.
    """
    number, strategy = config.get("round"), config.get("strategy")
    asked = {
        "run": client.run,
        "app": client.app or None,
        "server": client.server or None,
        "submitter": client.consent.submitter or None,
        "strategy": printable(strategy) if isinstance(strategy, str) else None,
        "type": message_type,
        "round": number if type(number) is int else None,
    }
    try:
        reply = answer()
        if isinstance(reply, ClientError):
            raise reply
        decision = _answered(client, message_type, asked)
    except Exception as error:
        kind = error.kind if isinstance(error, ClientError) else "failed"
        _record(client, asked | {"decision": "refused", "kind": kind, "reason": printable(error)})
        raise
    if not _record(client, asked | decision):
        raise ClientError(f"client {client.client_id} cannot record the request; see its own log for details")
    return reply


def _answered(client: Client, message_type: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    if not client.folder or client.budget is None or message_type not in (*CHARGED_REQUESTS, *_RELEASED):
        return {"decision": "answered", **_RELEASED.get(message_type, {})}
    from coterie.client.budget import epsilon_so_far

    spent, budget = epsilon_so_far(client, Path(client.folder)), client.budget[0]
    if spent is not None:
        by = " of ".join(filter(None, (asked["strategy"], asked["server"])))
        who = f", started by {asked['submitter']}" if asked["submitter"] else ""
        log(INFO, "run %s%s%s: epsilon %.4g of %g spent", client.run, f" ({by})" if by else "", who, spent, budget)
    return {"decision": "answered", **_RELEASED.get(message_type, {}), "epsilon": spent, "budget": budget}


def _record(client: Client, fields: Mapping[str, Any]) -> bool:
    """Append an entry; whether that was possible, or not due."""
    if not client.folder:
        return True
    from coterie.privacy.audit_log import AuditLog
    from coterie.privacy.ledger_lines import LedgerError

    try:
        AuditLog(Path(client.folder) / f"client-{client.client_id}.audit.jsonl").append("request", **fields)
    except LedgerError as error:
        log(ERROR, "client %s: %s", client.client_id, error)
        return False
    return True
