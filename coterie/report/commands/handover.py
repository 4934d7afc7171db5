"""``coterie handover``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, print_json


def handover(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder to write; default: RUN-handover.")] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="operator.key of coterie certs, which signs the run.")
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="operator.pub, if the run is signed already.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write what a privacy officer needs of a run: one page, certificate, signature, and a verifier."""
    from coterie.report.handover.pack import HandoverError, write_pack
    from coterie.site.operator_keys import read_operator_key, read_operator_public

    if key is not None and public_key is not None:
        raise HandoverError("--key and --public-key cannot be combined: the public key is that of --key")
    target = out or run.resolve().with_name(f"{run.resolve().name}-handover")
    pack = write_pack(
        run,
        target,
        None if key is None else read_operator_key(key),
        None if public_key is None else read_operator_public(public_key),
    )
    if as_json:
        print_json(
            {
                "folder": str(pack.folder),
                "files": list(pack.files),
                "key-sha256": pack.fingerprint or None,
                "remarks": list(pack.remarks),
            }
        )
        return
    console = console_for(as_json)
    lines = [f"{pack.folder}: {', '.join(pack.files)}"]
    lines += [f"signed by the key with SHA-256 {pack.fingerprint}"] if pack.fingerprint else []
    for line in (*lines, *pack.remarks):
        console.print(line, markup=False, soft_wrap=True)
