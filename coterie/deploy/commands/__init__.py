"""Commands for deployments, and for guards of other apps."""

from __future__ import annotations

import typer

from coterie.deploy.commands import backup, privacy  # noqa: F401 (adds a command to `coterie privacy`)
from coterie.deploy.commands.certs import certs
from coterie.deploy.commands.client import client, fab_hash
from coterie.deploy.commands.poc import poc
from coterie.deploy.commands.purge import purge
from coterie.deploy.commands.server import server
from coterie.deploy.commands.sign import sign
from coterie.deploy.commands.status import status
from coterie.deploy.commands.superlink import superexec, superlink

app = typer.Typer()
for command in (certs, client, fab_hash, poc, purge, server, sign, status):
    app.command()(command)
for program in (superlink, superexec):
    app.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)(program)
app.add_typer(backup.app, name="backup")
