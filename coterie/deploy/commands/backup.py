"""``coterie backup``: copy and restore the files of a server or a client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import console_for, group

app = group("Copy and restore the files of a server or a client.")

Archive = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="Tar file; it holds keys: keep it private.")]


@app.command("create")
def backup_create(
    archive: Archive,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders, such as superlink.db.")],
) -> None:
    """Copy files and folders into an archive; a SuperLink or a client may run meanwhile."""
    from coterie.deploy.backups import back_up

    console_for(False).print(f"{archive}: {len(back_up(archive, paths))} files", markup=False, soft_wrap=True)


@app.command("restore")
def backup_restore(
    archive: Archive,
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH...]", help="Files and folders to write, as given to create.")
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="Folder below which all files are written; default: where they were.")
    ] = None,
) -> None:
    """Write the files of an archive that are missing, unless others are there with another content."""
    from coterie.deploy.backups import restore

    console = console_for(False)
    done = restore(archive, paths or (), root)
    console.print(f"{len(done.written)} files restored, {len(done.same)} are there", markup=False, soft_wrap=True)
    if any(name.endswith(".jsonl") for name in done.written):
        console.print(
            "ledgers were restored: what was charged after this copy is not in them. If a client took part in runs "
            "since, see docs/deployment.md, backup and restore, before it starts.",
            markup=False,
            soft_wrap=True,
        )
