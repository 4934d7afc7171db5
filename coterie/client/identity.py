"""The identity of a client, and its introduction to the server, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from coterie.datasets import Declared
from coterie.messages import REPLY


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        client_id: id in Coterie, from 0 to M - 1.
        folder: state folder; empty: none; None: the client is simulated and uses the folder of the request.
        budget: its epsilon and delta; None: the client is simulated and uses the plan's. A client with its own budget
            trusts no server: it reveals nothing that the budget does not cover.
        diagnostics: whether such a client may be evaluated, exactly and outside its budget.
        data: path of its own data; None: it uses the run's.
        declared: shape and classes of these data; None: as the run defines them.
        budget_file: file of its charges; None: beside the data, or in ``folder``.
    """

    client_id: int
    folder: str | None = None
    budget: tuple[float, float] | None = None
    diagnostics: bool = False
    data: str | None = None
    declared: Declared | None = None
    budget_file: str | None = None

    @property
    def deployed(self) -> bool:
        """Whether the client is deployed on its own machine and trusts no server."""
        return self.folder is not None


def introduction(client: Client) -> RecordDict:
    """The client's id, and whether it replays its reply to a repeated request."""
    return RecordDict({REPLY: ConfigRecord({"client-id": client.client_id, "repeats": bool(client.folder)})})
