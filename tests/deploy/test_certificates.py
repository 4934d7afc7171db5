"""Certificates and keys: layout and modes, who vouches for what, growth, renewal, and what is refused."""

import argparse
import os
import shutil
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import verification
from kit.commands import assert_refused, document, tree
from kit.tables import for_rows

from coterie.deploy.certificates import add_nodes, create, renew_server
from coterie.site.errors import DeployError

HOSTS = ("Superlink", "fl.example.org", "10.0.0.1", "fd00::1")
LOOPBACK = ["localhost", "127.0.0.1", "::1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made once, read by many."""
    made = create(tmp_path_factory.mktemp("certificates") / "pki", 2, HOSTS)
    return made.folder


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path):
    extension = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in extension.value]


def verify(authority, leaf, name):
    """As a client of TLS does."""
    store = verification.Store([certificate(authority)])
    verifier = verification.PolicyBuilder().store(store).build_server_verifier(x509.DNSName(name))
    return verifier.verify(certificate(leaf), [])


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_layout_and_modes_whatever_the_umask(tmp_path, monkeypatch, umask):
    first = []
    really_open = os.open

    def opened(path, flags, *rest, **more):
        descriptor = really_open(path, flags, *rest, **more)
        if flags & os.O_CREAT:
            first.append(os.fstat(descriptor).st_mode & 0o777)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    before = os.umask(umask)
    try:
        made = create(tmp_path / "pki", 2, ["superlink"])
    finally:
        os.umask(before)
    expected = {"ca.crt", "ca.key", "server.crt", "server.key", "superexec.secret", "roster.json"}
    expected |= {"operator.key", "operator.pub"}
    expected |= {f"nodes/node-{i}.{end}" for i in (0, 1) for end in ("key", "pub", "crt", "tls.key")}
    there = {str(path.relative_to(made.folder)): path.stat().st_mode & 0o777 for path in made.folder.rglob("*")}
    assert there.pop("nodes") == made.folder.stat().st_mode & 0o777 == 0o700
    assert set(there) == set(made.files) == expected
    for name, mode in there.items():
        assert mode == (0o644 if name.endswith((".crt", ".pub", ".json")) else 0o600), name
    assert len(first) == len(expected)
    assert not any(mode & 0o077 for mode in first)  # no file was ever open to others, not even while empty
    assert [path.name for path in tmp_path.iterdir()] == ["pki"]


def test_names(folder):
    assert names(folder / "server.crt") == ["superlink", *HOSTS[1:], *LOOPBACK]
    assert names(folder / "nodes" / "node-1.crt") == ["supernode-1", *LOOPBACK]


def test_the_chain_holds(folder, tmp_path):
    other = create(tmp_path / "other", 1, ["superlink"]).folder
    names = {"server": "fl.example.org", "nodes/node-0": "supernode-0", "nodes/node-1": "localhost"}
    for stem, name in names.items():
        leaf, key = folder / f"{stem}.crt", folder / (f"{stem}.key" if stem == "server" else f"{stem}.tls.key")
        assert len(verify(folder / "ca.crt", leaf, name)) == 2
        assert load_pem_private_key(key.read_bytes(), None).public_key() == certificate(leaf).public_key()
        for authority, asked in ((folder, "elsewhere.example"), (other, name)):
            with pytest.raises(verification.VerificationError):
                verify(authority / "ca.crt", leaf, asked)


def test_openssl_agrees(folder):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    leaves = [folder / "server.crt", *sorted(folder.glob("nodes/*.crt"))]
    words = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", folder / "ca.crt", *leaves]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": OK") == 3


def test_days(tmp_path):
    made = create(tmp_path / "pki", 1, ["superlink"], days=30)
    for name, days in (("server.crt", 30), ("nodes/node-0.crt", 30), ("ca.crt", 3650)):
        left = certificate(made.folder / name).not_valid_after_utc - datetime.now(UTC)
        assert abs(left - timedelta(days=days)) < timedelta(minutes=1), name
    later = renew_server(made.folder, days=36500)  # no longer than who vouches for it
    assert later.expires == later.authority_expires == certificate(made.folder / "server.crt").not_valid_after_utc


# ---- Flower takes them ------------------------------------------------------------------------------------


def test_flower_takes_keys_and_secret(folder):
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.auth import load_superexec_auth_secret
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    for number in (0, 1):
        path = folder / "nodes" / f"node-{number}.key"
        given = argparse.Namespace(auth_supernode_private_key=str(path), auth_supernode_public_key=None)
        private, public = _try_setup_client_authentication(given)
        assert isinstance(private.curve, ec.SECP384R1)
        assert try_load_public_key(path.with_suffix(".pub")) == public_key_to_bytes(public)
        assert path.with_suffix(".pub").read_text().endswith(f" node-{number}\n")
    assert len(load_superexec_auth_secret(str(folder / "superexec.secret"))) == 64


def test_ssh_keygen_agrees(folder):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen on this machine")
    key = folder / "nodes" / "node-0.key"
    done = subprocess.run(["ssh-keygen", "-y", "-f", key], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == key.with_suffix(".pub").read_text().split()[:2]


# ---- growth and renewal -----------------------------------------------------------------------------------


def test_more_nodes(copy):
    before = {name: content for name, content in tree(copy).items() if name != "roster.json"}
    (copy / "superexec.secret").unlink()  # growth needs the authority alone
    (copy / "server.crt").unlink()
    made = add_nodes(copy, 9)
    assert made.nodes == tuple(range(2, 11))
    assert add_nodes(copy, 1).nodes == (11,)  # numbers are numbers, not text
    after = tree(copy)
    assert len(set(after) - set(before)) == 41  # with the roster, which is the only file that changes
    assert {name: after[name] for name in set(before) & set(after)}.items() <= before.items()
    verify(copy / "ca.crt", copy / "nodes" / "node-11.crt", "supernode-11")
    assert (copy / "nodes" / "node-11.key").stat().st_mode & 0o777 == 0o600
    assert not list(copy.glob(".*"))


def test_a_renewed_server_keeps_its_names_or_gets_new_ones(copy):
    before, old = tree(copy), names(copy / "server.crt")
    made = renew_server(copy)
    after = tree(copy)
    assert {name for name in before if before[name] != after[name]} == {"server.crt", "server.key"} == set(made.files)
    assert set(after) == set(before)
    assert names(copy / "server.crt") == old == list(made.names)
    verify(copy / "ca.crt", copy / "server.crt", "superlink")
    renew_server(copy, ["new.example.org"])
    assert names(copy / "server.crt") == ["new.example.org", *LOOPBACK]
    key = load_pem_private_key((copy / "server.key").read_bytes(), None)
    assert key.public_key() == certificate(copy / "server.crt").public_key()


# ---- refused, and nothing changed -------------------------------------------------------------------------


@for_rows(
    ("words", "parts"),
    [
        (["--nodes", "1", "--host", "a"], ["copy", "not empty", "--more", "--renew-server"]),
        (["--nodes", "1"], ["--host is required"]),
        (["--host", "a"], ["--nodes is required"]),
        (["--more"], ["--nodes is required"]),
        (["--more", "--nodes", "1", "--host", "a"], ["--host", "--renew-server"]),
        (["--more", "--renew-server"], ["cannot be combined"]),
        (["--renew-server", "--nodes", "1"], ["--nodes cannot be used"]),
        (["--renew-server", "--host", "https://a"], ["--host https://a", "without scheme"]),
        (["--renew-server", "--host", "a:9092"], ["--host a:9092"]),
        (["--renew-server", "--host", "300.1.1.1"], ["--host 300.1.1.1"]),
        (["--renew-server", "--host", "a..b"], ["--host a..b"]),
        (["--renew-server", "--host", ""], ["--host"]),
        (["--submitter", "a", "--remove-submitter", "a"], ["combined"]),
        (["--submitter", "a", "--nodes", "1"], ["--nodes cannot be used with --submitter"]),
        (["--renew-node", "1", "--remove-node", "1"], ["--renew-node and --remove-node", "combined"]),
        (["--renew-authority", "--retire-authorities"], ["combined"]),
        (["--sign-roster", "--nodes", "1"], ["--nodes cannot be used with --sign-roster"]),
        (["--renew-node", "1", "--host", "a"], ["--host cannot be used with --renew-node"]),
    ],
)
def test_refused_words(coterie, copy, words, parts):
    before = tree(copy)
    assert_refused(coterie("certs", copy, *words), *parts)
    assert tree(copy) == before


def test_any_file_in_the_way_is_enough(tmp_path):
    (tmp_path / "pki").mkdir()
    create(tmp_path / "pki", 1, ["a"])  # an empty folder is none
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ca.key").write_text("precious")
    with pytest.raises(DeployError, match="not empty"):
        create(tmp_path / "keys", 1, ["a"])
    with pytest.raises(DeployError, match="is a file"):
        create(tmp_path / "keys" / "ca.key", 1, ["a"])
    assert (tmp_path / "keys" / "ca.key").read_text() == "precious"


@pytest.mark.parametrize("change", [lambda folder: add_nodes(folder, 1), renew_server], ids=["more", "renew"])
def test_without_a_sound_authority_nothing_is_vouched_for(copy, clock, change):
    def refuses(what):
        before = tree(copy)
        with pytest.raises(DeployError, match=what):
            change(copy)
        assert tree(copy) == before

    key = (copy / "ca.key").read_bytes()
    (copy / "ca.key").write_bytes((copy / "server.key").read_bytes())
    refuses("not the key of")
    (copy / "ca.key").write_text("torn")
    refuses("not a certificate and a key")
    (copy / "ca.key").unlink()
    refuses("restore ca.crt and ca.key")
    (copy / "ca.key").write_bytes(key)
    change(copy)
    with clock(days=3651):
        refuses("expired on .* new authority")


def test_a_full_disk_leaves_nothing_behind(copy, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    before = tree(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    for change in (lambda: create(tmp_path / "new", 1, ["a"]), lambda: add_nodes(copy, 1), lambda: renew_server(copy)):
        with pytest.raises(DeployError, match="No space left"):
            change()
    assert tree(tmp_path) == before


def test_a_server_s_certificate_that_is_lost_needs_names(copy):
    (copy / "server.crt").unlink()
    with pytest.raises(DeployError, match="--renew-server --host"):
        renew_server(copy)
    renew_server(copy, ["superlink"])
    verify(copy / "ca.crt", copy / "server.crt", "superlink")


# ---- the command ------------------------------------------------------------------------------------------


def test_the_command(coterie, tmp_path):
    status, out, err = coterie("certs", "pki", "--nodes", 2, "--host", "superlink", "--json")
    assert (status, err) == (0, "")
    made = document(out)
    assert (made["folder"], made["nodes"]) == ("pki", [0, 1])
    assert made["server-names"] == ["superlink", *LOOPBACK]
    assert made["files"] == sorted(name for name, content in tree(tmp_path / "pki").items() if content is not None)
    assert datetime.fromisoformat(made["expires"]) < datetime.fromisoformat(made["authority-expires"])
    status, out, err = coterie("certs", "pki", "--nodes", 1, "--more")
    assert (status, err) == (0, "")
    assert "nodes 2 to 2" in out
    status, out, err = coterie("certs", "pki", "--renew-server", "--host", "other")
    assert (status, err) == (0, "")
    assert "server other" in out
