"""A client's own account of what it reveals: on its own disk before it replies, and never above its budget.

The server proposes the terms (a :class:`~coterie.privacy.RecordPlan`) and is not believed: the client counts for
itself what its gradients and its choices of a cluster cost, in every run that it takes part in, and refuses what
would exceed its budget. A deployed client sets that itself (``epsilon`` and ``delta`` of its node configuration); a
simulated one has the plan's.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from coterie.client.memory import ClientError
from coterie.privacy import BudgetError, ClientLedger, Event, LedgerError, RecordPlan


def spend(
    folder: Path | None,
    client_id: int,
    plan: RecordPlan,
    budget: tuple[float, float] | None,
    round: int,
    events: Counter[Event],
) -> int:
    """Charge one round to one client, before anything of it is drawn.

    Args:
        folder: where the client's ledger is; None: it cannot keep one, and refuses.
        client_id: our own id for it.
        plan: its terms in this run.
        budget: epsilon and delta that it may spend at most; None: the plan's.
        round: number of the round.
        events: what the round will reveal.

    Returns:
        the number of the charge: no other attempt has it, so that a repeated round draws afresh.

    Raises:
        ClientError: no folder, a ledger that cannot be used, or a budget that does not allow the round.
    """
    if folder is None:
        raise ClientError(
            "a client counts what it reveals on its own disk; give it a folder for that: state-dir in its node "
            "configuration (coterie run and flwr simulations use the run folder)"
        )
    epsilon, delta = budget or (plan.epsilon, plan.delta)
    accountant = "pld" if budget else plan.accountant
    folder.mkdir(parents=True, exist_ok=True)
    try:
        ledger = ClientLedger(delta, epsilon, folder / f"client-{client_id}.ledger.jsonl", accountant)
        try:
            return ledger.spend(round, events)
        finally:
            ledger.close()
    except (BudgetError, LedgerError) as error:
        raise ClientError(f"client {client_id} refuses: {error}") from error
