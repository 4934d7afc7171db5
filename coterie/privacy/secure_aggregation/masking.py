"""One masked sum: the server learns the sum of the survivors' vectors modulo 2^32, and nothing else about them.

K. Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS 2017), Figure 4, with the
long-term keys of a roster in place of its round AdvertiseKeys. Vectors hold their noise before they are masked.

     1  opening    i draws a seed b_i and a seed of a key pair (s_i, S_i); signs S_i; for every neighbour j in U0, the
                   cohort (neighbours.py), it seals a share of b_i and one of s_i's seed
     2  vector     y_i = x_i + PRG(b_i) + sum over neighbours j in U1 of +-PRG(s_i s_j)   mod 2^32, where U1 opened
     3  survivors  i signs U2, those whose vectors arrived, once
     4  unmasking  having seen t signatures of U2, i gives its shares of b_j for j in U2, of s_j for j in U1 - U2, and
                   reveals the layers of its noise that |U2| survivors do not keep (noise_layers.py)
     5  server     sum of y_i over U2, less PRG(b_j) for j in U2, the pair masks with j in U1 - U2, and these layers

Two lists U2 with t signatures each would share at least 2t - n signers. With 2t > n + c, one of them is honest, and an
honest client signs one list. So the server gets b_j or s_j of an honest client, never both. A signature covers the
openings of U1, too: if a client is made to open a round twice, signatures of the one do not count for the other.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.privacy.secure_aggregation import shamir
from coterie.privacy.secure_aggregation.errors import SecureError
from coterie.privacy.secure_aggregation.integers import Integers, to_modulus
from coterie.privacy.secure_aggregation.keys import KEY_BYTES, Vector, agree, derive, expand, private_key, seal, unseal
from coterie.privacy.secure_aggregation.neighbours import connected, reach, ring
from coterie.privacy.secure_aggregation.noise_layers import NO_SURPLUS, NoiseLayers, Surplus

#: Largest number of entries of a vector.
MAX_SIZE = 2**23
#: Signs what a client says; a client's own key.
Sign = Callable[[bytes], bytes]
#: Whether a signature (client, content, signature) is that of a client of the roster.
Verify = Callable[[int, bytes, bytes], bool]


@dataclass(frozen=True)
class MaskedRound:
    """What all parties must agree on before anything is sent.

    Attributes:
        run: of the run; any bytes.
        number: the round.
        attempt: of the round.
        plan: digest of the run's plan, noise included.
        cohort: U0, identities of the clients, increasing.
        threshold: t, the survivors below which nothing is released.
        corrupt: c, clients that may work with the server.
        size: number of entries of a vector, at most :data:`MAX_SIZE`.
        layers: of a client's noise; they follow from the plan.
    """

    run: bytes
    number: int
    attempt: int
    plan: bytes
    cohort: tuple[int, ...]
    threshold: int
    corrupt: int
    size: int
    layers: NoiseLayers

    def __post_init__(self) -> None:
        n, t, c = len(self.cohort), self.threshold, self.corrupt
        if not 1 <= self.size <= MAX_SIZE:
            raise SecureError(f"a vector has from 1 to {MAX_SIZE:,} entries, not {self.size:,}")
        if list(self.cohort) != sorted(set(self.cohort)):
            raise SecureError("the cohort must be increasing, without repetition")
        if not 0 <= c < t <= n or 2 * t <= n + c:
            raise SecureError(f"threshold {t} for {n} clients of which {c} may be corrupt: it needs 2t > n + c, t <= n")

    @cached_property
    def digest(self) -> bytes:
        """A hash of all of it, which every derived key and signature contains."""
        numbers = (self.number, self.attempt, self.threshold, self.corrupt, self.size, *self.cohort)
        parts = (self.run, self.plan, *(str(number).encode() for number in numbers))
        return hashlib.sha256(b"".join(len(entry).to_bytes(4, "big") + entry for entry in parts)).digest()

    @cached_property
    def reach(self) -> int:
        """How many places on the ring two clients with a mask are apart at most."""
        return reach(len(self.cohort), self.corrupt)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(ring(self.digest, self.cohort))}

    def holders(self, client: int) -> tuple[int, ...]:
        """Return who holds shares of a client's secrets, increasing: its neighbours and the client itself."""
        clients = list(self._places)
        steps = range(self._places[client] - self.reach, self._places[client] + self.reach + 1)
        return tuple(sorted({clients[step % len(clients)] for step in steps}))

    @property
    def needed_shares(self) -> int:
        """Number of shares that give a secret back, more than c: t in a complete cohort, fewer on a ring."""
        complete = self.reach >= len(self.cohort) // 2
        return self.threshold if complete else max(self.corrupt + 1, self.reach // 2)

    def check_survivors(self, clients: Iterable[int], among: Iterable[int]) -> tuple[int, ...]:
        """Return a list of clients as an increasing tuple; SecureError if it is not at least t of `among`."""
        listed = tuple(clients)
        if list(listed) != sorted(set(listed)) or not set(listed) <= set(among) or len(listed) < self.threshold:
            raise SecureError(
                f"a list of survivors must be increasing, known, and of at least {self.threshold} clients"
            )
        return listed

    def check_connected(self, survivors: Iterable[int]) -> None:
        """Check that survivors are connected by masks, whoever of them works with the server; SecureError if not."""
        places = [self._places[client] for client in survivors]
        if not connected(places, len(self.cohort), self.reach, self.corrupt):
            raise SecureError("the survivors are too far apart for their masks")


@dataclass(frozen=True)
class Opening:
    """What a client sends first.

    Attributes:
        public: S_i.
        commitment: hash of b_i, by which the server recognises wrong shares.
        signature: of both, in this round.
        boxes: sealed shares, by neighbour.
    """

    public: bytes
    commitment: bytes
    signature: bytes
    boxes: Mapping[int, bytes]


@dataclass(frozen=True)
class Shares:
    """What a client sends last.

    Attributes:
        seeds: shares of b_j, by survivor.
        keys: shares of the seed of s_j, by client that dropped out.
        surplus: layers of its noise that are not kept.
    """

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]
    surplus: Surplus = NO_SURPLUS


def _said(round: MaskedRound, client: int, public: bytes, commitment: bytes) -> bytes:
    return b"opening" + round.digest + str(client).encode() + b":" + public + commitment


def _survivors_said(round: MaskedRound, opened: bytes, survivors: Sequence[int]) -> bytes:
    return b"survivors" + round.digest + opened + ",".join(map(str, survivors)).encode()


def _opened(openings: Mapping[int, Opening]) -> bytes:
    """A hash of what the clients of U1 have opened the round with."""
    said = (f"{client}:".encode() + one.public + one.commitment for client, one in sorted(openings.items()))
    return hashlib.sha256(b"".join(len(entry).to_bytes(4, "big") + entry for entry in said)).digest()


def _commitment(round: MaskedRound, client: int, seed: bytes) -> bytes:
    return derive(seed, b"commitment", round.digest, str(client).encode())


def _self_mask(round: MaskedRound, seed: bytes) -> Vector:
    return expand(derive(seed, b"self mask", round.digest), round.size)


def _pair_mask(round: MaskedRound, key: X25519PrivateKey, public: bytes, other: bytes) -> Vector:
    return expand(agree(key, other, b"pair mask", round.digest, *sorted((public, other))), round.size)


def _round_key(round: MaskedRound, seed: bytes) -> X25519PrivateKey:
    return private_key(seed, b"pair key", round.digest)


@dataclass
class _Secrets:
    """What a client keeps during a round; see :meth:`MaskingClient.to_bytes`."""

    step: int = 0
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(shamir.SECRET_BYTES), repr=False)
    key_seed: bytes = field(default_factory=lambda: secrets.token_bytes(shamir.SECRET_BYTES), repr=False)
    #: Key of the first layer of the noise, once it is drawn.
    noise: bytes = field(default=b"", repr=False)
    #: Of its layers, from each of them on.
    digests: list[bytes] = field(default_factory=list, repr=False)
    #: Shares of b_j and of s_j's seed, by neighbour j in U1.
    held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    #: U1, and a hash of its openings.
    among: tuple[int, ...] = ()
    opened: bytes = b""
    #: U2, once it is signed.
    signed: tuple[int, ...] = ()

    def to_bytes(self, round: MaskedRound, client: int) -> bytes:
        held = {str(other): [share.hex() for share in pair] for other, pair in self.held.items()}
        seeds = {"seed": self.seed.hex(), "key_seed": self.key_seed.hex(), "noise": self.noise.hex()}
        digests = [digest.hex() for digest in self.digests]
        kept = {"step": self.step, **seeds, "digests": digests, "held": held}
        whose = {"round": round.digest.hex(), "client": client}
        lists = {"among": self.among, "opened": self.opened.hex(), "signed": self.signed}
        return json.dumps({**whose, **kept, **lists}).encode()

    @classmethod
    def from_bytes(cls, content: bytes, round: MaskedRound, client: int) -> _Secrets:
        try:
            kept = json.loads(content)
            if (kept["round"], kept["client"]) != (round.digest.hex(), client):
                raise SecureError("the state of this client is that of another round")
            held = {int(other): (bytes.fromhex(b), bytes.fromhex(s)) for other, (b, s) in kept["held"].items()}
            seed, key_seed, noise = (bytes.fromhex(kept[name]) for name in ("seed", "key_seed", "noise"))
            step, opened = int(kept["step"]), bytes.fromhex(kept["opened"])
            among, signed, digests = tuple(kept["among"]), tuple(kept["signed"]), [*map(bytes.fromhex, kept["digests"])]
            return cls(step, seed, key_seed, noise, digests, held, among, opened, signed)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, SecureError):
                raise
            raise SecureError("the state of this client is damaged") from None


@dataclass
class MaskingClient:
    """A client's half of one round; each step is answered once, in order.

    Args:
        round: what the client has checked and accepts.
        client: its identity.
        key: its long-term key.
        roster: long-term public keys of the cohort, by client.
        sign: signs by its key of the roster.
        verify: checks the signatures of others by theirs.
    """

    round: MaskedRound
    client: int
    key: X25519PrivateKey = field(repr=False)
    roster: Mapping[int, bytes]
    sign: Sign = field(repr=False)
    verify: Verify = field(repr=False)
    _kept: _Secrets = field(default_factory=_Secrets, init=False, repr=False)
    _publics: dict[int, bytes] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.client not in self.round.cohort or not set(self.round.cohort) <= self.roster.keys():
            raise SecureError("the cohort must contain this client, and clients of the roster alone")

    def to_bytes(self) -> bytes:
        """Return the state between two steps, with all secrets of the round, for a private file."""
        return self._kept.to_bytes(self.round, self.client)

    def restore(self, content: bytes) -> None:
        """Continue from what :meth:`to_bytes` has returned.

        Raises:
            SecureError: it is damaged, or of another round or client.
        """
        self._kept = _Secrets.from_bytes(content, self.round, self.client)
        self._publics = {}

    @property
    def step(self) -> int:
        """The last step that was answered."""
        return self._kept.step

    def _next(self, step: int) -> None:
        if self._kept.step != step - 1:
            raise SecureError(f"step {step} is not the next one of this round")
        self._kept.step = step

    def open(self) -> Opening:
        """Step 1."""
        self._next(1)
        round, kept = self.round, self._kept
        holders = round.holders(self.client)
        shares = [shamir.split(secret, round.needed_shares, len(holders)) for secret in (kept.seed, kept.key_seed)]
        pairs = dict(zip(holders, zip(*shares, strict=True), strict=True))
        kept.held[self.client] = pairs.pop(self.client)
        public, commitment = self._announced
        boxes = {
            client: seal(self._box_key(client, sender=self.client, receiver=client), b"".join(pair), round.digest)
            for client, pair in pairs.items()
        }
        return Opening(public, commitment, self.sign(_said(round, self.client, public, commitment)), boxes)

    @property
    def _announced(self) -> tuple[bytes, bytes]:
        """S_i and the commitment, functions of the secrets."""
        public = _round_key(self.round, self._kept.key_seed).public_key().public_bytes_raw()
        return public, _commitment(self.round, self.client, self._kept.seed)

    def _box_key(self, other: int, *, sender: int, receiver: int) -> bytes:
        direction = f"{sender} to {receiver}".encode()
        return agree(self.key, self.roster[other], b"box", self.round.digest, direction)

    def mask(self, vector: Vector, openings: Mapping[int, Opening]) -> Vector:
        """Step 2: :meth:`receive`, and :meth:`masked`."""
        self.receive(openings)
        return self.masked(vector)

    def receive(self, openings: Mapping[int, Opening]) -> None:
        """Step 2, first half: check the openings of U1 with the boxes for this client, before anything is computed.

        Raises:
            SecureError: an opening is not signed by its client, a box is not for this one, or they are fewer than t.
        """
        self._next(2)
        round, kept = self.round, self._kept
        opened, holders = round.check_survivors(sorted(openings), round.cohort), round.holders(self.client)
        mine = openings.get(self.client)
        if mine is None or (mine.public, mine.commitment) != self._announced:
            raise SecureError("the opening of this client is missing, or another one")
        for client in opened:
            one = openings[client]
            if not self.verify(client, _said(round, client, one.public, one.commitment), one.signature):
                raise SecureError(f"the opening of client {client} is not signed by its key")
            if client != self.client and client in holders:
                box_key = self._box_key(client, sender=client, receiver=self.client)
                content = unseal(box_key, one.boxes.get(self.client, b""), round.digest)
                if len(content) != 2 * shamir.SHARE_BYTES:
                    raise SecureError(f"the box of client {client} does not hold two shares")
                kept.held[client] = content[: shamir.SHARE_BYTES], content[shamir.SHARE_BYTES :]
        kept.among, kept.opened = opened, _opened(openings)
        self._publics = {client: openings[client].public for client in opened if client in holders}

    def noise(self, rng: np.random.Generator) -> Integers:
        """Return (size,) integers of noise in all layers, from a secret generator; their key is kept until step 4."""
        self._kept.noise = rng.bytes(KEY_BYTES)
        noise, self._kept.digests = self.round.layers.draw(self._kept.noise, self.round.size)
        return noise

    def masked(self, vector: Vector) -> Vector:
        """Step 2, second half: return the masked vector, once.

        Raises:
            SecureError: the vector has another size or type, or nothing was received before.
        """
        round, publics = self.round, self._publics
        self._publics = {}
        if not publics:
            raise SecureError("step 2 is not the next one of this round")
        if vector.dtype != np.uint32 or vector.shape != (round.size,):
            raise SecureError(f"a vector has {round.size} integers modulo 2^32")
        masked = vector + _self_mask(round, self._kept.seed)
        key = _round_key(round, self._kept.key_seed)
        for client, public in publics.items():
            if client != self.client:
                mask = _pair_mask(round, key, publics[self.client], public)
                masked = masked + mask if self.client < client else masked - mask
        return masked

    def sign_survivors(self, survivors: Iterable[int]) -> bytes:
        """Step 3: return a signature of U2.

        Raises:
            SecureError: U2 has fewer than t clients, others than U1, lacks this one, or is not connected.
        """
        self._next(3)
        signed = self.round.check_survivors(survivors, self._kept.among)
        if self.client not in signed:
            raise SecureError("the survivors lack this client")
        self.round.check_connected(signed)
        self._kept.signed = signed
        return self.sign(_survivors_said(self.round, self._kept.opened, signed))

    def unmask(self, signatures: Mapping[int, bytes]) -> Shares:
        """Step 4: return the shares and the surplus of the noise, and forget all secrets of the round.

        Raises:
            SecureError: fewer than t survivors signed the list that this client signed.
        """
        self._next(4)
        signed, held = self._kept.signed, self._kept.held
        said = _survivors_said(self.round, self._kept.opened, signed)
        good = [client for client in signed if self.verify(client, said, signatures.get(client, b""))]
        if len(good) < self.round.threshold:
            raise SecureError(f"{len(good)} of {self.round.threshold} required clients signed this list of survivors")
        surplus = self.round.layers.surplus(self._kept.noise, self._kept.digests, len(signed))
        self._kept = _Secrets(4, b"", b"")
        stayed = held.keys() & set(signed)
        return Shares(
            {client: held[client][0] for client in stayed},
            {client: held[client][1] for client in held.keys() - stayed},
            surplus,
        )


def unmasked_sum(
    round: MaskedRound, openings: Mapping[int, Opening], vectors: Mapping[int, Vector], shares: Mapping[int, Shares]
) -> tuple[Vector, int]:
    """Step 5: return the sum of the survivors' vectors modulo 2^32, and the number of those whose surplus stays in it.

    Args:
        round: the round.
        openings: of U1.
        vectors: masked, of U2.
        shares: of at least t clients of U2.

    Raises:
        SecureError: there are too few shares, or those of a client are wrong.
    """
    survivors = round.check_survivors(sorted(vectors), openings)
    givers, factors = round.check_survivors(sorted(shares), survivors), dict[tuple[int, ...], list[int]]()

    def secret(client: int, of: Callable[[Shares], Mapping[int, bytes]]) -> bytes:
        numbered = {holder: number for number, holder in enumerate(round.holders(client), start=1)}
        used = [giver for giver in givers if giver in numbered][: round.needed_shares]
        if len(used) < round.needed_shares:
            raise SecureError(f"{len(used)} neighbours of client {client} gave shares, of {round.needed_shares}")
        given = {numbered[giver]: of(shares[giver]).get(client, b"") for giver in used}
        if tuple(given) not in factors:  # the same for all clients of a small cohort
            factors[tuple(given)] = shamir.weights(list(given))
        return shamir.combine(given, factors[tuple(given)])

    total = np.zeros(round.size, np.uint32)
    for client in survivors:
        seed = secret(client, lambda given: given.seeds)
        if not hmac.compare_digest(_commitment(round, client, seed), openings[client].commitment):
            raise SecureError(f"the shares of client {client}'s seed are not those of its opening")
        total += vectors[client] - _self_mask(round, seed)
    for client in sorted(openings.keys() - vectors.keys()):
        key = _round_key(round, secret(client, lambda given: given.keys))
        public = openings[client].public
        if key.public_key().public_bytes_raw() != public:
            raise SecureError(f"the shares of client {client}'s key are not those of its opening")
        for survivor in set(survivors) & set(round.holders(client)):
            mask = _pair_mask(round, key, public, openings[survivor].public)
            # The survivor added the mask if its number is the smaller one.
            total = total - mask if survivor < client else total + mask
    surplus, revealed = round.layers.total_surplus(
        (given.surplus for given in shares.values()), round.size, len(survivors)
    )
    return total - to_modulus(surplus), len(survivors) - revealed
