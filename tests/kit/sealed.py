"""Small finished run folders without training: ledger, certificate, models with cards, SHA256SUMS, signature."""

import json
import os
import shutil
from hashlib import sha256

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.privacy import Joint, RecordLevel, RecordPlan, certificate, read_ledger
from coterie.privacy.manifest import CERTIFICATE, LEDGER, MANIFEST, SIGNATURE, manifest_of
from coterie.server.checkpoints import tensor_content
from coterie.site.operator_keys import public_pem

MODEL = "models/cluster-0.safetensors"
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


def record(clients=5, profiles=(1.0,), **changes):
    """A plan of record level; profiles are budgets of clients in units of the first one's."""
    numbers = {"num_examples": 600, "batch_size": 30, "rounds": 4, "epsilon": 5.0, "delta": 1e-5}
    numbers |= changes
    plans = tuple(RecordPlan.calibrated(**{**numbers, "epsilon": share * numbers["epsilon"]}) for share in profiles)
    return RecordLevel.of(plans, clients=clients, num_clusters=2, weights="equal")


def make(folder, plan, rounds=None, models=2, charge=None, **header):
    """Make a folder in which so many rounds of a plan are charged; all of them by default, or as ``charge`` does."""
    (folder / "models").mkdir(parents=True)
    ledger = plan.ledger(folder / LEDGER, **{**HEADER, **header})
    (charge or charge_rounds)(ledger, plan, plan.rounds if rounds is None else rounds)
    ledger.close()
    certify(folder)
    for cluster in range(models):
        write_model(folder, cluster)
    seal(folder)
    return folder


def charge_rounds(ledger, plan, rounds):
    """Charge rounds 1 to ``rounds``, and all private evaluations in the last one."""
    for number in range(1, rounds + 1):
        events = {plan.round_event(number): 1}
        if isinstance(plan, RecordLevel):
            chooses = 1 < number <= 1 + plan.worst.selections
            events = plan.worst.part(first=number == 1, chooses=chooses)
        for event, many in events.items():
            ledger.charge_round(number, event, many, **{"for": "training"})
    if isinstance(plan, RecordLevel):
        for event, many in plan.worst.losses(plan.worst.compared).items() if plan.worst.compared else ():
            ledger.charge_round(rounds, event, many, **{"for": "training"})
        if plan.histograms:
            plan.charge_histogram(ledger, rounds)
    elif rounds == plan.rounds:
        for _ in range(plan.evaluations):
            ledger.charge_round(rounds, plan.evaluation_event(), **{"for": "evaluation"})
        if plan.histograms:
            plan.charge_histogram(ledger, rounds)


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


# ---- what somebody may do to a folder, and a part of the first problem ----------------------------------------


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def append(path, content):
    path.write_bytes(path.read_bytes() + content)


def swap(run):
    first, second = (run / "models" / f"cluster-{j}.safetensors" for j in (0, 1))
    first.rename(run / "away")
    second.rename(first)
    (run / "away").rename(second)


def link(path):
    target = path.parent.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


CHANGES = {
    "one bit of a model": (lambda run: flip(run / MODEL), "cluster-0.safetensors has another"),
    "models swapped": (swap, "cluster-0.safetensors has another"),
    "a further model": (lambda run: shutil.copy(run / MODEL, run / "models/cluster-7.safetensors"), "cluster-7"),
    "a further hidden file": (lambda run: (run / "models/.hidden").write_text(""), ".hidden is not in"),
    "a further folder": (lambda run: (run / "models/more").mkdir(), "more is not in"),
    "a model less": (lambda run: (run / MODEL).unlink(), "No such file"),
    "no models": (lambda run: shutil.rmtree(run / "models"), "No such file"),
    "a link to the same model": (lambda run: link(run / MODEL), "symbolic link"),
    "a link to nothing": (lambda run: [(run / MODEL).unlink(), (run / MODEL).symlink_to("no")], "symbolic link"),
    "a linked folder": (lambda run: link(run / "models"), "symbolic link"),
    "a FIFO": (lambda run: [(run / MODEL).unlink(), os.mkfifo(run / MODEL)], "not a regular file"),
    "a folder as a model": (lambda run: [(run / MODEL).unlink(), (run / MODEL).mkdir()], "not a regular file"),
    "a space in the certificate": (lambda run: append(run / "privacy.json", b" "), "privacy.json has another"),
    "no certificate": (lambda run: (run / "privacy.json").unlink(), "No such file"),
    "a linked certificate": (lambda run: link(run / "privacy.json"), "symbolic link"),
    "an empty list": (lambda run: (run / "SHA256SUMS").write_text(""), "damaged"),
    "no text": (lambda run: (run / "SHA256SUMS").write_bytes(b"\xff\0"), "damaged"),
    "a list linked to nothing": (
        lambda run: [(run / "SHA256SUMS").unlink(), (run / "SHA256SUMS").symlink_to("no")],
        "symbolic link",
    ),
    "a linked list": (lambda run: link(run / "SHA256SUMS"), "symbolic link"),
    "a linked signature": (
        lambda run: [(run / "SHA256SUMS.sig").unlink(missing_ok=True), (run / "SHA256SUMS.sig").symlink_to("no")],
        "symbolic link",
    ),
}
