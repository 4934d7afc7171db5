"""One masked sum: the server learns the sum of the survivors' vectors modulo 2^32, and nothing else about them.

K. Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning (CCS 2017), Figure 4. The keys
of its round AdvertiseKeys travel with earlier replies: each client has a signed box key for one round. Vectors hold
their noise before they are masked.

     1  opening    i draws a seed b_i and a seed of a key pair (s_i, S_i), signs S_i, and seals for every other j in U0,
                   the cohort, a share of b_i and a share of s_i's seed
     2  vector     i checks the openings of U1, at least t of U0, and forgets its box key;
                   y_i = x_i + PRG(b_i) + sum over j in U1 of +-PRG(s_i s_j)   mod 2^32;
                   i signs its view: a hash of the round, of these openings, and of the task (models and settings)
     3  survivors  i signs U2, at least t of U1 whose vectors arrived, once, if all of U2 have signed the view of i
     4  unmasking  having seen t signatures of U2, i gives its shares of b_j for j in U2, of s_j for j in U1 - U2, and
                   reveals the layers of its noise that |U2| survivors do not keep (noise_layers.py)
     5  server     sum of y_i over U2, less PRG(b_j) for j in U2, the pair masks with j in U1 - U2, and these layers

Two lists U2 with t signatures each would share at least 2t - n signers. With 2t > n + c, one of them is honest, and an
honest client signs one list. So the server gets b_j or s_j of an honest client, never both. By line 3 the honest
clients of U2 have one view, so every two of them share a mask, which stays secret: the server learns the sum over all
of them. A client that the server shows other openings, models or keys keeps its vector masked, and so do all others.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.fields import MAX_COHORT
from coterie.privacy.secure_aggregation import shamir
from coterie.privacy.secure_aggregation.errors import SecureError
from coterie.privacy.secure_aggregation.integers import Integers, to_modulus
from coterie.privacy.secure_aggregation.keys import (
    KEY_BYTES,
    Vector,
    add_mask,
    agree,
    derive,
    digest_of,
    private_key,
    seal,
    unseal,
)
from coterie.privacy.secure_aggregation.noise_layers import NO_SURPLUS, NoiseLayers, Surplus

#: Largest number of entries of a vector.
MAX_SIZE = 2**23
#: Signs content with a client's own key.
Sign = Callable[[bytes], bytes]
#: Whether a signature (client, content, signature) is by the key of this client in the roster.
Verify = Callable[[int, bytes, bytes], bool]


@dataclass(frozen=True)
class MaskedRound:
    """Facts on which all parties must agree before a message is sent.

    Attributes:
        run: Name of the run; any bytes.
        number: Number of the round.
        attempt: Attempt of the round.
        plan: Digest of the run's plan, its noise included, and of the keys of the cohort.
        cohort: U0, ids of the clients, increasing; at most :data:`~coterie.fields.MAX_COHORT`.
        threshold: t, the number of survivors below which nothing is released.
        corrupt: c, number of clients that may work with the server.
        size: Number of entries of a vector, at most :data:`MAX_SIZE`.
        layers: Layers of a client's noise; they follow from the plan.

    Raises:
        SecureError: a number is out of range, or 2t > n + c does not hold.
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
        if n > MAX_COHORT:
            raise SecureError(f"a cohort of masked rounds has at most {MAX_COHORT:,} clients, not {n:,}")
        if list(self.cohort) != sorted(set(self.cohort)):
            raise SecureError("the cohort must be increasing, without repetition")
        if not 0 <= c < t <= n or 2 * t <= n + c:
            raise SecureError(f"threshold {t} for {n} clients of which {c} may be corrupt: it needs 2t > n + c, t <= n")

    @cached_property
    def digest(self) -> bytes:
        """Hash of all facts, which every derived key and every signature contains."""
        numbers = (self.number, self.attempt, self.threshold, self.corrupt, self.size, *self.cohort)
        return digest_of(self.run, self.plan, *(str(number).encode() for number in numbers))

    def check_survivors(self, clients: Iterable[int], among: Iterable[int]) -> tuple[int, ...]:
        """Return a list of clients as an increasing tuple; SecureError if it is not at least t of `among`."""
        survivors = tuple(clients)
        increasing = list(survivors) == sorted(set(survivors))
        if not increasing or not set(survivors) <= set(among) or len(survivors) < self.threshold:
            raise SecureError(
                f"a list of survivors must be increasing, known, and of at least {self.threshold} clients"
            )
        return survivors

    def opening_content(self, client: int, public: bytes, commitment: bytes) -> bytes:
        """Return the content of the signature in an opening."""
        return b"opening" + self.digest + str(client).encode() + b":" + public + commitment

    def view(self, openings: Mapping[int, Opening], task: bytes) -> bytes:
        """Return the hash of all that a client has seen until step 2; it is equal for clients with one view.

        Args:
            openings: Openings of U1.
            task: Digest of what all clients of U1 are sent in step 2.
        """
        fields = [f"{client}:".encode() + o.public + o.commitment for client, o in sorted(openings.items())]
        return digest_of(self.digest, task, *fields)

    def view_content(self, client: int, view: bytes) -> bytes:
        """Return the content of the signature of a view."""
        return b"view" + self.digest + view + str(client).encode()

    def survivors_content(self, view: bytes, survivors: Sequence[int]) -> bytes:
        """Return the content of the signature of a list of survivors."""
        return b"survivors" + self.digest + view + ",".join(map(str, survivors)).encode()


@dataclass(frozen=True)
class Opening:
    """Reply of a client to step 1.

    Attributes:
        public: S_i.
        commitment: Hash of b_i, by which the server recognises wrong shares.
        signature: Signature of both, in this round.
        boxes: Sealed shares, by receiver.
    """

    public: bytes
    commitment: bytes
    signature: bytes
    boxes: Mapping[int, bytes]


@dataclass(frozen=True)
class Shares:
    """Reply of a client to step 4.

    Attributes:
        seeds: Shares of b_j, by survivor.
        keys: Shares of the seed of s_j, by client that dropped out.
        surplus: Layers of the client's noise that the survivors do not keep.
    """

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]
    surplus: Surplus = NO_SURPLUS


def _commitment(round: MaskedRound, client: int, seed: bytes) -> bytes:
    return derive(seed, b"commitment", round.digest, str(client).encode())


def _self_mask_key(round: MaskedRound, seed: bytes) -> bytes:
    return derive(seed, b"self mask", round.digest)


def _pair_mask_key(round: MaskedRound, key: X25519PrivateKey, public: bytes, other: bytes) -> bytes:
    return agree(key, other, b"pair mask", round.digest, *sorted((public, other)))


def _round_key(round: MaskedRound, seed: bytes) -> X25519PrivateKey:
    return private_key(seed, b"pair key", round.digest)


@dataclass
class _Secrets:
    """State of a client during a round; see :meth:`MaskingClient.to_bytes`."""

    step: int = 0
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(shamir.SECRET_BYTES), repr=False)
    key_seed: bytes = field(default_factory=lambda: secrets.token_bytes(shamir.SECRET_BYTES), repr=False)
    #: Private box key of the round, until the boxes are opened.
    box: bytes = field(default=b"", repr=False)
    #: Key of the first layer of the noise, once it is drawn.
    noise: bytes = field(default=b"", repr=False)
    #: Digests of the layers of the noise, from each of them on.
    digests: list[bytes] = field(default_factory=list, repr=False)
    #: Shares of b_j and of s_j's seed, by client j of U1.
    held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)
    #: U1, and the view of the client.
    among: tuple[int, ...] = ()
    view: bytes = b""
    #: U2, once it is signed.
    signed: tuple[int, ...] = ()

    def to_bytes(self, round: MaskedRound, client: int) -> bytes:
        held = {str(other): [share.hex() for share in pair] for other, pair in self.held.items()}
        keys = {name: getattr(self, name).hex() for name in _KEYS}
        lists = {"digests": [digest.hex() for digest in self.digests], "among": self.among, "signed": self.signed}
        return json.dumps(
            {"round": round.digest.hex(), "client": client, "step": self.step, "held": held, **keys, **lists}
        ).encode()

    @classmethod
    def from_bytes(cls, content: bytes, round: MaskedRound, client: int) -> _Secrets:
        try:
            state = json.loads(content)
            if (state["round"], state["client"]) != (round.digest.hex(), client):
                raise SecureError("the state of this client is that of another round")
            held = {int(other): (bytes.fromhex(b), bytes.fromhex(s)) for other, (b, s) in state["held"].items()}
            keys = {name: bytes.fromhex(state[name]) for name in _KEYS}
            among, signed = tuple(state["among"]), tuple(state["signed"])
            digests = [*map(bytes.fromhex, state["digests"])]
            return cls(int(state["step"]), **keys, digests=digests, held=held, among=among, signed=signed)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, SecureError):
                raise
            raise SecureError("the state of this client is damaged") from None


_KEYS = ("seed", "key_seed", "box", "noise", "view")


@dataclass
class MaskingClient:
    """A client's half of one round; each step is answered once, in order.

    Args:
        round: The round, which the client has checked and accepts.
        client: Id of the client.
        box_keys: Public box keys of the cohort in this round, by client.
        sign: Signs with the client's key of the roster.
        verify: Checks signatures of other clients by their keys of the roster.

    Raises:
        SecureError: the cohort lacks this client, or a client has no box key.
    """

    round: MaskedRound
    client: int
    box_keys: Mapping[int, bytes]
    sign: Sign = field(repr=False)
    verify: Verify = field(repr=False)
    _state: _Secrets = field(default_factory=_Secrets, init=False, repr=False)
    _publics: dict[int, bytes] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.client not in self.round.cohort or not set(self.round.cohort) <= self.box_keys.keys():
            raise SecureError("the cohort must contain this client, and clients with a box key alone")

    def to_bytes(self) -> bytes:
        """Return the state between two steps, with all secrets of the round, for a private file."""
        return self._state.to_bytes(self.round, self.client)

    def restore(self, content: bytes) -> None:
        """Continue from the state that :meth:`to_bytes` has returned.

        Raises:
            SecureError: it is damaged, or of another round or client.
        """
        self._state = _Secrets.from_bytes(content, self.round, self.client)
        self._publics = {}

    @property
    def step(self) -> int:
        """Number of the last step that was answered."""
        return self._state.step

    def _next(self, step: int) -> None:
        if self._state.step != step - 1:
            raise SecureError(f"step {step} is not the next one of this round")
        self._state.step = step

    def open(self, box_key: X25519PrivateKey) -> Opening:
        """Step 1: return the opening of the round.

        Args:
            box_key: Private box key of the client in this round.
        """
        self._next(1)
        round, state = self.round, self._state
        if box_key.public_key().public_bytes_raw() != self.box_keys[self.client]:
            raise SecureError("the round has another box key of this client")
        state.box = box_key.private_bytes_raw()
        shares = [shamir.split(secret, round.threshold, len(round.cohort)) for secret in (state.seed, state.key_seed)]
        pairs = dict(zip(round.cohort, zip(*shares, strict=True), strict=True))
        state.held[self.client] = pairs.pop(self.client)
        public, commitment = self._announced
        signature = self.sign(round.opening_content(self.client, public, commitment))
        boxes = {
            client: seal(self._box(box_key, client, sender=self.client, receiver=client), b"".join(pair), round.digest)
            for client, pair in pairs.items()
        }
        return Opening(public, commitment, signature, boxes)

    @property
    def _announced(self) -> tuple[bytes, bytes]:
        """S_i and the commitment, functions of the secrets."""
        public = _round_key(self.round, self._state.key_seed).public_key().public_bytes_raw()
        return public, _commitment(self.round, self.client, self._state.seed)

    def _box(self, box_key: X25519PrivateKey, other: int, *, sender: int, receiver: int) -> bytes:
        direction = f"{sender} to {receiver}".encode()
        return agree(box_key, self.box_keys[other], b"box", self.round.digest, direction)

    def receive(self, openings: Mapping[int, Opening], task: bytes) -> bytes:
        """Step 2, first half: check the openings of U1 and open the boxes, before anything is computed.

        Args:
            openings: Openings of U1, with the boxes for this client.
            task: Digest of what all clients of U1 are sent in this step.

        Returns:
            a signature of the client's view.

        Raises:
            SecureError: an opening is not signed by its client, a box is not for this one, or they are fewer than t.
        """
        self._next(2)
        round, state = self.round, self._state
        opened = round.check_survivors(sorted(openings), round.cohort)
        own = openings.get(self.client)
        if own is None or (own.public, own.commitment) != self._announced:
            raise SecureError("the opening of this client is missing, or another one")
        box_key = X25519PrivateKey.from_private_bytes(state.box)
        for client, opening in openings.items():
            content = round.opening_content(client, opening.public, opening.commitment)
            if not self.verify(client, content, opening.signature):
                raise SecureError(f"the opening of client {client} is not signed by its key")
            if client != self.client:
                key = self._box(box_key, client, sender=client, receiver=self.client)
                shares = unseal(key, opening.boxes.get(self.client, b""), round.digest)
                if len(shares) != 2 * shamir.SHARE_BYTES:
                    raise SecureError(f"the box of client {client} does not hold two shares")
                state.held[client] = shares[: shamir.SHARE_BYTES], shares[shamir.SHARE_BYTES :]
        state.box, state.among, state.view = b"", opened, round.view(openings, task)
        self._publics = {client: openings[client].public for client in opened}
        return self.sign(round.view_content(self.client, state.view))

    def noise(self, rng: np.random.Generator) -> Integers:
        """Return (size,) integers of noise in all layers, from a secret generator; their key is kept until step 4."""
        self._state.noise = rng.bytes(KEY_BYTES)
        noise, self._state.digests = self.round.layers.draw(self._state.noise, self.round.size)
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
        masked = vector.copy()
        add_mask(masked, _self_mask_key(round, self._state.seed))
        key = _round_key(round, self._state.key_seed)
        for client, public in publics.items():
            if client != self.client:
                mask_key = _pair_mask_key(round, key, publics[self.client], public)
                add_mask(masked, mask_key, subtract=self.client > client)
        return masked

    def sign_survivors(self, survivors: Iterable[int], views: Mapping[int, bytes]) -> bytes:
        """Step 3: return a signature of U2.

        Args:
            survivors: U2.
            views: Signatures of the views of U2, by client.

        Raises:
            SecureError: U2 has fewer than t clients, others than U1, lacks this one, or a client has another view.
        """
        self._next(3)
        round, state = self.round, self._state
        signed = round.check_survivors(survivors, state.among)
        if self.client not in signed:
            raise SecureError("the survivors lack this client")
        for client in signed:
            content = round.view_content(client, state.view)
            if client != self.client and not self.verify(client, content, views.get(client, b"")):
                raise SecureError(f"client {client} has not signed the view of this client")
        state.signed = signed
        return self.sign(round.survivors_content(state.view, signed))

    def unmask(self, signatures: Mapping[int, bytes]) -> Shares:
        """Step 4: return the shares and the surplus of the noise, and forget all secrets of the round.

        Raises:
            SecureError: fewer than t survivors signed the list that this client signed.
        """
        self._next(4)
        signed, held = self._state.signed, self._state.held
        content = self.round.survivors_content(self._state.view, signed)
        signers = [client for client in signed if self.verify(client, content, signatures.get(client, b""))]
        if len(signers) < self.round.threshold:
            raise SecureError(
                f"{len(signers)} of {self.round.threshold} required clients signed this list of survivors"
            )
        surplus = self.round.layers.surplus(self._state.noise, self._state.digests, len(signed))
        self._state = _Secrets(4, b"", b"")
        return Shares(
            {client: held[client][0] for client in signed},
            {client: held[client][1] for client in held.keys() - set(signed)},
            surplus,
        )


def unmasked_sum(
    round: MaskedRound, openings: Mapping[int, Opening], vectors: Mapping[int, Vector], shares: Mapping[int, Shares]
) -> tuple[Vector, int]:
    """Step 5: return the sum of the survivors' vectors modulo 2^32, and the number of those whose surplus stays in it.

    Args:
        round: The round.
        openings: Openings of U1.
        vectors: Masked vectors of U2.
        shares: Shares of at least t clients of U2.

    Raises:
        SecureError: there are too few shares, or those of a client are wrong.
    """
    survivors = round.check_survivors(sorted(vectors), openings)
    givers = round.check_survivors(sorted(shares), survivors)[: round.threshold]
    numbers = {client: number for number, client in enumerate(round.cohort, start=1)}
    weights = shamir.weights([numbers[giver] for giver in givers])

    def secret(client: int, field: Callable[[Shares], Mapping[int, bytes]]) -> bytes:
        return shamir.combine({numbers[giver]: field(shares[giver]).get(client, b"") for giver in givers}, weights)

    total = np.zeros(round.size, np.uint32)
    for client in survivors:
        seed = secret(client, lambda given: given.seeds)
        if not hmac.compare_digest(_commitment(round, client, seed), openings[client].commitment):
            raise SecureError(f"the shares of client {client}'s seed are not those of its opening")
        total += vectors[client]
        add_mask(total, _self_mask_key(round, seed), subtract=True)
    for client in sorted(openings.keys() - vectors.keys()):
        key = _round_key(round, secret(client, lambda given: given.keys))
        public = openings[client].public
        if key.public_key().public_bytes_raw() != public:
            raise SecureError(f"the shares of client {client}'s key are not those of its opening")
        for survivor in survivors:
            mask_key = _pair_mask_key(round, key, public, openings[survivor].public)
            # The survivor added the mask if its number is the smaller one.
            add_mask(total, mask_key, subtract=survivor < client)
    surplus, revealed = round.layers.total_surplus(
        (given.surplus for given in shares.values()), round.size, len(survivors)
    )
    return total - to_modulus(surplus), len(survivors) - revealed
