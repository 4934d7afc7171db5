"""The operator's signing key: made once, never overwritten, read by its owner alone."""

import hashlib
import shutil
import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from kit.commands import assert_refused, tree

from coterie.site.errors import DeployError
from coterie.site.operator_keys import operator_fingerprint, read_operator_key, read_operator_public, verifies


def test_the_public_part_verifies_what_the_key_signs(pki):
    key, public = read_operator_key(pki / "operator.key"), read_operator_public(pki / "operator.pub")
    signature = key.sign(b"content")
    assert verifies(public, b"content", signature)
    assert not verifies(public, b"content.", signature)
    for wrong in (b"", signature[:-1], signature + b"\0", bytes(64), signature[::-1]):
        assert not verifies(public, b"content", wrong)
    assert not verifies(Ed25519PrivateKey.generate().public_key(), b"content", signature)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_gives_the_same_fingerprint(pki):
    command = ["openssl", "pkey", "-pubin", "-in", str(pki / "operator.pub"), "-outform", "DER"]
    der = subprocess.run(command, capture_output=True, check=True).stdout
    assert hashlib.sha256(der).hexdigest() == operator_fingerprint(read_operator_public(pki / "operator.pub"))


def test_a_folder_of_an_earlier_version_gets_a_key_once(coterie, pki):
    for name in ("operator.key", "operator.pub"):
        (pki / name).unlink()
    before = tree(pki)
    assert "operator.key" in coterie("certs", pki, "--operator-key")[1]
    after = tree(pki)
    assert set(after) - set(before) == {"operator.key", "operator.pub"}
    assert {name: after[name] for name in before} == before
    assert (pki / "operator.key").stat().st_mode & 0o777 == 0o600
    for missing in (None, "operator.key", "operator.pub"):  # half a pair is not overwritten either
        if missing:
            (pki / missing).rename(pki / "away")
        now = tree(pki)
        assert_refused(coterie("certs", pki, "--operator-key"), "never overwritten", "keep the public one")
        assert tree(pki) == now
        if missing:
            (pki / "away").rename(pki / missing)


def test_other_changes_keep_the_key(coterie, pki):
    key = (pki / "operator.key").read_bytes()
    for words in (["--nodes", "1", "--more"], ["--renew-server"], ["--renew-authority"], ["--retire-authorities"]):
        assert coterie("certs", pki, *words)[0] == 0
        assert (pki / "operator.key").read_bytes() == key


@pytest.mark.parametrize(
    ("content", "mode", "parts"),
    [
        (None, 0o600, ["--key", "does not exist"]),
        (b"", 0o600, ["not an Ed25519 private key"]),
        (b"\0\xff", 0o600, ["not an Ed25519 private key"]),
        ("server.key", 0o600, ["not an Ed25519 private key"]),
        ("nodes/node-0.key", 0o600, ["not an Ed25519 private key"]),
        ("operator.pub", 0o600, ["not an Ed25519 private key"]),
        ("operator.key", 0o640, ["mode 0640", "chmod 600"]),
        ("locked", 0o600, ["passphrase"]),
    ],
    ids=str,
)
def test_refused_private_keys(pki, content, mode, parts):
    path = pki / "other.key"
    if content == "locked":
        locked = BestAvailableEncryption(b"secret")
        content = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked)
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else (pki / content).read_bytes())
        path.chmod(mode)
    with pytest.raises(DeployError) as refused:
        read_operator_key(path)
    assert all(part in str(refused.value) for part in parts)


@pytest.mark.parametrize("name", ["operator.key", "ca.crt", "nodes/node-0.pub", "nothing", "nodes"])
def test_refused_public_keys(pki, name):
    with pytest.raises(DeployError, match="--public-key"):
        read_operator_public(pki / name)
