"""Seconds and bytes of a masked round: `python benchmarks/masked_rounds.py [--clients 30 200 400 1000]`.

One client does all its work. The other clients do what it and the server need: they sign openings, seal shares for it,
and send vectors of zeros. Their Shamir shares are all equal, which costs the server the same. A tenth drops out after
step 1 in the last column. Times are CPU seconds of one core; bytes are of one client.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto

from coterie.privacy.discrete_gaussians import STEPS
from coterie.privacy.secure_aggregation import MaskedRound, MaskingClient, NoiseLayers, Opening, Shares, unmasked_sum
from coterie.privacy.secure_aggregation import masking as protocol
from coterie.privacy.secure_aggregation.integers import to_modulus
from coterie.privacy.secure_aggregation.keys import agree, seal
from coterie.wire.masked import (
    PURPOSE,
    OpenRequest,
    SignedKey,
    SurvivorsRequest,
    UnmaskRequest,
    box_content,
    opened_fields,
    pack_masked,
    pack_opening,
    pack_shares,
    pack_signature,
)
from coterie.wire.messages import CONFIG
from coterie.wire.requests import MaskedTrainRequest

T = TypeVar("T")
BOUND: dict[str, Any] = {"run": "run", "round": 1, "attempt": 0}


@dataclass
class Peer:
    """Secrets of a client that is not measured."""

    seed: bytes = b"\x01" * 31
    key_seed: bytes = b"\x02" * 31
    signing: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    box: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)

    def sign(self, content: bytes) -> bytes:
        """Return a signature for masked rounds."""
        return self.signing.sign(PURPOSE + content)

    def key(self, client: int) -> SignedKey:
        """Return the public keys; the node's key and signature have their lengths alone."""
        box = self.box.public_key().public_bytes_raw()
        signing = self.signing.public_key().public_bytes_raw()
        return SignedKey(bytes(120), signing, bytes(104), box, self.sign(box_content(client, box)))

    def opening(self, round: MaskedRound, client: int, receiver: int, key: SignedKey) -> Opening:
        """Return the opening of a client, with a box for one receiver."""
        public = protocol._round_key(round, self.key_seed).public_key().public_bytes_raw()
        commitment = protocol._commitment(round, client, self.seed)
        direction = f"{client} to {receiver}".encode()
        box_key = agree(self.box, key.box, b"box", round.digest, direction)
        boxes = {receiver: seal(box_key, bytes(64), round.digest)}
        return Opening(public, commitment, self.sign(round.opening_content(client, public, commitment)), boxes)


class Timer:
    """CPU seconds of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a call, and add its time."""
        start = time.process_time()
        result = call(*arguments)
        self.seconds += time.process_time() - start
        return result


def size(content: RecordDict) -> int:
    """Return the bytes of a message."""
    return len(recorddict_to_proto(content).SerializeToString())


def request_size(request: Any) -> int:
    """Return the bytes of a request."""
    return size(RecordDict({CONFIG: ConfigRecord(request.to_record())}))


def measure(clients: int, numbers: int) -> dict[str, Any]:
    """Return seconds and bytes of a round of so many clients with vectors of so many numbers."""
    cohort, least = tuple(range(clients)), -(-7 * clients // 10)
    layers = NoiseLayers.of(2.0 * STEPS, clients, least, 1)
    round = MaskedRound(b"run", 1, 0, bytes(32), cohort, least, 1, numbers, layers)
    peers = [Peer() for _ in cohort]
    keys = {client: peers[client].key(client) for client in cohort}
    boxes = {client: key.box for client, key in keys.items()}
    client_time, who = Timer(), {"client_id": 0, "round": 1}
    client = MaskingClient(round, 0, boxes, peers[0].sign, lambda i, *rest: keys[i].has_signed(*rest))

    own = client_time(client.open, peers[0].box)
    lists = OpenRequest.key_lists(list(keys.values()))
    request = OpenRequest(
        **BOUND, release="training", plan="x" * 1000, parameters=numbers // 4, shared=0, cohort=cohort, **lists
    )
    down, up = request_size(request), size(pack_opening(own, keys[0], **who))
    openings = {i: own if i == 0 else peers[i].opening(round, i, 0, keys[0]) for i in cohort}
    view_signature = client_time(client.receive, openings, bytes(32))
    noise = client_time(client.noise, np.random.default_rng())
    vector = client_time(client.masked, to_modulus(noise))
    down += request_size(MaskedTrainRequest(**BOUND, **opened_fields(openings, 0)))
    up += size(pack_masked(vector, view_signature, **who))
    view = round.view(openings, bytes(32))
    views = {i: peers[i].sign(round.view_content(i, view)) for i in cohort}
    signature = client_time(client.sign_survivors, cohort, views)
    down += request_size(SurvivorsRequest(**BOUND, survivors=cohort, view_signatures=tuple(views.values())))
    up += size(pack_signature(signature, **who))
    signatures = {i: peers[i].sign(round.survivors_content(view, cohort)) for i in cohort}
    given = client_time(client.unmask, signatures)
    down += request_size(UnmaskRequest(**BOUND, signers=cohort, signatures=tuple(signatures.values())))
    up += size(pack_shares(given, **who))
    openings[0] = peers[0].opening(round, 0, 1, keys[1])
    server = [server_seconds(round, openings, dropped, peers[0]) for dropped in (0, clients // 10)]
    return {
        "clients": clients, "numbers": numbers, "client_seconds": client_time.seconds, "bytes_up": up,
        "bytes_down_without_models": down, "server_seconds": server[0], "server_seconds_tenth_dropped": server[1],
    }  # fmt: skip


def server_seconds(round: MaskedRound, openings: dict[int, Opening], dropped: int, peer: Peer) -> float:
    """Return the CPU seconds in which a server removes the masks, without surplus layers."""
    survivors, timer = round.cohort[: len(round.cohort) - dropped], Timer()
    seed, key_seed = (b"\x00" + secret for secret in (peer.seed, peer.key_seed))
    shares = Shares(dict.fromkeys(survivors, seed), dict.fromkeys(round.cohort[len(survivors) :], key_seed))
    vectors = dict.fromkeys(survivors, np.zeros(round.size, np.uint32))
    timer(unmasked_sum, round, openings, vectors, dict.fromkeys(survivors, shares))
    return timer.seconds


def main() -> None:
    """Print a line of JSON for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[30, 200, 400, 1000])
    parser.add_argument("--numbers", type=int, default=320_000, help="entries of a vector")
    options = parser.parse_args()
    for clients in options.clients:
        print(json.dumps(measure(clients, options.numbers)), flush=True)


if __name__ == "__main__":
    main()
