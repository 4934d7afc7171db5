"""Small finished run folders without training: ledger, certificate, models with cards, SHA256SUMS, signature."""

import json
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.deploy.operator_keys import public_pem
from coterie.privacy import Joint, certificate, read_ledger
from coterie.privacy.manifest import CERTIFICATE, LEDGER, MANIFEST, SIGNATURE, manifest_of
from coterie.server.checkpoints import tensor_content

OPERATOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
HEADER = {
    "seed": None,
    "diagnostics": ["when each charge was made"],
    "public": {"server-lr": 1.0},
    "tuned": {"strategy": "ifca"},
    "unfounded": [],
}


def joint(rounds=3, **changes):
    """A plan of client level."""
    numbers = {"clients": 1000, "num_clusters": 2, "sampling_rate": 0.2, "epsilon": 4.0, "delta": 1e-5}
    return Joint.calibrated(**{**numbers, "rounds": rounds, "clip_norm": 1.0, **changes})


def make(folder, plan, rounds=None, models=2, **header):
    """Make a folder in which so many rounds of a plan are charged; all of them by default."""
    (folder / "models").mkdir(parents=True)
    ledger = plan.ledger(folder / LEDGER, **{**HEADER, **header})
    for number in range(1, 1 + (plan.rounds if rounds is None else rounds)):
        ledger.charge_round(number, plan.round_event(number), **{"for": "training"})
    ledger.close()
    certify(folder)
    for cluster in range(models):
        write_model(folder, cluster)
    seal(folder)
    return folder


def certify(folder):
    """Write the certificate that follows from the ledger."""
    write_certificate(folder, certificate(*read_ledger(folder / LEDGER)))


def write_certificate(folder, document):
    (folder / CERTIFICATE).write_text(json.dumps(document, indent=2) + "\n")


def write_model(folder, cluster, **card):
    digest = sha256((folder / CERTIFICATE).read_bytes()).hexdigest()
    tensors = {"weight": np.full((2, 3), cluster, dtype=np.float32)}
    content = tensor_content(tensors, {"cluster": cluster, "certificate": digest, **card})
    (folder / "models" / f"cluster-{cluster}.safetensors").write_bytes(content)


def seal(folder, key=None):
    """Write SHA256SUMS, and its signature by a key."""
    (folder / MANIFEST).write_bytes(manifest_of(folder))
    if key is not None:
        sign(folder, key)


def sign(folder, key=OPERATOR):
    (folder / SIGNATURE).write_bytes(key.sign((folder / MANIFEST).read_bytes()))


def public_key(path, key=OPERATOR):
    """Write a public key, and return its file."""
    path.write_bytes(public_pem(key.public_key()))
    return path
