"""``coterie masking-keys``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def masking_keys(
    client_id: Annotated[int, typer.Option(min=0, metavar="ID", help="This client's id.")],
    key: Annotated[Path, typer.Option(help="This client's private key, node-I.key of coterie certs.")],
    roster: Annotated[
        Path, typer.Option(help="roster.json of coterie certs, which must name this key; ca.crt lies beside it.")
    ],
    state_dir: Annotated[Path, typer.Option(help="Folder of this client's persistent state.")],
) -> None:
    """Sign a client's keys for masked rounds, so that the processes that train need no access to --key."""
    from coterie.client.masking_keys import MaskingKeys
    from coterie.deploy.edge import absolute
    from coterie.site.node import NodeConfig

    state, vouching, signing = (str(absolute(path)) for path in (state_dir, roster, key))
    MaskingKeys.of(NodeConfig(client_id=client_id, state_dir=state, roster=vouching, key=signing))
    print(f"client {client_id}: its keys for masked rounds are signed, in {state}")
