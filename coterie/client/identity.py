"""Who a client is, and its reply to a server that asks: a node that registers imports nothing heavier than this."""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from coterie.datasets import Declared
from coterie.messages import REPLY


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        client_id: our own id for it.
        folder: of what it keeps; empty: it has none; None: it is simulated, and takes the one that a message names.
        budget: epsilon and delta that it may spend; None: it is simulated, and has the plan's. A client with a budget
            of its own trusts no server: it reveals nothing that the budget does not pay for.
        diagnostics: whether such a client lets itself be evaluated, exactly and outside its budget.
        data: path of its own data, in place of the run's; None: it has none.
        declared: what these data are; None: the run defines it.
        budget_file: where it counts what its data have revealed; None: beside the data, or in ``folder``.
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
        """Whether this is a client on a machine of its own, which trusts no server."""
        return self.folder is not None


def introduction(client: Client) -> RecordDict:
    """The client's id, and whether it replays its reply to a repeated request."""
    return RecordDict({REPLY: ConfigRecord({"client-id": client.client_id, "repeats": bool(client.folder)})})
