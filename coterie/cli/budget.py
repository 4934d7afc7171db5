"""``coterie budget``: create and show budgets; copy, restore and reconcile the budget file of a client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, answer, console_for, group

app = group("Create, show and care for privacy budgets: of a client's data, or of runs on the same clients.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="Budget file or ledger of a client or of runs.")]


@app.command("create")
def budget_create(
    file: File,
    epsilon: Annotated[float, typer.Option(help="Epsilon of the budget.")],
    delta: Annotated[float, typer.Option(help="Delta of the budget.")],
    clients: Annotated[int, typer.Option(min=1, help="M, number of clients of all runs.")],
    sampler: Annotated[str, typer.Option(help="Sampler: poisson (joint) or fixed (rr-slot).")] = "poisson",
) -> None:
    """Create a budget that runs on the same clients share, for coterie run --budget-file."""
    from coterie.privacy import Event, PrivacyError, SharedBudget
    from coterie.privacy.accounting import check_delta

    if file.exists():
        raise PrivacyError(f"{file} already exists, and budgets cannot be changed: choose another file")
    check_delta(delta)
    if not epsilon > 0:
        raise PrivacyError(f"--epsilon must be positive, not {epsilon}")
    Event(1.0, epsilon, sampler)  # checks that epsilon is finite and the sampler known
    SharedBudget(file, clients=clients, sampler=sampler, epsilon=epsilon, delta=delta).close()


@app.command("show")
def budget_show(file: File, as_json: JsonFlag = False) -> None:
    """Show how much of a budget is spent, after the whole file is verified."""
    from coterie.privacy.budget_files import spending

    answer(vars(spending(file)), as_json)


@app.command("backup")
def budget_backup(file: File, copy: Annotated[Path, typer.Argument(metavar="COPY", help="File to write.")]) -> None:
    """Copy a budget file; an older copy of it is replaced."""
    from coterie.privacy.budget_files import backup

    charges = backup(file, copy)
    console_for(False).print(f"{copy}: {charges} charges", markup=False, soft_wrap=True)


@app.command("restore")
def budget_restore(copy: Annotated[Path, typer.Argument(metavar="COPY", help="File to read.")], file: File) -> None:
    """Restore a budget file from a copy, unless the copy lacks charges of the file."""
    from coterie.privacy.budget_files import restore

    charges = restore(copy, file)
    console_for(False).print(f"{file}: {charges} charges", markup=False, soft_wrap=True)


@app.command("reconcile")
def budget_reconcile(
    file: File,
    anchors: Annotated[
        Path | None, typer.Option(help="client-ID.anchors.jsonl in the client's state folder: what it states.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="ledger.jsonl of a run: all that it has charged.")] = None,
    client: Annotated[int | None, typer.Option(min=0, help="This client's id in the run.")] = None,
    head: Annotated[
        str | None, typer.Option(help="Head of the lost charge, as in the client's log: it then goes on in the run.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Charge what a client has spent and its budget file has lost."""
    from coterie.privacy import LedgerError
    from coterie.privacy.budget_files import reconcile, reconcile_run

    if anchors is not None and run is None and client is None and head is None:
        answer(vars(reconcile(file, anchors)), as_json)
    elif anchors is None and run is not None and client is not None:
        answer(vars(reconcile_run(file, run, client, head)), as_json)
    else:
        raise LedgerError("give --anchors, or --run and --client")
