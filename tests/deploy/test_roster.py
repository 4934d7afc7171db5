"""The roster: signed by the authority, changed by commands of ``coterie certs``, and checked by clients."""

import json
import shutil
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509 import verification
from kit.apps import app_folder
from kit.commands import assert_refused, document, tree
from kit.tables import for_rows

from coterie.deploy.certificates import create
from coterie.deploy.edge import Edge, checks
from coterie.fields.settings import ConfigError
from coterie.server.config import RunConfig
from coterie.server.run_requests import roster_of, submission_of
from coterie.site.errors import DeployError
from coterie.site.node import NodeConfig
from coterie.site.roster import Roster, RosterFile, fingerprint, read_authorities, read_newest


def read(folder):
    return Roster.read(folder / "roster.json", read_authorities(folder / "ca.crt"))


def key_of(folder, node):
    return fingerprint((folder / "nodes" / f"node-{node}.pub").read_bytes())


def clients(folder):
    return {member.key: member.client for member in read(folder).members}


def test_new_certificates_have_a_roster(pki, coterie):
    roster = read(pki)
    assert clients(pki) == {key_of(pki, node): node for node in range(3)}
    assert [(member.name, member.role) for member in roster.members] == [(f"node-{i}", "client") for i in range(3)]
    assert roster.number == 1
    left = roster.members[0].end - datetime.now(UTC)
    assert abs(left - timedelta(days=825)) < timedelta(minutes=5)
    assert coterie("certs", pki, "--nodes", 2, "--more")[0] == 0
    assert clients(pki) == {key_of(pki, node): node for node in range(5)}
    assert read(pki).number == 2


# ---- forgery ------------------------------------------------------------------------------------------------


def altered(content, **changes):
    return json.dumps({**json.loads(content), **changes}).encode()


def with_node(content, **changes):
    nodes = json.loads(content)["members"]
    return altered(content, members=[{**nodes[0], **changes}, *nodes[1:]])


FORGERIES = {
    "another client": lambda content: with_node(content, client=1),
    "another key": lambda content: with_node(content, key="0" * 64),
    "a later end": lambda content: with_node(content, expires="2999-01-01T00:00:00+00:00"),
    "one node less": lambda content: altered(content, members=json.loads(content)["members"][1:]),
    "another number": lambda content: altered(content, number=2),
    "no signature": lambda content: altered(content, signature=""),
    "no Base64": lambda content: altered(content, signature="é"),
    "a number for a signature": lambda content: altered(content, signature=1),
    "a further entry": lambda content: altered(content, more=1),
    "no JSON": lambda content: content[:-20],
    "a list": lambda content: b"[]",
    "nothing": lambda content: b"",
}


@for_rows("forge", FORGERIES.values())
def test_a_changed_roster_is_refused(pki, pki_once, forge):
    (pki / "roster.json").write_bytes(forge((pki_once / "roster.json").read_bytes()))
    with pytest.raises(DeployError, match=r"is not signed by|is not valid JSON|expected a JSON object"):
        read(pki)


def test_who_may_sign(pki, tmp_path, clock):
    """Neither another authority, nor the key of the server's certificate, nor an authority that has expired."""
    other = create(tmp_path / "other", 1, ["superlink"]).folder
    for authority in (other / "ca.crt", pki / "server.crt", pki / "nodes" / "node-0.crt"):
        with pytest.raises(DeployError, match="not signed by this authority"):
            RosterFile(pki / "roster.json", authority)
    shutil.copy(other / "roster.json", pki / "roster.json")
    with pytest.raises(DeployError, match="not signed by this authority"):
        read(pki)
    for broken in (pki / "missing.crt", pki / "roster.json"):
        with pytest.raises(DeployError, match=r"cannot be read|no certificate in PEM"):
            RosterFile(pki / "roster.json", broken)


@for_rows(
    ("changes", "reason"),
    [
        ({"role": "observer"}, "role is 'observer'"),
        ({"client": -1}, "client is -1"),
        ({"client": True}, "client is True"),
        ({"client": 1}, "client 1 twice"),
        ({"name": "node-1"}, "name node-1 twice"),
        ({"name": "a\nb"}, "printable"),
        ({"name": ""}, "printable"),
        ({"expires": "tomorrow"}, "ISO 8601"),
        ({"role": "submitter"}, "a submitter has none"),
    ],
)
def test_entries_that_the_authority_signs_by_mistake_are_named(pki, changes, reason):
    from coterie.deploy.certificates import _Authority
    from coterie.site.roster import Member

    record = read(pki).members[0].to_record() | changes
    with pytest.raises(DeployError, match=reason):
        Roster(2, (Member.from_record(record), *read(pki).members[1:])).signed(_Authority.read(pki).key)


# ---- replacement, removal, expiry ---------------------------------------------------------------------------


def test_a_node_is_replaced_by_one_command(pki, coterie):
    old, before = key_of(pki, 1), tree(pki)
    status, out, err = coterie("certs", pki, "--renew-node", 1, "--json")
    assert (status, err) == (0, "")
    assert document(out)["nodes"] == [1]
    after = tree(pki)
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"roster.json", *(f"nodes/node-1.{end}" for end in ("key", "pub", "crt", "tls.key"))}
    assert old not in clients(pki)
    assert clients(pki)[key_of(pki, 1)] == 1
    with pytest.raises(DeployError, match="not in the roster"):
        read(pki).member(old)


def test_a_node_is_removed(pki, coterie):
    old = key_of(pki, 2)
    assert coterie("certs", pki, "--remove-node", 2)[0] == 0
    assert old not in clients(pki)
    assert not list(pki.glob("nodes/node-2.*"))
    assert_refused(coterie("certs", pki, "--remove-node", 2), "has no node 2")
    assert_refused(coterie("certs", pki, "--renew-node", 7), "has no node 7")


def test_an_expired_node_is_renewed(pki, coterie, clock):
    assert coterie("certs", pki, "--renew-node", 0, "--days", 1)[0] == 0

    with clock(2, "coterie.site.roster"):
        with pytest.raises(DeployError, match="node-0, expired on"):
            read(pki).member(key_of(pki, 0))
        assert read(pki).member(key_of(pki, 1)).client == 1
        assert coterie("certs", pki, "--renew-node", 0)[0] == 0
        assert read(pki).member(key_of(pki, 0)).client == 0


def test_a_folder_of_before_gets_a_roster_and_so_does_a_key_that_a_site_made(pki, coterie):
    (pki / "roster.json").unlink()
    shutil.copy(pki / "nodes" / "node-0.pub", pki / "nodes" / "node-9.pub")
    assert_refused(coterie("certs", pki, "--sign-roster"), "twice")
    (pki / "nodes" / "node-9.pub").write_text("ssh-rsa no key")
    assert_refused(coterie("certs", pki, "--sign-roster"), "nodes", "cannot be read")
    other = create(pki.parent / "site", 1, ["a"]).folder
    shutil.copy(other / "nodes" / "node-0.pub", pki / "nodes" / "node-9.pub")
    assert coterie("certs", pki, "--sign-roster")[0] == 0
    assert sorted(clients(pki).values()) == [0, 1, 2, 9]
    assert coterie("certs", pki, "--nodes", 1, "--more")[0] == 0
    assert sorted(clients(pki).values()) == [0, 1, 2, 9, 10]


def submitters(folder):
    return {member.name: member.key for member in read(folder).members if member.role == "submitter"}


def test_submitters_are_members_of_their_own(pki, coterie, tmp_path):
    for name in ("alice", "bob@example.org"):
        assert coterie("certs", pki, "--submitter", name)[0] == 0
    keys = {name: fingerprint((pki / "submitters" / f"{name}.pub").read_bytes()) for name in submitters(pki)}
    assert sorted(keys) == ["alice", "bob@example.org"]
    assert submitters(pki) == keys
    assert sorted(clients(pki).values(), key=str) == [0, 1, 2, None, None]
    assert (pki / "submitters" / "alice.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(DeployError, match="is that of a submitter in the roster, alice, not of a client"):
        read(pki).client_of((pki / "submitters" / "alice.pub").read_bytes())
    with pytest.raises(DeployError, match="is that of a client in the roster, node-0, not of a submitter"):
        read(pki).member(key_of(pki, 0), "submitter")
    assert coterie("certs", pki, "--submitter", "alice")[0] == 0  # a new key in the place of the old one
    assert submitters(pki)["alice"] != keys["alice"]
    assert coterie("certs", pki, "--renew-authority")[0] == 0
    assert submitters(pki).keys() == keys.keys()
    assert coterie("certs", pki, "--remove-submitter", "alice")[0] == 0
    assert list(submitters(pki)) == ["bob@example.org"]
    assert not list((pki / "submitters").glob("alice.*"))
    other = create(tmp_path / "site", 1, ["a"]).folder  # a key that carol made herself
    shutil.copy(other / "nodes" / "node-0.pub", pki / "submitters" / "carol.pub")
    assert coterie("certs", pki, "--sign-roster")[0] == 0
    assert sorted(submitters(pki)) == ["bob@example.org", "carol"]


def test_names_of_submitters_are_names_of_files(pki, coterie):
    before = tree(pki)
    for name in ("", "../alice", "a/b", "-x", ".key", "a b", "x" * 65, "é", "a\n"):
        assert_refused(coterie("certs", pki, f"--submitter={name}"), "--submitter", "at most 64 letters")
        assert_refused(coterie("certs", pki, f"--remove-submitter={name}"), "has no submitter")
    assert_refused(coterie("certs", pki, "--submitter", "node-0"), "name node-0 twice")
    assert tree(pki) == before


# ---- rotation of the authority ------------------------------------------------------------------------------


def verified(authorities, leaf, name="superlink"):
    store = verification.Store(x509.load_pem_x509_certificates(authorities))
    verifier = verification.PolicyBuilder().store(store).build_server_verifier(x509.DNSName(name))
    try:
        return len(verifier.verify(x509.load_pem_x509_certificate(leaf), [])) == 2
    except verification.VerificationError:
        return False


def test_the_authority_is_rotated(pki, coterie):
    old, keys = tree(pki), clients(pki)
    assert coterie("certs", pki, "--renew-authority")[0] == 0
    both = tree(pki)
    assert old["ca.key"] != both["ca.key"]
    assert {name for name in both if both[name] == old[name]} >= {
        "server.key",
        "superexec.secret",
        *(f"nodes/node-{node}.{end}" for node in range(3) for end in ("key", "pub", "tls.key")),
    }
    assert clients(pki) == keys  # the nodes keep their keys
    assert verified(both["ca.crt"], old["server.crt"])  # what holds ca.crt of both trusts both
    assert verified(both["ca.crt"], both["server.crt"])
    assert not verified(old["ca.crt"], both["server.crt"])
    assert verified(both["ca.crt"], both["nodes/node-1.crt"], "supernode-1")
    assert coterie("certs", pki, "--nodes", 1, "--more")[0] == 0  # signed by the new one
    assert coterie("certs", pki, "--retire-authorities")[0] == 0
    new = tree(pki)
    assert not verified(new["ca.crt"], old["server.crt"])
    assert verified(new["ca.crt"], both["server.crt"])
    assert verified(new["ca.crt"], new["nodes/node-3.crt"], "supernode-3")
    (pki / "roster.json").write_bytes(old["roster.json"])
    with pytest.raises(DeployError, match="not signed by this authority"):  # by the key that may be compromised
        read(pki)


def test_openssl_agrees(pki, coterie):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    old = (pki / "server.crt").read_bytes()
    coterie("certs", pki, "--renew-authority")
    (pki / "old.crt").write_bytes(old)
    words = ["openssl", "verify", "-x509_strict", "-CAfile", pki / "ca.crt", pki / "server.crt", pki / "old.crt"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- the app ------------------------------------------------------------------------------------------------

APP, OTHER = "ab" * 32, "cd" * 32


def test_the_roster_names_the_app_and_keeps_it(pki, coterie):
    assert read(pki).app == ""
    assert coterie("certs", pki, "--app", APP)[0] == 0
    for words in (["--renew-node", 1], ["--submitter", "alice"], ["--renew-authority"], ["--sign-roster"]):
        assert coterie("certs", pki, *words)[0] == 0
        assert read(pki).app == APP
    path = pki / "roster.json"
    changed = altered(path.read_bytes(), app=OTHER)
    assert coterie("certs", pki, "--app", "")[0] == 0
    assert read(pki).app == ""
    path.write_bytes(changed)
    with pytest.raises(DeployError, match="is not signed by"):
        read(pki)


def test_the_hash_of_a_folder_is_stated(pki, coterie, tmp_path):
    app = app_folder(tmp_path / "app")
    assert coterie("certs", pki, "--app", app)[0] == 0
    assert read(pki).app == coterie("fab-hash", app)[1].strip()


def test_what_is_no_app(pki, coterie):
    before = tree(pki)
    for app in ("x", "AB" * 32, "ab" * 31, "/none"):
        status, _, err = coterie("certs", pki, "--app", app)
        assert (status, len(err.splitlines())) == (1, 1), app
    assert tree(pki) == before


def test_a_client_compares_its_pin_with_the_roster(pki, coterie):
    def app(**options):
        return checked(pki, subject="app", **options)

    assert app(fab_hash=APP).detail == f"only {APP}"
    coterie("certs", pki, "--app", APP)
    assert app(fab_hash=APP).detail == f"only {APP}, as in the roster"
    assert app().detail.endswith(f"the roster names {APP}")
    assert app(roster=None, fab_hash=OTHER).passed
    other = app(fab_hash=OTHER)
    assert (other.passed, APP in other.detail, OTHER in other.detail) == (False, True, True)


def test_a_server_runs_the_app_of_its_roster(pki, coterie, monkeypatch):
    monkeypatch.setenv("COTERIE_ROSTER", str(pki / "roster.json"))
    config = RunConfig({}, deployed=True)
    assert submission_of(config, OTHER).submitter is None
    coterie("certs", pki, "--app", APP)
    for app in (APP, None):
        assert submission_of(config, app).submitter is None
    for app in (OTHER, ""):
        with pytest.raises(ConfigError, match=f"COTERIE_ROSTER: it names the app {APP}, and .* runs: submit that app"):
            submission_of(config, app)


# ---- older rosters -----------------------------------------------------------------------------------------


@pytest.fixture
def used(pki, coterie, tmp_path):
    """Use the roster of ``pki`` on a machine; ``old`` there is the folder of before."""
    old = shutil.copytree(pki, tmp_path / "old")
    seen = tmp_path / "machine" / "rosters.seen"

    def use(folder=pki, authority=None):
        return read_newest(folder / "roster.json", authority or folder / "ca.crt", seen).number

    use.old, use.seen = old, seen
    assert use() == 1
    assert seen.stat().st_mode & 0o777 == 0o600
    coterie("certs", pki, "--renew-node", 0)
    assert use() == use() == 2
    return use


def test_a_process_that_starts_refuses_an_older_roster(used, pki):
    for _ in range(2):
        with pytest.raises(DeployError, match=r"is an older roster, 1; this machine has used number 2: copy the"):
            used(used.old)
        with pytest.raises(DeployError, match="is an older roster, 1"):
            RosterFile(used.old / "roster.json", used.old / "ca.crt", used.seen)
    assert used() == 2
    assert read_newest(used.old / "roster.json", used.old / "ca.crt").number == 1  # without a memory


def test_the_numbers_outlive_a_rotation_of_the_authority(used, pki, coterie):
    coterie("certs", pki, "--renew-authority")
    assert used() == 3
    for authority in (pki / "ca.crt", used.old / "ca.crt"):
        with pytest.raises(DeployError, match="is an older roster, 1; this machine has used number 3"):
            used(used.old, authority)
    coterie("certs", pki, "--retire-authorities")
    assert used() == 3


def test_another_authority_has_its_own_numbers(used, tmp_path):
    assert used(create(tmp_path / "new", 1, ["superlink"]).folder) == 1
    assert used() == 2


def test_a_folder_of_certificates_that_was_restored_signs_until_its_number_is_as_large(used, pki, coterie):
    coterie("certs", pki, "--sign-roster")
    assert used() == 3
    for number in (2, 3, 4):
        coterie("certs", used.old, "--sign-roster")
        if number < 3:
            with pytest.raises(DeployError, match="until its number is as large"):
                used(used.old)
        else:
            assert used(used.old) == number


def test_a_damaged_memory_or_one_that_cannot_be_written_is_an_error(used):
    sound = used.seen.read_text()
    for damage in ("x\n", "a b c\n", "a 1.5\n"):
        used.seen.write_text(sound + damage)
        with pytest.raises(DeployError, match=r"rosters.seen is damaged: restore it, or remove it"):
            used()
    used.seen.unlink()
    used.seen.mkdir()
    with pytest.raises(DeployError, match=r"rosters.seen cannot be written: Is a directory"):
        used()


def test_a_crash_while_the_number_is_noted(used, pki, coterie):
    with used.seen.open("a") as file:
        file.write("ab")  # no whole line
    with pytest.raises(DeployError, match="older roster"):
        used(used.old)
    coterie("certs", pki, "--sign-roster")
    assert used() == 3
    assert all(len(line.split()) == 2 for line in used.seen.read_text().splitlines())


def test_a_client_refuses_an_older_roster(used, pki, tmp_path):
    state = {"state_dir": str(tmp_path / "machine")}
    assert checked(pki, 0, 0, node=state).passed
    failure = checked(used.old, 0, 0, node=state)
    assert not failure.passed
    assert "is an older roster, 1" in failure.detail


# ---- clients and servers read it ----------------------------------------------------------------------------


def checked(pki, number=1, client=1, node=(), subject="roster", **files):
    options = {"key": pki / "nodes" / f"node-{number}.key", "ca": pki / "ca.crt", "roster": pki / "roster.json"} | files
    edge = Edge(superlink="localhost:1", node=NodeConfig(client_id=client, data=str(pki), **dict(node)), **options)
    return {check.subject: check for check in checks(edge, str, str, lambda *_: None)}.get(subject)


def test_a_client_finds_itself_in_the_roster(pki, tmp_path):
    good = checked(pki)
    assert good.passed
    assert good.detail.startswith("node-1 is client 1 until ")
    other = create(tmp_path / "other", 2, ["superlink"]).folder
    for why, failure in (
        ("this key is of client 1: use that --client-id", checked(pki, client=2)),
        ("its key is not in the roster", checked(pki, key=other / "nodes" / "node-1.key")),
        ("not signed by this authority", checked(pki, roster=other / "roster.json")),
        ("cannot be read", checked(pki, roster=tmp_path / "none.json")),
    ):
        assert not failure.passed
        assert why in failure.detail
        assert "ask the operator" in failure.detail or "--client-id" in failure.detail
    assert checked(pki, roster=None) is None
    assert checked(pki, ca=tmp_path / "none.crt") is None  # after the failure of what it needs


def test_a_server_reads_the_roster_of_its_environment(pki, tmp_path, monkeypatch):
    monkeypatch.delenv("COTERIE_ROSTER", raising=False)
    assert roster_of() is None
    monkeypatch.setenv("COTERIE_ROSTER", str(pki / "roster.json"))
    assert roster_of().client_of((pki / "nodes" / "node-2.pub").read_bytes()) == (2, "node-2")
    shutil.copy(pki / "roster.json", tmp_path / "roster.json")
    monkeypatch.setenv("COTERIE_ROSTER", str(tmp_path / "roster.json"))
    with pytest.raises(ConfigError, match=r"COTERIE_ROSTER: .*ca.crt cannot be read"):
        roster_of()
