"""``coterie sign``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import JsonFlag, console_for, print_json
from coterie.cli.run import settings_of


def sign(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="TOML file with the settings of the run.")],
    key: Annotated[Path, typer.Option(help="Your private key, submitters/NAME.key of coterie certs.")],
    app: Annotated[Path, typer.Option(help="Folder of the app that flwr run submits, or a .fab file.")] = Path(),
    days: Annotated[int, typer.Option(min=1, max=366, help="Validity in days.")] = 7,
    out: Annotated[Path | None, typer.Option(help="File to write; default: RUN.signed.toml beside RUN.toml.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Sign a request for a run: write its settings with your signature, for flwr run --run-config."""
    from coterie.deploy.app_bundle import bundle
    from coterie.fields.settings import ConfigError
    from coterie.files import write_atomic
    from coterie.server.config import RunConfig
    from coterie.server.run_requests import terms_of
    from coterie.site.run_request import RunRequest
    from coterie.site.signatures import read_private_key

    private = read_private_key(key)
    config = RunConfig(settings_of(run, [], {}), deployed=True)
    if config.run.signed_request:
        raise ConfigError(f"{run} is signed already: sign the settings without signed-request")
    terms = {**terms_of(config), "app": bundle(app).hash}
    text = RunRequest.signed(private, terms, days=days)
    target = out or run.with_suffix(".signed.toml")
    try:
        settings = run.read_text("utf-8-sig")
        write_atomic(target, f'signed-request = "{text}"\n{settings}'.encode())
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from None
    request = RunRequest.read(text)
    if as_json:
        print_json({"file": str(target), **request.to_record()})
        return
    privacy = f"epsilon {request.epsilon:g}, delta {request.delta:g}" if request.epsilon else "no privacy"
    for line in (
        f"{target}: {request.strategy}, {request.rounds} rounds, {request.privacy_unit}: {privacy}",
        f"releases {', '.join(request.releases)}; app {request.app}",
        f"valid until {request.expires}",
    ):
        console_for(False).print(line, markup=False, soft_wrap=True)
