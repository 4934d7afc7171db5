"""A client's privacy budget, charged on the client's disk before it replies.

The server proposes the terms (a :class:`~coterie.privacy.RecordPlan`) and is not trusted: the client accounts for its
gradients, choices and losses over all runs, and rejects requests that would exceed its budget. The operator of a
deployed client sets the budget (``epsilon`` and ``delta`` of its node configuration); a simulated client has the
plan's.

The budget belongs to the data, not to a client id or a server: a deployed client with its own budget and data charges
one file per data folder, so that the same data in two federations share one budget.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from coterie.client.identity import Client
from coterie.client.state import ClientError
from coterie.files import FileError, private_folder
from coterie.logs import printable
from coterie.privacy import (
    BudgetError,
    ClientLedger,
    Event,
    Guarantee,
    LedgerError,
    PricedRequest,
    Pricing,
    PrivacyError,
    RecordPlan,
    epsilon,
)
from coterie.privacy.anchors import Anchors
from coterie.privacy.budget_files import epsilon_spent, spending
from coterie.privacy.charge_times import elapsed_of
from coterie.privacy.filtered_ledgers import RECONCILED
from coterie.privacy.ledger_lines import held_out_epsilon, read_ledger
from coterie.privacy.sums import REQUEST, RUN, Sums
from coterie.site.policy import DAYS_OF_MONTH
from coterie.wire.messages import HEAD

#: Name of the file beside the data.
BUDGET_FILE = ".coterie-budget.jsonl"

# Of a policy's limit, in seconds of elapsed time.
_MONTH = DAYS_OF_MONTH * 86400
# Part of a budget that leaves nothing for a run when it is spent.
_ALL = 0.999
# Bytes at the end of a ledger in which a head is looked for first.
_TAIL = 1 << 16
_SET_FILE = "set budget-file in the node configuration (coterie client --budget-file)"


def charge(
    client: Client,
    folder: Path | None,
    plan: RecordPlan,
    round: int,
    request: PricedRequest,
    strategy: str | None = None,
) -> int:
    """Charge the reply to a request, priced by the client's own plan; see :func:`spend`.

    The charge of a deployed client states who asked: the run, the app, the server as the client's owner has configured
    it, and the strategy that the server names.

    Raises:
        PrivacyError: the plan pays for no such reply.
    """
    if client.again and folder and (made := number_of_charge(client, folder, plan, {HEAD: client.head})) is not None:
        log(INFO, "client %s: the charge before a crash counts for this reply", client.client_id)
        return made
    pricing: Pricing = plan
    origin = who_asked(client, strategy)
    if client.head:
        origin["client_id"] = client.client_id
    spec = request.release_spec
    held_out = plan.held_out_epsilon if spec is not None and spec.histogram else 0.0
    return spend(client, folder, plan, round, pricing.charges(request), held_out=held_out, **origin)


def who_asked(client: Client, strategy: str | None) -> dict[str, Any]:
    """Return what the charge of a deployed client states of who asked."""
    asked = {"run": client.run, "app": client.app, "server": client.server, "strategy": strategy}
    asked |= {"submitter": client.consent.submitter, "request": _request_id(client), HEAD: client.head}
    return {name: value for name, value in asked.items() if value and client.deployed}


def events_of_run(client: Client, folder: Path, run: str) -> Counter[Event]:
    """Return the events that a client has charged in a run.

    Raises:
        ClientError: its ledger cannot be read.
    """
    try:
        path = _own_ledger(client, folder) if client.budget is None else ledger_path(client, folder)
        if not path.exists() or not path.stat().st_size:
            return Counter()
        return Sums(folder / f"client-{client.client_id}.sums.json", path).of(RUN, run)
    except (LedgerError, OSError) as error:
        log(WARNING, "client %s rejects the request: %s", client.client_id, error)
        raise ClientError(f"client {client.client_id} cannot charge its budget; see its own log for details") from None


def number_of_charge(client: Client, folder: Path, plan: Guarantee, entry: Mapping[str, str]) -> int | None:
    """Return the number of the charge with an entry in the ledger of a client, or None; the charge is then on disk.

    Args:
        client: whose ledger it is.
        folder: its state folder.
        plan: terms of this run.
        entry: what the charge states; unique to one reply.

    Raises:
        ClientError: the ledger cannot be used.
    """
    try:
        path = _own_ledger(client, folder) if client.budget is None else ledger_path(client, folder)
        if not path.exists() or (charge := _charge_with(path, entry)) is None:
            return None
        with closing(_open(client, folder, plan)) as ledger:
            ledger.sync()
        return int(charge["charge"])
    except (LedgerError, FileError, OSError) as error:
        log(WARNING, "client %s rejects the request: %s", client.client_id, error)
        raise ClientError(f"client {client.client_id} cannot charge its budget; see its own log for details") from None


def spend(
    client: Client,
    folder: Path | None,
    plan: Guarantee | None,
    round: int,
    events: Counter[Event],
    *,
    held_out: float = 0.0,
    planned: Mapping[Event, int] | None = None,
    **details: object,
) -> int:
    """Charge the events of a round to one client. Call it before data are read or noise is drawn.

    Args:
        client: the client to charge.
        folder: its state folder; None: there is no place for a ledger.
        plan: terms of this run; not needed for a client with its own budget.
        round: number of the round.
        events: what the round releases of training records.
        held_out: epsilon, at delta 0, of what it releases of held-out records instead.
        planned: all events of the client in the run; None: those of the plan.
        details: further entries of the charges; JSON-ready.

    Returns:
        the number of the charge, unique to this attempt, so that a repeated round draws fresh noise.

    Raises:
        ClientError: there is no folder, the ledger cannot be used, or the budget does not allow the round. The message
            of a deployed client does not depend on what was spent elsewhere.
    """
    if folder is None:
        raise ClientError(
            "the client's ledger requires a state folder; set state-dir in the node configuration (coterie run and "
            "flwr simulations use the run folder)"
        )
    try:
        with closing(_open(client, folder, plan)) as ledger:
            if held_out:
                _check_held_out_policy(client, ledger, held_out)
                return ledger.spend_held_out(round, held_out, **details)
            if len({event.sampler for event in (*ledger.events, *events)}) > 1:
                raise PrivacyError(
                    f"{ledger.path} has charges of another kind: those of records, and those of whole clients (masked "
                    "updates), do not add up; name another budget-file, with a budget of its own"
                )
            _check_policy(client, folder, ledger, events)
            if planned is None and plan is not None:
                planned = plan.planned()
            return ledger.spend(round, events, planned=planned, **details)
    except (PrivacyError, LedgerError, FileError, OSError) as error:  # events that do not compose, too
        if not client.deployed:
            raise ClientError(f"client {client.client_id} rejects the request: {error}") from error
        log(WARNING, "client %s rejects the request of round %s: %s", client.client_id, round, error)
        if isinstance(error, BudgetError):
            raise ClientError(
                f"client {client.client_id} rejects the request: it exceeds the client's budget", "budget"
            ) from None
        raise ClientError(f"client {client.client_id} cannot charge its budget; see its own log for details") from None


def require_head(client: Client, folder: Path, head: object) -> None:
    """Check that the ledger holds the charge whose head the server sends back, if it sends one.

    Only charges of this client for servers of the same authority count, so that no server learns of those for others.

    Raises:
        ClientError: it does not: charges were lost, with the anchors of the state folder.
    """
    if head is None:
        return
    try:
        path = _own_ledger(client, folder) if client.budget is None else ledger_path(client, folder)
        charge = _charge_with(path, {HEAD: head}) if isinstance(head, str) and path.exists() else None
    except (LedgerError, OSError):
        return  # the charge fails, too
    charge = charge or {}
    authorities = {_authority(charge.get("server", "")), _authority(client.server)}
    made = charge.get("client_id") == client.client_id and len(authorities) == 1
    counts = charge.get(HEAD) == head and (made or charge.get("for") == RECONCILED)
    if not counts:
        log(
            WARNING,
            "client %s rejects the request: %s lacks a charge that this client made in this run (head %s): it was "
            "restored from an older copy together with the state folder. Restore the newest copies of both, or charge "
            "what the run has charged, by the run's ledger from its operator: coterie budget reconcile %s --run "
            "ledger.jsonl --client %s --head %s",
            *(client.client_id, path, printable(head), path, client.client_id, printable(head)),
        )
        raise ClientError(
            f"client {client.client_id} rejects the request: its ledger lacks a charge; see its own log for details",
            "budget",
        )


def _charge_with(path: Path, entry: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the last charge with an entry, from a complete line; the end of the file, where it mostly is, is first."""
    wanted = json.dumps(entry)[1:-1].encode()
    with open(path, "rb") as file:
        for start in (max(0, path.stat().st_size - _TAIL), 0):
            file.seek(start)
            content = file.read()
            if (place := content.rfind(wanted)) >= 0 and (start == 0 or b"\n" in content[:place]):
                begin = content.rfind(b"\n", 0, place) + 1
                line, newline, _ = content[begin:].partition(b"\n")
                charge: dict[str, Any] = json.loads(line) if newline else {}
                return charge or None
    return None


def _authority(server: object) -> str:
    """Return the authority in what a client's records call its server, whose address may change during a run."""
    return str(server).rpartition(" ")[2]


def _open(client: Client, folder: Path, plan: Guarantee | None) -> ClientLedger:
    private_folder(folder)
    own = _own_ledger(client, folder)
    if client.budget is None:
        assert plan is not None
        return ClientLedger(plan.delta, plan.epsilon, own, plan.accountant)
    epsilon, delta = client.budget
    path = ledger_path(client, folder)
    private_folder(path.parent)
    if own.exists() and not (path.exists() and path.samefile(own)):
        raise LedgerError(
            f"{own} contains charges of this client from before its data had a budget file of their own, {path}: "
            f"{_SET_FILE} to it"
        )
    return ClientLedger(delta, epsilon, path, anchors=anchors_path(client, folder))


def _check_policy(client: Client, folder: Path, ledger: ClientLedger, events: Counter[Event]) -> None:
    """Check that further events are within the limits of the client's policy, whatever the budget allows.

    These are epsilon of the run and of the month, and of the signed request for the run where the policy names
    submitters: of all its charges, in whatever runs it was used.

    Raises:
        ClientError: they are not.
    """
    if not (limits := _limits(client)):
        return
    assert ledger.path is not None
    sums = Sums(folder / f"client-{client.client_id}.sums.json", ledger.path)
    for name, limit, delta in limits:
        made = sums.since(ledger.elapsed - _MONTH) if name == "month" else sums.of(name, _of(client, name))
        if not epsilon(made + events, delta) <= limit:
            raise _beyond_policy(client, name, limit)


def _check_held_out_policy(client: Client, ledger: ClientLedger, further: float) -> None:
    """Check the same of what is released of held-out records, which adds up apart from training.

    Raises:
        ClientError: it is not within the limits.
    """
    assert ledger.path is not None
    since = ledger.elapsed - _MONTH
    for name, limit, _ in _limits(client):
        made = (
            charge
            for charge in read_ledger(ledger.path)[1]
            if (elapsed_of(charge) >= since if name == "month" else charge.get(name) == _of(client, name))
        )
        if not held_out_epsilon(made) + further <= limit:
            raise _beyond_policy(client, name, limit)


def _of(client: Client, name: str) -> str:
    """Return the run, or the signed request, that asks."""
    return client.run if name == RUN else _request_id(client)


def _beyond_policy(client: Client, name: str, limit: float) -> ClientError:
    who = client.client_id
    log(WARNING, "client %s: the request exceeds epsilon = %g per %s of its policy", who, limit, name)
    return ClientError(
        f"client {who} rejects the request: it exceeds the epsilon per {name} of its owner's policy", "policy"
    )


def _limits(client: Client) -> list[tuple[str, float, float]]:
    """Return the limits of a client's policy: of what, epsilon, and delta."""
    policy, request = client.policy, client.consent.request
    if policy is None:
        return []
    limits = [] if policy.submitters is None or request is None else [(REQUEST, request.epsilon, request.delta)]
    if client.budget is not None:
        delta = client.budget[1]
        limits += [(RUN, policy.epsilon_per_run, delta), ("month", policy.epsilon_per_month, delta)]
    return [(name, limit, delta) for name, limit, delta in limits if limit is not None and delta is not None]


def _request_id(client: Client) -> str:
    return client.consent.request.id if client.consent.request else ""


def describe_budget(client: Client, *, required: bool = False) -> str:
    """Return what a client with its own budget has spent, and in which file, for its owner.

    Args:
        client: whose budget it is.
        required: whether some of it must be left; a client that has spent all still repeats its last replies.

    Raises:
        LedgerError, FileError: the file cannot be used, or lacks charges of this client, or all is spent.
    """
    folder = Path(client.folder or "")
    path = ledger_path(client, folder)
    if not path.exists() and Anchors(anchors_path(client, folder)).last() is None:
        return f"nothing of epsilon {client.budget[0]:g} spent, {path}" if client.budget else str(path)
    _open(client, folder, None).close()
    spent = spending(path)
    if required and spent.epsilon >= _ALL * spent.epsilon_budget:
        raise LedgerError(f"nothing is left: {spent}; no run on these data is answered any more")
    return str(spent)


def epsilon_so_far(client: Client, folder: Path) -> float | None:
    """Return what a client with its own budget has spent of it, in time that does not grow with the ledger.

    Returns:
        epsilon; None if the client has no budget or no charges, or its ledger is in use or cannot be read.
    """
    if client.budget is None:
        return None
    try:
        with closing(_open(client, folder, None)) as ledger:
            if not (events := ledger.events):
                return None
            return epsilon_spent(events, ledger.budget, ledger.delta, ledger.pinned_entry)
    except (LedgerError, FileError, OSError):
        return None


def ledger_path(client: Client, folder: Path) -> Path:
    """Return the file that a client with its own budget charges: the budget file of its data, or its ledger.

    Raises:
        LedgerError: see :func:`budget_path`.
    """
    return budget_path(client, folder) or _own_ledger(client, folder)


def _own_ledger(client: Client, folder: Path) -> Path:
    return folder / f"client-{client.client_id}.ledger.jsonl"


def anchors_path(client: Client, folder: Path) -> Path:
    """Return the file of a client's anchors (:mod:`coterie.privacy.anchors`), in its state folder."""
    return folder / f"client-{client.client_id}.anchors.jsonl"


def budget_path(client: Client, folder: Path) -> Path | None:
    """Return the budget file of a client, or None without own data: the ledger is then in the state folder.

    The file is ``budget_file`` if given; otherwise a file beside the data.

    Raises:
        LedgerError: the folder of the data is not writable. A file must be named then: another federation with the same
            data would not find one in a state folder.
    """
    if client.budget_file:
        return Path(client.budget_file)
    if client.data is None:
        return None
    data = Path(os.path.realpath(client.data))
    home = data if data.is_dir() else data.parent
    beside = home / BUDGET_FILE
    if former := sorted(folder.glob("budget-*.jsonl")):  # of version 0.2, for data in a folder that is not writable
        raise LedgerError(f"{former[0]} contains charges for these data: {_SET_FILE} to this file")
    if not os.access(beside if beside.exists() else home, os.W_OK):
        raise LedgerError(
            f"{home} is not writable, so the budget file of these data cannot be there: {_SET_FILE} to one file for "
            "all federations with these data"
        )
    return beside
