"""Who has started the run that asks a client: the signed request that the server sends, checked by a roster."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.common.logger import log

from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig

if TYPE_CHECKING:
    from coterie.privacy import Guarantee
    from coterie.site.run_request import RunRequest


@dataclass(frozen=True)
class Consent:
    """A signed request for a run, or why there is none.

    Attributes:
        submitter: name of who has signed it, in the roster; empty without a valid request.
        request: the request; None without a valid one.
        problem: why there is none, for the server.
    """

    submitter: str = ""
    request: RunRequest | None = None
    problem: str = "the run has no signed request (coterie sign)"

    @classmethod
    def of(cls, node: NodeConfig, text: object) -> Consent:
        """Verify the text that a server sends by the roster of a node configuration; without a roster, nothing is."""
        if not isinstance(text, str) or not text or node.roster is None:
            return cls()
        from coterie.site.roster import SEEN_FILE, authority_beside, read_newest
        from coterie.site.run_request import RunRequest

        try:
            seen = None if node.state_dir is None else Path(node.state_dir) / SEEN_FILE
            roster = read_newest(Path(node.roster), authority_beside(Path(node.roster), node.authority), seen)
        except DeployError as error:
            log(WARNING, "client %s cannot use its roster: %s", node.client_id, error)
            return cls(problem="the client cannot use its roster; see its own log")
        try:
            request = RunRequest.read(text)
            return cls(request.submitter(roster).name, request, "")
        except DeployError as error:
            return cls(problem=f"the run's signed request: {error}")

    def refuses(
        self,
        allowed: Collection[str],
        *,
        app: str,
        strategy: str | None,
        round: int,
        releases: Collection[str],
        plan: Guarantee | None,
    ) -> str:
        """Return why a request of a server is refused; empty if a submitter among ``allowed`` has signed its terms.

        Args:
            allowed: names of submitters.
            app: SHA-256 of the app that runs; empty if it is not known.
            strategy: the method, as the server names it.
            round: number of the round.
            releases: what the reply would hold.
            plan: the client's record-level plan, or that of masked rounds; None without one.
        """
        if self.request is None:
            return self.problem
        if self.submitter not in allowed:
            return f"submitter {self.submitter} is not allowed"
        exceeded = self.request.refuses(
            app=app,
            strategy=strategy,
            rounds=round if plan is None else max(round, plan.rounds),
            releases=releases,
            privacy=None if plan is None else (plan.unit, plan.epsilon, plan.delta),
        )
        return f"the run's signed request: {exceeded}" if exceeded else ""


#: The consent to a run without a signed request.
NO_REQUEST = Consent()
