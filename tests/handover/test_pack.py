"""The hand-over pack: what is in it, what its page says, and what is refused."""

import json
import math
import re
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from kit import sealed
from kit.commands import assert_refused, document, tree

import coterie.audit.printed  # noqa: F401 - adds the mechanism of the paper
from coterie.privacy import PLANS, Banded, certificate, read_ledger
from coterie.privacy.certificate import COMPOSED, attacker_right
from coterie.privacy.discrete_gaussians import gaussian_delta
from coterie.report import formats
from coterie.report.handover import pack

FILES = ["README.txt", "SHA256SUMS", "handover.html", "ledger.jsonl", "privacy.json", "verify.py"]
NUMBERS = {"clients": 100, "num_clusters": 2, "epsilon": 6.0, "delta": 1e-5, "clip_norm": 1.0}


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "operator.key"
    path.write_bytes(sealed.OPERATOR.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    return path


def make(folder, plan=None, **words):
    run = sealed.make(folder, plan or sealed.joint(), **words)
    (run / "config.toml").write_text('[config.run]\nstrategy = "ifca"\n')
    return run


def text_of(html):
    """Words of a page from top to bottom, without what is folded."""
    shown = re.sub(r"(?s)<(style|title|details)\b.*?</\1>", " ", html)
    return " ".join(re.sub(r"<[^>]*>", " ", shown).split())


def page_of(tmp_path, plan, **header):
    run = make(tmp_path / "run", plan, **header)
    pack.write_pack(run, tmp_path / "pack")
    return text_of((tmp_path / "pack" / "handover.html").read_text())


# ---- the folder -------------------------------------------------------------------------------------------


def test_a_signed_pack_has_all_that_is_needed_and_nothing_secret(coterie, tmp_path, key):
    run = make(tmp_path / "run")
    status, out, err = coterie("handover", run, "--key", key, "--json")
    assert (status, err) == (0, "")
    answer = document(out)
    made = tmp_path / "run-handover"
    assert (answer["folder"], answer["remarks"]) == (str(made), [])
    assert sorted(tree(made)) == answer["files"] == sorted([*FILES, "SHA256SUMS.sig", "operator.pub"])
    for name, content_of in tree(made).items():
        assert str(tmp_path).encode() not in content_of, name
        assert key.read_bytes().split(b"\n")[1] not in content_of
    assert (made / "README.txt").read_text().count("\n") == 3
    command = [sys.executable, "-I", "verify.py", ".", "--public-key", "operator.pub", "--without-models"]
    assert re.sub(" +", " ", " ".join(command[2:])) in (made / "README.txt").read_text()
    done = subprocess.run(command, cwd=made, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "verdict: good\n", "")
    public = sealed.public_key(tmp_path / "pub")
    assert coterie("privacy", "check", run, "--public-key", public)[0] == 0
    before = tree(made)
    assert coterie("handover", run, "--public-key", public)[0] == 0  # again, by the signature that is there
    assert tree(made) == before


def test_an_unsigned_pack_says_so(coterie, tmp_path):
    run = make(tmp_path / "run")
    status, out, _ = coterie("handover", run, "--out", "pack")
    assert status == 0
    assert "not signed: nothing shows who made this run" in out
    assert sorted(tree(tmp_path / "pack")) == sorted(FILES)
    assert "Nobody signed this run" in text_of((tmp_path / "pack" / "handover.html").read_text())
    assert not (run / "SHA256SUMS.sig").exists()
    sealed.sign(run)
    assert "was not verified" in coterie("handover", run, "--out", "pack")[1]
    assert "SHA256SUMS.sig" in tree(tmp_path / "pack")


def test_a_run_of_an_earlier_version_gets_its_list(coterie, tmp_path, key):
    run = make(tmp_path / "run")
    (run / "SHA256SUMS").unlink()
    assert coterie("handover", run, "--key", key)[0] == 0
    assert coterie("privacy", "check", run, "--public-key", sealed.public_key(tmp_path / "pub"))[0] == 0


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


REFUSED = {
    "unfinished": (lambda run: (run / "privacy.json").unlink(), ["has no privacy.json", "--resume"]),
    "a changed model": (lambda run: sealed.flip(run / sealed.MODEL), ["another SHA-256", "nothing was written"]),
    "a changed certificate": (lambda run: sealed.append(run / "privacy.json", b" "), ["privacy.json has another"]),
    "a lost ledger": (lambda run: (run / "ledger.jsonl").unlink(), ["ledger.jsonl"]),
    "no run": (lambda run: (run / "config.toml").unlink(), ["config.toml"]),
    "files in the way": (lambda run: write(run.parent / "run-handover" / "mine", ""), ["other files, such as mine"]),
    "a file in the way": (lambda run: write(run.parent / "run-handover", ""), ["is a file"]),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_refused_writes_nothing(coterie, tmp_path, key, how):
    run = make(tmp_path / "run")
    change, parts = REFUSED[how]
    change(run)
    before = tree(tmp_path)
    assert_refused(coterie("handover", run, "--key", key), *parts)
    assert tree(tmp_path) == before


def test_wrong_keys_are_refused(coterie, tmp_path, key):
    run, public = make(tmp_path / "run"), sealed.public_key(tmp_path / "pub", sealed.OTHER)
    assert_refused(coterie("handover", run, "--public-key", public), "is not signed")
    sealed.sign(run)
    assert_refused(coterie("handover", run, "--public-key", public), "no signature of SHA256SUMS by this key")
    assert_refused(coterie("handover", run, "--public-key", public, "--key", key), "cannot be combined")
    public.chmod(0o600)
    assert_refused(coterie("handover", run, "--key", public), "not an Ed25519 private key")
    assert_refused(coterie("handover", run, "--out", run), "other files")


# ---- the page ---------------------------------------------------------------------------------------------


def unit_column(**words):
    return sealed.record(), {"public": {"unit-column": "patient_id"}, **words}


@pytest.mark.parametrize(
    ("plan", "header", "parts"),
    [
        (sealed.joint(), {}, ["the data of a given client", "one site or device", "trust in its operator remains"]),
        (sealed.record(), {}, ["whether a given record", "the client adds the noise itself", "its settings name"]),
        (*unit_column(), ["the data of a given patient_id", "such as all visits of a patient"]),
        (Banded.calibrated(**NUMBERS, sampling_rate=0.25, rounds=8), {}, ["who takes part"]),
        (PLANS["rr-slot"].calibrated(**NUMBERS, sampling_rate=0.2, rounds=3), {}, ["verdict: cannot be recomputed"]),
        (sealed.joint(epsilon=0.5), {}, ["can hardly tell"]),
        (sealed.joint(epsilon=30.0, sampling_rate=1.0), {}, ["may often be able to tell"]),
    ],
    ids=["client", "record", "patient", "banded", "rr-slot", "little", "much"],
)
def test_the_page_answers_in_order_within_three_minutes(tmp_path, plan, header, parts):
    text = page_of(tmp_path, plan, **header)
    heads = ["1. What is protected", "2. Who sees what", "3. What an attacker", "4. What is outside"]
    heads += ["5. Which decisions were tuned", "6. How to check it without us"]
    assert sorted(heads, key=text.index) == heads
    assert len(text.split()) <= 700  # 230 a minute
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(("plan", "header"), [("joint", {"seed": 3}), ("none", {}), ("paper", {})])
def test_the_page_of_an_uncertified_run_says_so_first(tmp_path, plan, header):
    numbers = {"clients": 100, "num_clusters": 2, "sampling_rate": 0.2, "rounds": 3}
    made = PLANS[plan](**numbers) if plan == "none" else PLANS[plan].calibrated(**NUMBERS | numbers)
    text = page_of(tmp_path, made, **header)
    assert text.startswith("Hand-over of a run This run guarantees nothing")
    assert text.index("No guarantee") < text.index("How to check it")
    assert "verdict: not certified" in text
    assert "of 100" not in text


def test_the_odds_are_those_of_the_best_guess_between_two_gaussians():
    """With belief p, the best guess is right in 1 - p + p δ(log((1 - p) / p)) of the cases."""
    events = {"sampler": "poisson", "sampling_rate": 1.0, "noise_multiplier": 2.0, "charges": 4}
    for unit in ("client", "record"):
        for prior in (0.5, 0.1, 0.01):
            exact = 1 - prior + prior * float(gaussian_delta(1.0, [math.log((1 - prior) / prior)])[0])
            stated = {"unit": unit, COMPOSED: [[events]], "public_inputs": {}}
            assert exact <= attacker_right(stated, prior) <= exact + 1e-3
            if prior == 0.5:  # of a held-out record: randomised response at epsilon 5
                stated["public_inputs"] = {"held_out_epsilon": 5.0}
                assert attacker_right(stated, prior) == pytest.approx(1 / (1 + math.exp(-5.0)))


def test_the_odds_are_those_of_the_certificate(tmp_path):
    run = make(tmp_path / "run")
    stated = certificate(*read_ledger(run / "ledger.jsonl"))
    assert attacker_right(stated, 0.5) == pytest.approx(stated["attacker_right"], abs=1e-9)
    (line,) = stated[COMPOSED][0]
    assert (line["sampling_rate"], line["noise_multiplier"]) == (0.2, sealed.joint().noise_multiplier)
    assert line["charges"] == 3


@pytest.mark.parametrize(
    ("share", "text"), [(0.5, "50"), (0.7491, "75"), (0.74901, "75"), (0.7411, "74.2"), (0.9901, "99.01"), (1.0, "100")]
)
def test_odds_are_never_understated(share, text):
    assert formats.of_100(share) == text


def test_names_of_a_run_are_text_on_the_page(tmp_path):
    run = make(tmp_path / "<script>alert(1)<")
    pack.write_pack(run, tmp_path / "pack")
    assert "<script" not in (tmp_path / "pack" / "handover.html").read_text()
    assert json.loads((tmp_path / "pack" / "privacy.json").read_text())["certified"]
