"""`coterie client`: every check with real sockets, and exactly what is executed once all of them pass."""

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import types
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from kit.commands import assert_refused, tree
from kit.servers import free_port, listening, running, tls, until
from kit.superlinks import DESCRIBED, register, secured_superlink
from kit.tables import for_rows

from coterie.client.masking_keys import MaskingKeys
from coterie.datasets import DataError, DataReport, LeftOut, Loss
from coterie.deploy import certificates, edge
from coterie.deploy.bundles import seal, unseal
from coterie.deploy.certificates import create, renew_server
from coterie.deploy.edge import Edge, checks, default_state_dir
from coterie.flower.transport import nodes_speak_http
from coterie.privacy import ClientLedger, Event, epsilon
from coterie.site.node import NodeConfig
from coterie.wire.versions import LEAST, versions

DECLARED = "--epsilon 8 --delta 1e-5 --input-shape 1x28x28 --num-classes 10"
ROOT, BIN = Path(__file__).resolve().parents[2], Path(sys.executable).parent


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A home of its own, and data that are described without looking at them."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    own = types.SimpleNamespace(report=None)
    own.describe = lambda path, declared=None: f"12 images of {declared or '1x28x28'}, from {path}"

    def report(path, declared=None):
        return own.report or DataReport(path, own.describe(path, declared), 12, 10, {}, LeftOut(), (), ())

    monkeypatch.setattr("coterie.datasets.report", report)
    (tmp_path / "my data").mkdir()
    return own


@pytest.fixture
def executed(monkeypatch):
    """What would have been executed: (program, argv, environment)."""
    calls = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    return calls


def words(pki, fleet, *more, **changes):
    """Of a client for which all is well, but for the changes."""
    options = {
        "superlink": f"localhost:{fleet}",
        "data": "my data",
        "key": pki / "nodes" / "node-1.key",
        "ca": pki / "ca.crt",
        "client-id": 1,
        "guarantee": "trusted-server",
        "port": free_port(),
    }
    options |= {key.replace("_", "-"): value for key, value in changes.items()}
    if "--epsilon" in more:
        del options["guarantee"]
    return ["client", *(word for key, value in options.items() for word in (f"--{key}", value)), *more]


# ---- all is well ------------------------------------------------------------------------------------------


def test_check_stops_there_and_writes_nothing(coterie, pki, tmp_path, executed):
    before = tree(tmp_path)
    with listening(tls(pki)) as port:
        status, out, err = coterie(*words(pki, port, "--check"))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    subjects = [line.split()[0] for line in lines[:-1]]
    assert subjects == ["data", "key", "ca", "app", "state", "guarantee", "port", "superlink", "clock", "versions"]
    assert lines[-2].split() == ["versions", *versions().split()]
    assert lines[0].endswith(f"12 images of 1x28x28, from {tmp_path / 'my data'}")
    assert lines[-1] == "all checks passed"
    assert executed == []
    assert tree(tmp_path) == before


def test_check_fails_where_a_library_is_too_old(coterie, pki, monkeypatch, executed):
    monkeypatch.setitem(LEAST, "opacus", "99")
    with listening(tls(pki)) as port:
        status, out, err = coterie(*words(pki, port))
    assert (status, executed) == (1, [])
    assert "versions   failed" in out
    assert "opacus 99 is needed" in err
    assert "pip install" in err


@pytest.mark.parametrize("left", [0.0005, 0.01])
def test_check_fails_where_nothing_is_left_of_the_budget(coterie, pki, tmp_path, executed, left):
    """A client that starts anyway repeats its last replies."""
    events, path = Counter({Event(0.05, 2.0): 100}), tmp_path / "my data" / ".coterie-budget.jsonl"
    budget = epsilon(events, 1e-5) / (1 - left)
    with closing(ClientLedger(1e-5, budget, path)) as ledger:
        ledger.spend(1, events)
    declared = ["--epsilon", budget, "--delta", 1e-5, "--input-shape", "1x28x28", "--num-classes", 10]
    with listening(tls(pki)) as port:
        status, _, err = coterie(*words(pki, port, "--check", *declared))
        assert coterie(*words(pki, port, *declared))[0] == 0
    assert len(executed) == 1
    spent = f"error: --epsilon: nothing is left: epsilon {epsilon(events, 1e-5):.4g} of {budget:g} spent"
    assert (status, spent in err) == ((1, True) if left < 0.001 else (0, False)), err


def test_a_proxy_of_the_environment_is_named_without_its_address(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "localhost,fl.example.org")
    assert edge.proxy_hint("fl.example.org") == edge.proxy_hint("localhost") == ""
    hint = edge.proxy_hint("fl.example.com")
    assert "name fl.example.com in no_proxy" in hint
    assert "secret" not in hint


def test_the_key_says_who_the_client_is(coterie, pki, executed, tmp_path):
    with listening(tls(pki)) as port:
        arguments = words(pki, port, "--check")
        place = arguments.index("--client-id")
        nameless = [*arguments[:place], *arguments[place + 2 :]]
        assert coterie(*nameless)[0] == 0
        assert coterie(*nameless[:-1])[0] == 0
    assert any(word.startswith("client-id=1 ") for word in executed[-1][1])
    other = tmp_path / "mine.key"
    shutil.copy(pki / "nodes" / "node-1.key", other)
    nameless[nameless.index("--key") + 1] = other
    assert_refused(coterie(*nameless), "--client-id")


def test_a_client_with_a_roster_signs_its_keys_before_it_starts(coterie, pki, executed, tmp_path):
    """The processes that train may have no access to the key of the node."""
    state = tmp_path / "home" / ".local" / "state" / "coterie" / "client-1"
    with listening(tls(pki)) as port:
        assert coterie(*words(pki, port))[0] == 0
        assert not list(state.glob("*masking-key*"))
        assert coterie(*words(pki, port, roster=pki / "roster.json"))[0] == 0
    assert len(executed) == 2
    node = NodeConfig(client_id=1, state_dir=str(state), roster=str(pki / "roster.json"))
    keys = MaskingKeys.of(node)
    assert keys.nodes.vouches(1, keys.signed)
    assert not keys.nodes.vouches(0, keys.signed)
    assert (state / "client-1.masking-key").stat().st_mode & 0o777 == 0o600
    assert repr(keys.secret) not in repr(keys)
    assert keys.secret.hex() not in repr(keys)


def test_what_is_executed(coterie, pki, tmp_path, executed, monkeypatch):
    monkeypatch.delenv("FLWR_HOME", raising=False)
    more = [*DECLARED.split(), "--diagnostics", "--value-range", "0:1"]
    more += ["--set", "site=ward 7", "--set", "gpu=true", "--isolation", "process"]
    more += ["--", "--health-server-address", "127.0.0.1:1"]
    with listening(tls(pki)) as port:
        status, _, err = coterie(*words(pki, port, *more, port=free_port()), "--max-retries", 3)
    assert (status, err) == (0, "")
    ((program, argv, variables),) = executed
    state = tmp_path / "home" / ".local" / "state" / "coterie" / "client-1"
    assert state.stat().st_mode & 0o777 == 0o700
    assert program == argv[0] == sys.executable
    runtime = argv[argv.index("--port") + 1]
    authority = x509.load_pem_x509_certificate((pki / "ca.crt").read_bytes()).fingerprint(hashes.SHA256()).hex()[:16]
    assert argv[1:] == [
        *("-P", "-m", "coterie.deploy.supernode"),
        *("--certificate", str(pki / "nodes" / "node-1.crt")),
        *("--certificate-key", str(pki / "nodes" / "node-1.tls.key")),
        *("--superlink", f"localhost:{port}"),
        *("--root-certificates", str(pki / "ca.crt")),
        *("--auth-supernode-private-key", str(pki / "nodes" / "node-1.key")),
        *("--isolation", "process"),
        *("--port", runtime),
        "--node-config",
        f'client-id=1 state-dir="{state}" data="{tmp_path}/my data" epsilon=8.0 delta=1e-05 diagnostics=true '
        'input-shape="1x28x28" num-classes=10 value-range="0:1" '
        f'server="localhost:{port} {authority}" site="ward 7" gpu=true',
        *("--health-server-address", "127.0.0.1:1", "--max-retries", "3"),
    ]
    own = {"FLWR_HOME": str(state / "flwr"), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    assert variables == {**os.environ, **own}


def test_a_schema_declares_the_data(coterie, pki, tmp_path, executed, machine):
    machine.describe = lambda path, declared=None: f"{declared}"
    schema = '[[columns]]\nname = "age"\ntype = "number"\nmean = 50\nscale = 10\n'
    (tmp_path / "s.toml").write_text(f'version = 1\n[label]\ncolumn = "y"\nclasses = [0, 1]\n{schema}')
    with listening(tls(pki)) as port:
        more = ["--epsilon", 8, "--delta", 1e-5, "--schema", "s.toml"]
        status, out, err = coterie(*words(pki, port, *more))
        assert (status, err) == (0, "")
        assert "examples of 1 with 2 classes by schema " in out
        assert f'schema="{tmp_path}/s.toml"' in executed[0][1][executed[0][1].index("--node-config") + 1]
        (tmp_path / "s.toml").write_text(schema)
        status, _, err = coterie(*words(pki, port, "--check", *more))
        assert status == 1
        assert "s.toml: version is missing" in err


def test_the_unit_says_what_the_command_takes(coterie, pki, tmp_path):
    unit = (ROOT / "docker" / "edge" / "coterie-client@.service").read_text().replace("\\\n", "")
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    state, bundle = tmp_path / "coterie" / "client-1", tmp_path / "node-1.coterie"
    with listening(tls(pki)) as port:
        content, passphrase = seal(pki, 1, f"localhost:{port}")
        bundle.write_bytes(content)
        unseal(bundle, passphrase, state)
        values = {"%i": "1", "%S": f"{tmp_path}", "${DATA}": "my data", "${BUNDLE}": f"{bundle}"}
        values["$ARGS"] = f"--port {free_port()} --guarantee record-level {DECLARED} --check"
        told = []
        for word in line.split()[1:]:
            for name, value in values.items():
                word = word.replace(name, value)
            told += word.split() if "--port" in word else [word]
        status, out, err = coterie(*told)
    assert (status, err) == (0, "")
    assert f"{state}\n" in out


def given(tmp_path, **changes):
    options = {"superlink": "a:1", "key": Path("k"), "ca": Path("c")}
    node = {"client_id": 0, "data": "/d", "state_dir": str(tmp_path)} | changes.pop("node", {})
    return Edge(**options, node=NodeConfig(**node), **changes)


NAMES = ["plain", "two words", "it's", 'say "hi"', "both ' and \"", "back\\slash", '\\"', "a=b c=d", "Präfix ☃"]


@for_rows("name", [*NAMES, "x.toml", "\t\n\x7f"])
def test_flower_reads_the_node_config_back(tmp_path, name):
    from flwr.common.config import parse_config_args

    budget = {"epsilon": 0.5, "delta": 1e-9, "budget_file": str(tmp_path / "budget")}
    declared = {"data": str(tmp_path / name), "input_shape": "1x8x8", "num_classes": 10}
    numbers = {"n": "3", "x": "1e-3", "flag": "false", "text": "3 apples", "quoted": '"3"', "last": name}
    node = given(tmp_path, settings=numbers, node=budget | declared)
    assert parse_config_args([node.node_config]) == {
        "client-id": 0,
        "state-dir": str(tmp_path),
        "data": str(tmp_path / name),
        "epsilon": 0.5,
        "delta": 1e-9,
        "input-shape": "1x8x8",
        "num-classes": 10,
        "budget-file": str(tmp_path / "budget"),
        "server": f"{node.superlink} unknown",
        "n": 3,
        "x": 0.001,
        "flag": False,
        "text": "3 apples",
        "quoted": "3",
        "last": name,
    }


def test_where_state_lies(tmp_path, monkeypatch):
    assert default_state_dir(7) == tmp_path / "home" / ".local" / "state" / "coterie" / "client-7"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which the standard says to ignore
    assert default_state_dir(7) == tmp_path / "home" / ".local" / "state" / "coterie" / "client-7"
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert default_state_dir(7) == Path("/var/state/coterie/client-7")


# ---- options that contradict each other -------------------------------------------------------------------


@for_rows(
    ("more", "parts"),
    [
        (["--epsilon", 8], ["epsilon and delta", "both"]),
        (["--epsilon", 0, "--delta", 0.1], ["epsilon is 0.0; expected a finite number in (0, 1e+12]"]),
        (["--epsilon", "nan", "--delta", 0.1], ["epsilon is nan; expected"]),
        (["--epsilon", "inf", "--delta", 0.1], ["epsilon is inf; expected"]),
        (["--epsilon", 1, "--delta", 1], ["delta is 1.0; expected a finite number in (0, 1)"]),
        (["--guarantee", "trust"], ["guarantee is 'trust'", "masked-sums", "record-level", "trusted-server"]),
        (["--guarantee", "record-level"], ["guarantee = record-level requires epsilon and delta"]),
        (["--epsilon", 1, "--delta", 0.1], ["epsilon requires input-shape and num-classes"]),
        (["--num-classes", 2], ["input-shape and num-classes", "both"]),
        (["--value-range", "0:1"], ["value-range requires"]),
        (["--columns", "a,b"], ["columns requires input-shape and num-classes"]),
        (["--task", "multi-label"], ["task declares the data beside input-shape; leave it out with a schema"]),
        (["--task", "survival"], ["task = survival was removed: predict a class"]),
        (["--schema", "s", "--input-shape", "3", "--num-classes", 2], ["schema declares shape and classes"]),
        (["--set", "reply-seconds=soon"], ["reply-seconds is 'soon'; expected a number"]),
        (["--isolation", "container"], ["--isolation container", "subprocess"]),
        (["--set", "client-id=4"], ["--set client-id", "--client-id"]),
        (["--set", "two words=4"], ["--set two words"]),
        (["--set", "site"], ["--set site", "key=value"]),
    ],
)
def test_contradictions(coterie, pki, executed, more, parts):
    assert_refused(coterie(*words(pki, 1, "--check", *more)), *parts)
    assert executed == []


# ---- what is wrong on this machine ------------------------------------------------------------------------


def refused(coterie, arguments, *parts):
    """One line says what is wrong; nothing was started."""
    status, _, err = coterie(*arguments)
    assert status == 1
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line, line


@pytest.fixture
def wrong(coterie, pki, executed):
    """Refused, though the SuperLink is there."""

    def call(*parts, **changes):
        with listening(tls(pki)) as port:
            refused(coterie, words(pki, port, **changes), *parts)
        assert executed == []

    return call


def test_data(wrong, machine):
    wrong("--data", "nowhere", "does not exist", data="nowhere")

    def describe(path, declared=None):
        raise DataError("images.npy and labels.npy differ in length: make them again")

    machine.describe = describe
    wrong("--data", "my data", "differ in length")


def test_a_declared_task_is_checked_and_reaches_the_node(coterie, pki, executed):
    labels = "--input-shape", 3, "--task", "multi-label", "--num-classes"
    with listening(tls(pki)) as port:
        status, _, err = coterie(*words(pki, port, "--check", *labels, 1))
        assert (status, "a multi-label task has 2 to 20 labels, not 1" in err) == (1, True)
        status, out, err = coterie(*words(pki, port, *labels, 2))
    assert (status, "examples of 3 with 2 labels" in out) == (0, True), err
    node = executed[0][1][executed[0][1].index("--node-config") + 1]
    assert 'num-classes=2 task="multi-label"' in node


def test_data_that_cannot_be_used_end_the_client(coterie, pki, machine, tmp_path, executed):
    """The case check_passes: 0 of 114 records were usable, all checks passed, and every reply counted."""
    lost = LeftOut.of([Loss("column 'outcome': not one of its values", count=114)])

    def call(usable, problems, *more):
        machine.report = DataReport("my data", f"{usable} records", usable, usable, {}, lost, problems, ())
        with listening(tls(pki)) as port:
            return coterie(*words(pki, port, *more))

    for more in ([], ["--check"], ["--skip-invalid"], ["--skip-invalid", "--check"]):
        status, out, err = call(0, (), *more)
        assert (status, out.splitlines()[0]) == (1, "data       failed: see the error of --data")
        assert "--data" in err
        assert "no usable records; 0 records; column 'outcome': not one of its values, 114 records left out" in err
    status, _, err = call(3, ("t.csv: a label is 9",), "--check")
    assert status == 1
    assert "a label is 9; correct these records, or accept with --skip-invalid that they are left out" in err
    assert not executed
    state = tmp_path / "home" / ".local" / "state" / "coterie" / "client-1"
    status, out, _ = call(3, ("t.csv: a label is 9",), "--check", "--skip-invalid")
    assert (status, state.exists()) == (0, False)
    assert out.splitlines()[1] == "           column 'outcome': not one of its values, 114 records left out"
    assert call(3, ("t.csv: a label is 9",), "--skip-invalid")[0] == 0
    assert len(executed) == 1
    content = json.loads((state / "data-report.json").read_text())
    assert (content["usable"], content["left-out"]["records"]) == (3, 114)
    assert stat.S_IMODE((state / "data-report.json").stat().st_mode) == 0o600
    assert not any("114" in word for word in executed[0][1])  # the report stays there


def key_file(path, key):
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    return path


def test_key(wrong, pki, tmp_path):
    wrong("--key", "does not exist", key=tmp_path / "none")
    wrong("--key", "cannot be read: Is a directory", key=tmp_path)
    for mode in (0o640, 0o604, 0o660):
        open_one = shutil.copy(pki / "nodes" / "node-0.key", tmp_path / "open.key")
        os.chmod(open_one, mode)
        wrong("--key", f"mode 0{mode:o}", "chmod 600", key=open_one)
    no = "not an ECDSA P-384 private key"
    wrong(no, key=key_file(tmp_path / "p256", ec.generate_private_key(ec.SECP256R1())))
    wrong(no, key=key_file(tmp_path / "ed25519", ed25519.Ed25519PrivateKey.generate()))
    public = shutil.copy(pki / "nodes" / "node-0.pub", tmp_path / "public")
    os.chmod(public, 0o600)
    wrong(no, "node-I.key", "ssh-keygen", key=public)
    wrong(no, key=pki / "nodes" / "node-0.tls.key")


def test_key_with_a_passphrase(wrong, tmp_path):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen on this machine")
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", tmp_path / "locked"]
    subprocess.run(make, check=True)
    wrong("passphrase", "create a key without", key=tmp_path / "locked")


def test_ca(wrong, pki, tmp_path, clock):
    for name, days in (("old", -4000), ("new", 2)):
        with clock(days):
            create(tmp_path / name, 1, ["superlink"])
    wrong("--ca", "does not exist", ca=tmp_path / "none")
    wrong("--ca", "no certificate", ca=pki / "ca.key")
    wrong("--ca", "server certificate", "ca.crt", ca=pki / "server.crt")
    wrong("--ca", "expired on", "new ca.crt", ca=tmp_path / "old" / "ca.crt")
    wrong("--ca", "not valid before", "clock", ca=tmp_path / "new" / "ca.crt")


def test_hash_of_the_app(coterie, pki, executed):
    for text in ("", "90fa9372", "g" * 64, "0" * 65):
        assert_refused(coterie(*words(pki, 1, fab_hash=text)), f"--fab-hash {text}: must be 64 hexadecimal digits")
    with listening(tls(pki)) as port:
        status, out, _ = coterie(*words(pki, port, fab_hash="AB" * 32))
    assert status == 0
    assert f"app        only {'ab' * 32}" in out.splitlines()
    ((program, argv, _),) = executed
    assert program == sys.executable
    assert argv[1:7] == ["-P", "-m", "coterie.deploy.supernode", "--fab-hash", "ab" * 32, "--certificate"]


def test_keys_of_apps(wrong, coterie, pki, tmp_path, executed):
    def public(key):
        return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()

    good = f"reviewer: {public(ed25519.Ed25519PrivateKey.generate())}\n"
    file = tmp_path / "keys.yaml"
    wrong("--trusted-entities", "cannot be read", trusted_entities=file)
    for text, said in (
        ("", "contains no key"),  # Flower would verify nothing
        ("{}", "contains no key"),
        ("[1", "not valid YAML"),
        ("- a\n- b\n", "contains no key"),
        ("reviewer: ssh-ed25519 AAAA\n", "'reviewer' is not an Ed25519 public key"),
        ("reviewer: 7\n", "'reviewer' is not an Ed25519 public key"),
        (f"{good}other: {public(ec.generate_private_key(ec.SECP384R1()))}\n", "'other' is not an Ed25519 public key"),
    ):
        file.write_text(text)
        wrong("--trusted-entities", said, trusted_entities=file)
    file.write_text(good)
    with listening(tls(pki)) as port:
        status, out, _ = coterie(*words(pki, port, trusted_entities=file, fab_hash="0" * 64))
    assert status == 0
    assert f"app        only {'0' * 64}, signed by one of 1 keys" in out.splitlines()
    ((_, argv, _),) = executed
    assert argv[-2:] == ["--trusted-entities", str(file)]


def test_state_folder(wrong, tmp_path):
    (tmp_path / "file").write_text("")
    wrong("--state-dir", "no write permission", str(tmp_path / "file"), state_dir=tmp_path / "file" / "state")
    if os.geteuid():  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        wrong("--state-dir", "no write permission", state_dir=tmp_path / "closed" / "state")


def test_port(wrong):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong(f"--port {port}", "is in use", port=port)


def test_every_failure_is_told_at_once(coterie, pki, executed):
    with listening(tls(pki)) as port:
        status, out, err = coterie(*words(pki, port, data="nowhere", key="none"))
    assert status == 1
    assert [line.split()[1] for line in err.splitlines()] == ["--data", "--key"]
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("data", "key", "ca", "app", "state", "guarantee", "port", "superlink", "versions")
    ]
    assert lines[1] == "key        failed: see the error of --key"
    assert executed == []


# ---- what is wrong between here and the SuperLink ---------------------------------------------------------


def test_an_address(coterie, pki):
    for address in (
        *["host", "host:", ":1", "host:https", "host:0", "host:65536", "::1:1", "[::1:1", "https://host:1", "[host]:1"],
        "a b:1",
    ):
        refused(coterie, words(pki, 1, superlink=address), f"--superlink {address}", "HOST:PORT")
    for address, host in (("[::1]:9092", "::1"), ("10.0.0.1:9092", "10.0.0.1"), ("a.b:9092", "a.b")):
        assert edge._parsed(address) == (host, 9092)


def test_nobody_listens_or_the_host_is_unknown(coterie, pki):
    port = free_port()
    refused(coterie, words(pki, port), f"--superlink localhost:{port}", "refused", f"Fleet API on port {port}")
    refused(coterie, words(pki, 1, superlink="nowhere.invalid:9092"), "cannot resolve host nowhere.invalid", "DNS")


def test_no_answer(coterie, pki, monkeypatch):
    monkeypatch.setattr(edge, "_TIMEOUT", 0.5)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # a queue that is full drops what comes, as a firewall does
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        refused(coterie, words(pki, full.getsockname()[1]), "no response within 0.5 s", "firewall")


@pytest.mark.parametrize(
    "serve",
    [
        lambda connection: connection.sendall(
            b"\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0\x64\0\x04\0\0\xff\xff\0\x06\0\0\x40\0"
        ),
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n") or connection.recv(4096),
        lambda connection: None,
        lambda connection: connection.recv(4096) and connection.recv(4096),
    ],
    ids=["plaintext gRPC", "plaintext HTTP", "hangs up", "silent"],
)
def test_no_tls_there(coterie, pki, monkeypatch, serve):
    monkeypatch.setattr(edge, "_TIMEOUT", 0.5)
    with listening(serve) as port:
        refused(coterie, words(pki, port), "TLS handshake failed", "--insecure")


def test_the_wrong_port_of_the_superlink(coterie, pki):
    with listening(tls(pki, grpc=False, status="404 Not Found")) as port:
        refused(coterie, words(pki, port), "not serve the Fleet API" if nodes_speak_http() else "not gRPC", "9092")


@pytest.mark.parametrize("http", [False, True], ids=["a client of 1.39", "a client of 1.40 or newer"])
def test_a_superlink_of_another_line(pki, monkeypatch, http):
    monkeypatch.setattr(edge, "nodes_speak_http", lambda: http)
    with listening(tls(pki, grpc=http)) as port:
        node = NodeConfig(client_id=0, data=str(pki))
        client = Edge(superlink=f"localhost:{port}", key=pki / "nodes" / "node-0.key", ca=pki / "ca.crt", node=node)
        (check,) = (each for each in checks(client, str, str, lambda *_: None) if each.subject == "superlink")
    assert not check.passed
    assert ("speaks gRPC, as with Flower 1.39" if http else "FLWR_INTERNAL_GRPC_FLEET_API=1") in check.detail


def test_the_wrong_ca(coterie, pki, tmp_path):
    other = create(tmp_path / "other", 1, ["superlink"]).folder
    with listening(tls(other)) as port:
        refused(coterie, words(pki, port), "not signed by", str(pki / "ca.crt"))


def test_the_wrong_name(coterie, pki, tmp_path):
    files = certificates._Authority.read(pki).issue(
        "server", "x", ["elsewhere.example"], datetime.now(UTC) + timedelta(days=1), "server.key"
    )
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with listening(tls(tmp_path)) as port:
        refused(coterie, words(pki, port), "not valid for localhost", "--renew-server --host localhost")
        refused(coterie, words(pki, port, superlink=f"127.0.0.1:{port}"), "not valid for 127.0.0.1")


@pytest.mark.parametrize(("days", "parts"), [(-10, ["has expired", "--renew-server"]), (2, ["not valid yet", "clock"])])
def test_a_server_out_of_its_time(coterie, pki, clock, days, parts):
    with clock(days):
        renew_server(pki, days=5)
    with listening(tls(pki)) as port:
        refused(coterie, words(pki, port), *parts)


def test_a_superlink_that_requires_a_certificate(coterie, pki, tmp_path):
    for suffix in ("key", "crt", "tls.key"):
        shutil.copy(pki / "nodes" / f"node-1.{suffix}", tmp_path / f"mine.{suffix}.pem")
    shutil.copy(pki / "nodes" / "node-1.key", tmp_path / "mine.key")
    other = create(tmp_path / "other", 2, ["superlink"]).folder / "nodes"
    given = {"certificate": tmp_path / "mine.crt.pem", "certificate_key": tmp_path / "mine.tls.key.pem"}
    foreign = {"certificate": other / "node-1.crt", "certificate_key": other / "node-1.tls.key"}
    with listening(tls(pki, authority=pki / "ca.crt")) as port:
        assert coterie(*words(pki, port, "--check"))[0] == 0
        assert coterie(*words(pki, port, "--check", key=tmp_path / "mine.key", **given))[0] == 0
        refused(
            coterie, words(pki, port, key=tmp_path / "mine.key"), "requires a certificate", "--certificate node-I.crt"
        )
        refused(coterie, words(pki, port, **foreign), "rejects the certificate", "coterie certs")
        mixed = given | {"certificate_key": foreign["certificate_key"]}
        refused(coterie, words(pki, port, **mixed), "not a certificate with the key", "node-I.tls.key")
        half = words(pki, port, certificate=given["certificate"])
        refused(coterie, half, "--certificate and --certificate-key belong together")


# ---- a SuperLink ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_superlink_takes_registered_nodes_alone(pki, tmp_path):
    data, python = tmp_path / "my data", [sys.executable, "-c", DESCRIBED]
    with secured_superlink(pki, tmp_path) as (server, fleet, _, variables):
        register(pki, 0, variables)
        both = tmp_path / "both.crt"  # as while the authority is changed
        both.write_bytes((create(tmp_path / "next", 1, ["a"]).folder / "ca.crt").read_bytes())
        both.write_bytes(both.read_bytes() + (pki / "ca.crt").read_bytes())
        registered = words(pki, fleet, ca=both, key=pki / "nodes" / "node-0.key", client_id=0, data=data)
        log = tmp_path / "registered.log"
        with running([*python, *registered], log, **variables) as node:
            until(lambda: "SuperNode ID" in log.read_text(), node, log)

        log = tmp_path / "stranger.log"
        with running([*python, *words(pki, fleet, data=data)], log, **variables) as node:
            assert node.wait(90) != 0
        assert ("is not registered" if nodes_speak_http() else "Failed to activate SuperNode") in log.read_text()
        assert server.poll() is None
