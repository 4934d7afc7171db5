"""The identity of a client, and its registration with the server, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass, field

from flwr.app import ConfigRecord, RecordDict

from coterie.client.consent import NO_REQUEST, Consent
from coterie.client.masking_keys import MaskingKeys
from coterie.client.state import ClientError, KeptState
from coterie.datasets import Declared
from coterie.fields import TRUSTED_SERVER
from coterie.site.policy import Policy
from coterie.wire.guarantees import refusal
from coterie.wire.messages import EVALUATE, REPLY
from coterie.wire.versions import incompatible, versions


@dataclass(frozen=True)
class Client:  # large: the facts about a client, and about the request of a server
    """One client.

    Attributes:
        client_id: id in Coterie, from 0 to M - 1.
        folder: state folder; empty: none; None: a simulated client, which uses the folder of the request.
        budget: epsilon and delta of the client; None: those of the plan. A client with a budget rejects every request
            that the budget does not cover.
        diagnostics: whether the client may be evaluated exactly, outside its guarantee; a trusted server always may.
        guarantee: what it gives to a server at all (:data:`~coterie.wire.guarantees.ANSWERS`); None: nothing, if it is
            deployed. A simulated client needs none.
        data: path of the client's own data; None: those of the run.
        pretrained: path of its file of public initial parameters; None: it has none.
        declared: shape and classes of these data; None: as the run defines them.
        budget_file: file of its charges; None: beside the data, or in ``folder``.
        policy: what its owner consents to; None: everything.
        consent: the signed request for the run that asks.
        personalize: how it fits released models to its own records, on which no message depends; None: not at all.
        local_report: whether it writes a report on received models for its owner, on which no message depends.
        head: random number of the charge for the present request, at record level; empty: none.
        again: whether an attempt at this request that was killed may have made this charge.
        run: id of the run that asks, in Flower; empty in a simulation.
        app: SHA-256 of the app that runs, in hexadecimal; empty if it is not known.
        server: address and authority of the server, as the client's owner has configured them; empty if not known.
        keys: for masked rounds; None: it takes part in none.
        min_cohort: least number of clients in a masked round.
        min_corrupt: least number of clients that may work with the server for which a masked round has noise.
        state: of a simulated client whose engine keeps it; None: it is in a file of its own.
    """

    client_id: int
    folder: str | None = None
    budget: tuple[float, float] | None = None
    diagnostics: bool = False
    guarantee: str | None = None
    data: str | None = None
    pretrained: str | None = None
    declared: Declared | None = None
    budget_file: str | None = None
    policy: Policy | None = None
    consent: Consent = NO_REQUEST
    personalize: str | None = None
    local_report: bool = False
    head: str = ""
    again: bool = False
    run: str = ""
    app: str = ""
    server: str = ""
    keys: MaskingKeys | None = field(default=None, repr=False, compare=False)
    min_cohort: int = 0
    min_corrupt: int = 0
    state: KeptState | None = field(default=None, repr=False, compare=False)

    @property
    def deployed(self) -> bool:
        """Whether the client is deployed on its own machine, and validates requests."""
        return self.folder is not None

    def allows(self, release: str) -> bool:
        """Return whether the policy of its owner allows a release."""
        return self.policy is None or not self.policy.refuses_release(release)

    @property
    def evaluates(self) -> bool:
        """Whether the client answers requests for exact evaluation, by its guarantee and by its policy."""
        return self.allows("scores") and self.refusal(EVALUATE, priced=False) is None

    @property
    def exact(self) -> bool:
        """Whether exact values may leave, beside what the guarantee covers."""
        return not self.deployed or self.diagnostics or self.guarantee == TRUSTED_SERVER

    def refusal(self, message_type: str, *, priced: bool) -> ClientError | None:
        """Return the error by which the client's guarantee refuses a request; None if it answers.

        Args:
            message_type: Of the request.
            priced: Whether the request has record-level plans.
        """
        if not self.deployed:
            return None
        reason = refusal(self.guarantee, message_type, priced=priced, diagnostics=self.diagnostics)
        return ClientError(f"client {self.client_id} rejects the request: {reason}", "policy") if reason else None


def checked_versions() -> str:
    """Return the versions of Coterie and of the libraries on which the guarantee depends.

    Raises:
        ClientError: a library is missing, or too old for this version of Coterie.
    """
    if problem := incompatible():
        raise ClientError(problem)
    return versions()


def identity_reply(client: Client) -> RecordDict:
    """Return the reply to an identity request.

    It holds the client id, whether repeated requests return the cached reply, whether requests for evaluation are
    accepted, the key for masked rounds, and the versions of a deployed client.

    Raises:
        ClientError: a library of a deployed client is too old for this version of Coterie.
    """
    reply = ConfigRecord({"client-id": client.client_id, "repeats": bool(client.folder)})
    reply["evaluates"] = client.evaluates
    if client.keys is not None:
        reply.update(client.keys.signed.to_record())
    if client.deployed:
        reply["versions"] = checked_versions()
    return RecordDict({REPLY: reply})
