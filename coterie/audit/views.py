"""Attacks on masked rounds by a server that shows its clients different openings, keys, models, plans and lists.

Honest clients are real ones (:class:`~coterie.privacy.secure_aggregation.MaskingClient`). The server collects shares of
their seeds b_j and of their keys s_j, with those of the clients that work with it, and removes every mask that it
knows. It wins if a sum over fewer honest clients than the noise is sized for comes out exactly; there is no noise here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.audit.findings import Finding, zero_count_test
from coterie.privacy import Streams
from coterie.privacy.secure_aggregation import MaskedRound, MaskingClient, NoiseLayers, Opening, SecureError, shamir
from coterie.privacy.secure_aggregation.keys import (
    Vector,
    add_mask,
    agree,
    derive,
    is_signed,
    private_key,
    seal,
    unseal,
)

_SIZE, _COMMITMENT = 4, bytes(32)


class _AnyNumber(MaskedRound):
    """A round whose clients accept openings and lists of any number of clients."""

    def check_survivors(self, clients: Iterable[int], among: Iterable[int]) -> tuple[int, ...]:
        return tuple(clients)


@dataclass(frozen=True)
class Checks:
    """Checks of a client.

    Attributes:
        round: Class of the round, which counts openings and survivors.
        unsigned: Beginnings of contents whose signatures are not checked.
    """

    round: type[MaskedRound] = MaskedRound
    unsigned: tuple[bytes, ...] = ()


_ALL = Checks()
_VIEWS_ALONE = Checks(_AnyNumber, (b"opening",))
_NONE = Checks(_AnyNumber, (b"opening", b"view"))
_CLIENTS = {"": _ALL, ", views compared alone": _VIEWS_ALONE, ", views not compared": _NONE}


class Play:
    """A masked round of honest clients, and of the last c ones, which work with the server.

    Args:
        clients: n.
        threshold: t.
        corrupt: c.
        rng: Randomness of the vectors and of the server.
        checks: Checks of the honest clients.
    """

    def __init__(
        self, clients: int, threshold: int, corrupt: int, rng: np.random.Generator, checks: Checks = _ALL
    ) -> None:
        self.cohort, self.threshold, self.rng = tuple(range(clients)), threshold, rng
        self.honest, self.corrupt = self.cohort[: clients - corrupt], self.cohort[clients - corrupt :]
        self._checks = checks
        self._signers = [Ed25519PrivateKey.generate() for _ in self.cohort]
        self._boxes = [X25519PrivateKey.generate() for _ in self.cohort]
        self._box_keys = {i: key.public_key().public_bytes_raw() for i, key in enumerate(self._boxes)}
        # What the server shows, and what it gets.
        self._openings: dict[tuple[int, int], Opening] = {}
        self._shown: dict[int, Mapping[int, Opening]] = {}
        self._views: dict[int, tuple[bytes, bytes]] = {}
        self._vectors: dict[int, tuple[Vector, Vector]] = {}
        self._known_keys: dict[bytes, X25519PrivateKey] = {}

    def open(self, plans: Mapping[int, int]) -> None:
        """Step 1: honest clients open the round of the plan that each is shown, and corrupt ones that of every plan."""
        facts = self.cohort, self.threshold, len(self.corrupt), _SIZE, NoiseLayers((99,), ())
        self._rounds = {plan: self._checks.round(b"run", 1, 0, b"%d" % plan, *facts) for plan in set(plans.values())}
        self.plans, self._parties = plans, dict[int, MaskingClient]()
        for i, plan in plans.items():
            sign, round = self._signers[i].sign, self._rounds[plan]
            self._parties[i] = MaskingClient(round, i, self._box_keys, sign, self._verify)
            self._openings[i, plan] = self._parties[i].open(self._boxes[i])
        for i in self.corrupt:
            for plan, round in self._rounds.items():
                public = self._new_key()
                signature = self._signers[i].sign(round.opening_content(i, public, _COMMITMENT))
                shares = bytes(2 * shamir.SHARE_BYTES)
                boxes = {j: seal(self._box(i, j, i, j, round), shares, round.digest) for j in self.cohort}
                self._openings[i, plan] = Opening(public, _COMMITMENT, signature, boxes)

    def opening(self, j: int, plan: int) -> Opening:
        """Return the opening of client j that is shown to those of a plan."""
        return self._openings[j, plan if j in self.corrupt else self.plans[j]]

    def forged(self, j: int, plan: int) -> Opening:
        """Return the same with a key of the server in place of that of client j."""
        return replace(self.opening(j, plan), public=self._new_key())

    def send(self, i: int, openings: Mapping[int, Opening], task: bytes = b"") -> None:
        """Step 2 of client i, which may refuse."""
        vector = self.rng.integers(0, 2**32, _SIZE, dtype=np.uint32)
        try:
            signature = self._parties[i].receive(openings, task)
            self._vectors[i] = vector, self._parties[i].masked(vector)
        except SecureError:
            return
        self._shown[i] = openings
        self._views[i] = self._parties[i].round.view(openings, task), signature

    def finish(self, lists: Mapping[int, Sequence[int]]) -> list[tuple[int, ...]]:
        """Steps 3 and 4: ask clients to sign lists of survivors, and for shares; corrupt clients sign everything.

        Returns:
            the sets of honest clients, fewer than t - c, whose sum the server computes.
        """
        signatures, seeds, keys = dict[int, bytes](), *({j: dict[int, bytes]() for j in self.cohort} for _ in range(2))
        signers = [i for i in lists if i in self._views]
        for i in signers:
            round, (view, _) = self._parties[i].round, self._views[i]
            views = {j: signature for j, (_, signature) in self._views.items()}
            views |= {j: self._signers[j].sign(round.view_content(j, view)) for j in self.corrupt}
            try:
                signatures[i] = self._parties[i].sign_survivors(lists[i], views)
            except SecureError:
                continue
        for i in signatures:
            content = self._parties[i].round.survivors_content(self._views[i][0], lists[i])
            try:
                shares = self._parties[i].unmask(signatures | {j: self._signers[j].sign(content) for j in self.corrupt})
            except SecureError:
                continue
            for given, to in ((shares.seeds, seeds), (shares.keys, keys)):
                for j, share in given.items():
                    to[j][i + 1] = share
        for j in self.honest:
            round, opening = self._rounds[self.plans[j]], self.opening(j, 0)
            for i in self.corrupt:
                content = unseal(self._box(i, j, j, i, round), opening.boxes[i], round.digest)
                seeds[j][i + 1], keys[j][i + 1] = content[: shamir.SHARE_BYTES], content[shamir.SHARE_BYTES :]
        return self._small_sums(seeds, keys)

    def _small_sums(
        self, seeds: Mapping[int, Mapping[int, bytes]], keys: Mapping[int, Mapping[int, bytes]]
    ) -> list[tuple[int, ...]]:
        """Return the sets of clients whose sum follows from shares of b_j and of s_j, by client and by holder."""
        known = {j: secret for j in self.honest if (secret := self._combined(seeds[j])) is not None}
        for j in self.honest:
            if (secret := self._combined(keys[j])) is not None:
                self._know(private_key(secret, b"pair key", self._rounds[self.plans[j]].digest))
        sizes, senders = range(1, self.threshold - len(self.corrupt)), sorted(known.keys() & self._vectors.keys())
        return [some for size in sizes for some in combinations(senders, size) if self._learns(some, known)]

    def _learns(self, clients: Sequence[int], seeds: Mapping[int, bytes]) -> bool:
        """Whether the sum over these clients comes out, less every mask that the server knows."""
        total = np.zeros(_SIZE, np.uint32)
        for i in clients:
            digest, public = self._rounds[self.plans[i]].digest, self._shown[i][i].public
            total += self._vectors[i][1]
            add_mask(total, derive(seeds[i], b"self mask", digest), subtract=True)
            for j, opening in self._shown[i].items():
                if j == i or (j in clients and i in self._shown[j]):  # a mask with another one of them cancels
                    continue
                ends = {public: opening.public, opening.public: public}
                mine = next((end for end in ends if end in self._known_keys), None)
                if mine is None:
                    return False
                key = agree(self._known_keys[mine], ends[mine], b"pair mask", digest, *sorted(ends))
                add_mask(total, key, subtract=i < j)
        return bool(np.array_equal(total, np.sum([self._vectors[i][0] for i in clients], axis=0, dtype=np.uint32)))

    def _combined(self, shares: Mapping[int, bytes]) -> bytes | None:
        try:
            return shamir.combine(dict(sorted(shares.items())[: self.threshold])) if shares else None
        except SecureError:  # too few, or not of one secret
            return None

    def _verify(self, client: int, content: bytes, signature: bytes) -> bool:
        key = self._signers[client].public_key().public_bytes_raw()
        return any(map(content.startswith, self._checks.unsigned)) or is_signed(key, content, signature)

    def _new_key(self) -> bytes:
        return self._know(X25519PrivateKey.generate())

    def _know(self, key: X25519PrivateKey) -> bytes:
        public = key.public_key().public_bytes_raw()
        self._known_keys[public] = key
        return public

    def _box(self, own: int, other: int, sender: int, receiver: int, round: MaskedRound) -> bytes:
        direction = f"{sender} to {receiver}".encode()
        return agree(self._boxes[own], self._box_keys[other], b"box", round.digest, direction)


# ---- servers ----------------------------------------------------------------------------------------------


def hides(play: Play) -> list[tuple[int, ...]]:
    """Hide all honest clients from client 0, and show the others all openings."""
    return _against_one(play, dict.fromkeys((0, *play.corrupt), play.opening))


def is_in_the_middle(play: Play) -> list[tuple[int, ...]]:
    """Show client 0 keys of the server in place of all others, and the others all openings."""
    return _against_one(play, {j: play.forged if j else play.opening for j in play.cohort})


def _against_one(play: Play, shown: Mapping[int, Callable[[int, int], Opening]]) -> list[tuple[int, ...]]:
    play.open(dict.fromkeys(play.honest, 0))
    play.send(0, {j: opening(j, 0) for j, opening in shown.items()})
    for i in play.honest[1:]:
        play.send(i, {j: play.opening(j, 0) for j in play.cohort})
    return play.finish(dict.fromkeys(play.honest[1:], play.cohort))


def shows_any_views(play: Play) -> list[tuple[int, ...]]:
    """Show most clients the same openings, models, plan and list, and some of them others at random."""
    rng = play.rng

    def some(clients: Sequence[int], least: int) -> list[int]:
        return sorted(rng.permutation(clients)[: rng.integers(min(least, len(clients)), len(clients) + 1)].tolist())

    differ = rng.uniform(0, 0.5)
    play.open({i: int(rng.random() < differ / 4) for i in play.honest})
    opened = [*play.cohort] if rng.random() < 0.8 else some(play.cohort, play.threshold)
    survivors, lists = opened if rng.random() < 0.8 else some(opened, play.threshold), dict[int, Sequence[int]]()
    for i in play.honest:
        of_client = opened if rng.random() > differ else sorted({i, *some(play.cohort, 0)})
        forges = rng.random() < differ / 2
        openings = {j: (play.forged if forges and j != i else play.opening)(j, play.plans[i]) for j in of_client}
        play.send(i, openings, b"other models" if rng.random() < differ / 4 else b"models")
        if rng.random() < 0.9:
            lists[i] = survivors if rng.random() > differ / 2 else sorted({i, *some(of_client, play.threshold - 1)})
    return play.finish(lists)


#: Servers, and what they try to learn.
SERVERS: Mapping[str, Callable[[Play], Sequence[object]]] = {
    "any views: sum over too few clients": shows_any_views,
    "all others hidden from one client: its vector": hides,
    "keys of the server for one client: its vector": is_in_the_middle,
}


def audit_views(streams: Streams, servers: int) -> list[Finding]:
    """Play every server against clients that make all checks, that compare views alone, and that do not even this.

    Args:
        streams: Randomness of the servers.
        servers: Number of servers with random views; a twentieth of them are directed ones.
    """
    rng, findings = streams.stream("views"), list[Finding]()
    for name, server in SERVERS.items():
        plays = servers if server is shows_any_views else max(1, servers // 20)
        for clients, checks in _CLIENTS.items():
            broken = 0
            for _ in range(plays):
                n, corrupt = int(rng.integers(5, 9)), int(rng.integers(3))
                play = Play(n, int(rng.integers((n + corrupt) // 2 + 1, n)), corrupt, rng, checks)
                broken += bool(server(play))
            findings.append(zero_count_test("secure", name + clients, broken, control=checks is _NONE))
    return findings
