"""The file with which a site joins: who can open it, what becomes of one that was changed, and what a client does."""

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kit.commands import assert_refused
from kit.servers import free_port, listening, tls
from kit.tables import for_rows

from coterie.deploy.bundles import OPENED, PASSPHRASE, opened, read_header, seal, unseal
from coterie.deploy.certificates import create, state_app
from coterie.site.errors import DeployError

NAMES = {"ca.crt", "roster.json", "node-1.key", "node-1.crt", "node-1.tls.key"}


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return create(tmp_path_factory.mktemp("bundles") / "pki", 2, ["fl.example.org"]).folder


@pytest.fixture
def sealed(pki, tmp_path):
    """A bundle of node 1, and its passphrase."""
    content, passphrase = seal(pki, 1, "fl.example.org:9092")
    (tmp_path / "node-1.coterie").write_bytes(content)
    return tmp_path / "node-1.coterie", passphrase


def test_a_site_gets_its_own_files_and_no_others(pki, sealed, tmp_path):
    bundle, passphrase = sealed
    assert opened(bundle, tmp_path / "state") is None
    site = unseal(bundle, f" {passphrase.upper()}\n", tmp_path / "state")
    assert (site.folder, site.superlink, site.node) == (tmp_path / "state" / OPENED, "fl.example.org:9092", 1)
    there = {path.name: path for path in site.folder.iterdir()}
    assert there.keys() == NAMES | {"superlink", "bundle.sha256"}
    assert {path.stat().st_mode & 0o777 for path in there.values()} == {0o600}
    for name in NAMES:
        source = pki / "nodes" / name if name.startswith("node") else pki / name
        assert there[name].read_bytes() == source.read_bytes()
    assert opened(bundle, tmp_path / "state") == site
    assert [path.name for path in (tmp_path / "state").iterdir()] == [OPENED]
    # What lies in the file in the clear is no secret, and nothing of the files.
    assert read_header(bundle).to_record().keys() == {"coterie-bundle", "node", "expires", "salt", "nonce"}
    assert b"BEGIN" not in bundle.read_bytes()


def test_another_bundle_of_the_site_takes_its_place(pki, sealed, tmp_path):
    state = tmp_path / "state"
    unseal(*sealed, state)
    (tmp_path / "newer").write_bytes(seal(pki, 1, "fl.example.org:443")[0])
    assert opened(tmp_path / "newer", state) is None
    content, passphrase = seal(pki, 1, "fl.example.org:443")
    sealed[0].write_bytes(content)
    assert unseal(sealed[0], passphrase, state).superlink == "fl.example.org:443"


def test_the_passphrases_of_two_bundles_differ_and_open_their_own(pki, sealed, tmp_path):
    other = seal(pki, 1, "fl.example.org:9092")[1]
    assert len({other, sealed[1]}) == 2
    assert len(other.replace("-", "")) == 24  # 120 bits
    for wrong in (other, "", sealed[1][:-1]):
        with pytest.raises(DeployError, match="does not open"):
            unseal(sealed[0], wrong, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_changed_bundle_does_not_open(sealed, tmp_path):
    bundle, passphrase = sealed
    content = bundle.read_bytes()
    line, _, body = content.partition(b"\n")
    header = json.loads(line)
    headers = [{**header, "node": 0}, {**header, "expires": "2999-01-01T00:00:00+00:00"}, {**header, "salt": "00" * 16}]
    changed = [json.dumps(each).encode() + b"\n" + body for each in headers]
    changed += [content[:-1], content + b"\0", line + b" \n" + body, line + b"\n", line]
    changed += [
        content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        for place in (len(line) + 1, -1 % len(content))
    ]
    for each in changed:
        bundle.write_bytes(each)
        with pytest.raises(DeployError, match="does not open"):
            unseal(bundle, passphrase, tmp_path / "state")
    assert not (tmp_path / "state").exists()


NO_BUNDLES = [b"", b"\n", b"{}\n", b"PK\3\4", b"\xff" * 100, b"[1]\n", b'{"coterie-bundle": 1}\n', b"x" * (2 << 20)]


@for_rows("content", [*NO_BUNDLES, b"{" * 5000])
def test_another_file_is_no_bundle(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DeployError, match="is no bundle of coterie certs --bundle"):
        read_header(tmp_path / "file")


@pytest.mark.parametrize(
    "change", [{"salt": "xy"}, {"nonce": "é"}, {"expires": "soon"}, {"node": -1}, {"node": "../1"}]
)
def test_a_header_that_means_nothing_is_no_bundle(sealed, change):
    line, _, body = sealed[0].read_bytes().partition(b"\n")
    sealed[0].write_bytes(json.dumps(json.loads(line) | change).encode() + b"\n" + body)
    with pytest.raises(DeployError, match="is no bundle"):
        read_header(sealed[0])


def test_a_bundle_of_a_later_version_and_one_that_has_expired(sealed, tmp_path, clock):
    bundle, passphrase = sealed
    line, _, body = bundle.read_bytes().partition(b"\n")
    (tmp_path / "later").write_bytes(json.dumps(json.loads(line) | {"coterie-bundle": 2}).encode() + b"\n" + body)
    with pytest.raises(DeployError, match="later version"):
        read_header(tmp_path / "later")

    expired = pytest.raises(DeployError, match=f"expired on {read_header(bundle).expires:.10}: ask the operator")
    with clock(826, "coterie.deploy.bundles"), expired:
        unseal(bundle, passphrase, tmp_path / "state")
    assert datetime.fromisoformat(read_header(bundle).expires) > datetime.now(UTC)


@pytest.fixture
def client(coterie, tmp_path, monkeypatch):
    """`coterie client` on data of two records; returns its answer, and what it would execute."""
    calls = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    (tmp_path / "data.csv").write_text("a,label\n1,0\n2,1\n")

    def call(*words, passphrase="", **more):
        calls.clear()
        monkeypatch.setenv(PASSPHRASE, passphrase)
        declared = ["--input-shape", "1", "--num-classes", 2, "--columns", "a", "--guarantee", "trusted-server"]
        answer = coterie("client", *words, "--data", tmp_path / "data.csv", "--port", free_port(), *declared)
        return answer, calls[0] if calls else None

    return call


def test_a_client_joins_with_its_file_alone(client, pki, tmp_path, monkeypatch):
    bundle = tmp_path / "node-1.coterie"
    site = tmp_path / "home" / ".local" / "state" / "coterie" / "client-1" / OPENED
    state_app(pki, "ab" * 32)
    with listening(tls(pki)) as port:
        content, passphrase = seal(pki, 1, f"localhost:{port}")
        bundle.write_bytes(content)
        assert_refused(client(bundle)[0], str(bundle), PASSPHRASE)
        assert_refused(client(bundle, passphrase="abcd")[0], "does not open")
        (status, _, err), (_, argv, variables) = client(bundle, passphrase=passphrase)
        assert (status, err) == (0, "")
        assert PASSPHRASE not in variables
        assert argv[argv.index("--superlink") + 1] == f"localhost:{port}"
        assert argv[argv.index("--auth-supernode-private-key") + 1] == str(site / "node-1.key")
        assert argv[argv.index("--certificate") + 1] == str(site / "node-1.crt")
        assert argv[argv.index("--fab-hash") + 1] == "ab" * 32  # as the roster states
        assert f'roster="{site}/roster.json"' in argv[argv.index("--node-config") + 1]
        (status, _, err), (_, again, _) = client(bundle)  # opened once
        assert (status, err) == (0, "")
        assert set(again) - set(argv) == {again[again.index("--port") + 1]}
        assert_refused(client(bundle, "--key", site / "node-1.key")[0], "leave these options out")
    assert_refused(client()[0], "give BUNDLE")
    assert_refused(client("--superlink", "localhost:1")[0], "give BUNDLE")


def test_operators_write_bundles_of_the_nodes_that_they_have(coterie, tmp_path):
    pki = create(tmp_path / "pki", 2, ["fl.example.org"]).folder
    status, out, err = coterie("certs", pki, "--bundle", "all")
    assert (status, err) == (0, "")
    lines = [line.split() for line in out.splitlines()[:-1]]
    for node, (path, _, passphrase) in enumerate(lines):
        assert path == str(pki / "sites" / f"node-{node}.coterie")
        assert (
            unseal(pki / "sites" / f"node-{node}.coterie", passphrase, tmp_path / str(node)).superlink
            == "fl.example.org:9092"
        )
    assert len(lines) == 2
    assert_refused(coterie("certs", pki, "--bundle", 2), "has no such node; give all, or one of 0, 1")
    assert_refused(coterie("certs", pki, "--bundle", 1, "--renew-node", 1), "cannot be combined")
    (pki / "nodes" / "node-1.tls.key").unlink()
    assert_refused(coterie("certs", pki, "--bundle", 1), "node-1.tls.key cannot be read")
    for words, step in (
        (["--more", "--nodes", 2], f"coterie certs {pki} --bundle all"),
        (["--renew-node", 1], f"coterie certs {pki} --bundle 1"),
        (["--renew-server"], "start the SuperLink again"),
    ):
        status, out, err = coterie("certs", pki, *words)
        assert (status, f"next: {step}" in out) == (0, True), out + err
    status, out, _ = coterie("certs", pki, "--bundle", 3, "--superlink", "10.0.0.7:443", "--json")
    (bundle,) = json.loads(out)["bundles"]
    assert unseal(Path(bundle["file"]), bundle["passphrase"], tmp_path / "3").superlink == "10.0.0.7:443"


@pytest.fixture
def served(monkeypatch):
    """The flags of the SuperLink that `coterie server` would run."""
    from coterie.deploy import superlink

    flags = []
    monkeypatch.setattr(superlink, "serve", flags.extend)
    monkeypatch.setattr("threading.Thread.start", lambda thread: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return flags


def test_a_server_makes_its_folder_once(coterie, served, tmp_path):
    folder = tmp_path / "fl"
    before = os.umask(0o077)
    try:
        assert_refused(coterie("server", folder), "is new: give --nodes and --host")
        assert_refused(coterie("server", folder, "--nodes", 2), "is new: give --nodes and --host")
        assert not folder.exists()
        port, control = free_port(), free_port()
        ports = ["--port", port, "--control-port", control]
        status, out, err = coterie("server", folder, "--nodes", 2, "--host", "fl.example.org", *ports)
        assert (status, err) == (0, "")
        assert out.count("  passphrase ") == 2
        assert served[served.index("--fleet-api-address") + 1] == f"0.0.0.0:{port}"
        assert served[served.index("--host") + 1] == "127.0.0.1"  # runs are submitted without a password
        assert "--enable-supernode-auth" in served
        passphrase = out.split()[2]
        site = unseal(folder / "pki" / "sites" / "node-0.coterie", passphrase, tmp_path / "state")
        assert site.superlink == f"fl.example.org:{port}"
        assert_refused(coterie("server", folder, "--nodes", 2), "leave out --nodes and --host")
        with socket.create_server(("127.0.0.1", port)):
            assert_refused(coterie("server", folder, *ports), f"--port {port}: is in use")
        with socket.create_server(("127.0.0.1", control)):
            assert_refused(coterie("server", folder, *ports), f"--control-port {control}: is in use")
        status, out, err = coterie("server", folder, *ports, "--", "--runtime-api-ssl-x", 1)
        assert (status, out, err) == (0, "", "")
        assert served[-2:] == ["--runtime-api-ssl-x", "1"]
    finally:
        os.umask(before)
    others = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert {path.suffix for path in others} <= {".crt", ".pub", ".json"}
