"""A request for a run: what a submitter asks clients to consent to, signed with the submitter's key.

``coterie sign`` makes it from the settings of a run and the app that runs, and ``flwr run`` sends it as the setting
``request``. A client whose policy names submitters refuses requests of a server without one, or beyond its terms. At
record level a client spends at most its epsilon for it, in however many runs it is used.

Its text is Base64 of a JSON object: the fields of :class:`RunRequest` and ``signature``.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from coterie.fields import EPSILON, ROUNDS, Bounds, Fields, Length, OneOf, key_of
from coterie.files import FileError, parse_object
from coterie.site.errors import DeployError
from coterie.site.policy import RELEASES
from coterie.site.roster import SUBMITTER, Member, Roster, fingerprint
from coterie.site.signatures import is_signed, sign

#: Default validity in days.
DAYS = 7
_PURPOSE = "coterie run request"
_ID, _HASH = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")
# Clocks of two machines may differ by this much.
_SKEW = timedelta(minutes=5)
# Releases that a record-level plan pays for.
_PAID = {"updates", "losses", "samples"}


@dataclass(frozen=True, kw_only=True)
class RunRequest(Fields):  # large: one field per term
    """A signed request for a run.

    Attributes:
        id: 32 random hexadecimal digits.
        key: public key of the submitter, in OpenSSH's format.
        app: SHA-256 of the only app that may run.
        strategy: the method.
        privacy_unit: "client", "record" or "none".
        epsilon: largest epsilon, at record level for each client; None without privacy.
        delta: the delta of epsilon.
        rounds: largest number of rounds.
        releases: what replies may hold, names in :data:`~coterie.site.policy.RELEASES`.
        begins, expires: when it is valid, in ISO 8601.

    Raises:
        DeployError: a field is out of bounds, or fields contradict each other.
    """

    error = DeployError

    id: Annotated[str, Length(32)]
    key: Annotated[str, Length(400)]
    app: Annotated[str, Length(64)]
    strategy: Annotated[str, Length(200)]
    privacy_unit: Annotated[str, OneOf(("client", "record", "none"))]
    epsilon: Annotated[float | None, EPSILON] = None
    delta: Annotated[float | None, Bounds(0, 1, above=True, below=True)] = None
    rounds: Annotated[int, ROUNDS]
    releases: Annotated[tuple[str, ...], OneOf(RELEASES)]
    begins: Annotated[str, Length(40)]
    expires: Annotated[str, Length(40)]

    def __post_init__(self) -> None:
        self.to_record()
        if not _ID.fullmatch(self.id) or not _HASH.fullmatch(self.app):
            raise DeployError("id and app must be 32 and 64 hexadecimal digits")
        if not (self.epsilon is None) == (self.delta is None) == (self.privacy_unit == "none"):
            raise DeployError("a request with privacy has epsilon and delta, one without has neither")
        if not self._time("begins") < self._time("expires"):
            raise DeployError("a request must expire after it begins")

    @classmethod
    def signed(cls, key: ec.EllipticCurvePrivateKey, terms: Mapping[str, Any], *, days: int) -> str:
        """Return the text of a new request, valid from now on.

        Args:
            key: of the submitter.
            terms: all fields except for id, key and times.
            days: validity.

        Raises:
            DeployError: see the class.
        """
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        now = datetime.now(UTC).replace(microsecond=0)
        end = now + timedelta(days=days)
        identity = {"id": secrets.token_hex(16), "key": public, "begins": now.isoformat(), "expires": end.isoformat()}
        stated = {key_of(name): value for name, value in terms.items() if value is not None}
        content = cls.from_record(identity | stated).to_record()
        text = json.dumps({**content, "signature": sign(key, _PURPOSE, content)}, separators=(",", ":"))
        return base64.b64encode(text.encode()).decode()

    @classmethod
    def read(cls, text: str) -> Self:
        """Read a request, and verify that its own key has signed it.

        Raises:
            DeployError: it is none, or was changed.
        """
        try:
            content = parse_object(base64.b64decode(text, validate=True).decode(), "request")
        except (FileError, ValueError, binascii.Error):
            raise DeployError("it is not a request that coterie sign has made") from None
        signature = content.pop("signature", None)
        request, key = cls.from_record(content), None
        with suppress(ValueError, UnsupportedAlgorithm):
            key = load_ssh_public_key(request.key.encode())
        if not is_signed(key, _PURPOSE, content, signature):
            raise DeployError("its signature does not match: it was changed after it was signed")
        return request

    def submitter(self, roster: Roster) -> Member:
        """Return who has signed it, if that is a submitter in a roster and the request is valid now.

        Raises:
            DeployError: it is not.
        """
        member = roster.member(fingerprint(self.key.encode()), SUBMITTER)
        self.check_time()
        return member

    def check_time(self) -> None:
        """Check that the request is valid now.

        Raises:
            DeployError: it has expired, or is not valid yet.
        """
        now, begins, expires = datetime.now(UTC), self._time("begins"), self._time("expires")
        if now >= expires:
            raise DeployError(f"it expired at {expires:%Y-%m-%d %H:%M} UTC: sign a new one")
        if now < begins - _SKEW:
            raise DeployError(
                f"it is valid from {begins:%Y-%m-%d %H:%M} UTC on, and this machine's clock shows "
                f"{now:%Y-%m-%d %H:%M}: correct the clock"
            )

    def refuses(
        self,
        *,
        app: str | None,
        strategy: str | None,
        rounds: int,
        releases: Collection[str],
        privacy: tuple[str, float | None, float | None] | None,
    ) -> str:
        """Return in which term a run exceeds the request; empty if in none.

        Args:
            app: SHA-256 of the app that runs; empty: it is not known; None: it is not compared.
            strategy: the method.
            rounds: number of rounds, or that of a round.
            releases: what replies hold.
            privacy: unit, epsilon and delta of the plan; None if the plan is not known.
        """
        if app is not None and app != self.app:
            return f"it is for the app {self.app}, and {app or 'an unknown app'} runs"
        if strategy != self.strategy:
            return f"it is for strategy {self.strategy}, not {strategy}"
        unit, *amounts = (self.privacy_unit, None, None) if privacy is None else privacy
        if unit != self.privacy_unit:
            return f"it is for privacy-unit {self.privacy_unit}, not {unit}"
        if rounds > self.rounds:
            return f"it is for {self.rounds} rounds, not {rounds}"
        if further := sorted(set(releases) - set(self.releases)):
            return f"it does not include the release of {', '.join(further)}"
        if privacy is None and self.privacy_unit == "record" and _PAID & set(releases):
            return "it is for record-level privacy, and the run has none"
        for name, asked, signed in zip(("epsilon", "delta"), amounts, (self.epsilon, self.delta), strict=True):
            if asked is not None and signed is not None and not asked <= signed:
                return f"it is for {name} {signed:g}, not {asked:g}"
        return ""

    def _time(self, field: str) -> datetime:
        try:
            time = datetime.fromisoformat(getattr(self, field))
        except ValueError:
            raise DeployError(f"{field} is {getattr(self, field)!r}, expected a time in ISO 8601") from None
        return time if time.tzinfo else time.replace(tzinfo=UTC)
