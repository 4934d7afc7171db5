"""SHA256SUMS of a run folder and its signature: what belongs together, and what somebody changed."""

import json
import shutil
import subprocess

import pytest
from kit import sealed
from kit.commands import assert_refused, document

from coterie.files import FileError
from coterie.privacy.manifest import manifest_problems, read_manifest

MODEL = sealed.MODEL


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Made once, read by many."""
    return sealed.make(tmp_path_factory.mktemp("sealed") / "run", sealed.joint())


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def test_a_folder_as_it_was_written_has_no_problem_and_sha256sum_agrees(run):
    assert manifest_problems(run) == []
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=run, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("OK")) == (0, 4)


@pytest.mark.parametrize("how", sealed.CHANGES)
def test_a_change_is_named(run, how):
    change, part = sealed.CHANGES[how]
    change(run)
    problems = manifest_problems(run)
    assert problems
    assert part in problems[0]


@pytest.mark.parametrize(
    "line",
    [
        "{digest}  ../run/privacy.json",
        "{digest}  /etc/passwd",
        "{digest}  models/../ledger.jsonl",
        "{digest}  models/a/b",
        "{digest}  models/..",
        "{digest}  models/.hidden",
        "{digest}  config.toml",
        "{digest} privacy.json",
        "{digest}  ledger.jsonl",  # twice
        "zz  models/x",
        "",
        "{digest}  models/x\r",
        "{digest}  models/\u0661",
    ],
)
def test_other_lines_are_refused(run, line):
    sealed.append(run / "SHA256SUMS", f"{line.format(digest='0' * 64)}\n".encode())
    with pytest.raises(FileError, match="damaged"):
        read_manifest(run)


@pytest.mark.parametrize("left_out", ["privacy.json", "ledger.jsonl", "models/"])
def test_certificate_ledger_and_models_must_be_listed(run, left_out):
    lines = (run / "SHA256SUMS").read_text().splitlines(keepends=True)
    (run / "SHA256SUMS").write_text("".join(line for line in lines if left_out not in line))
    assert manifest_problems(run) != []


def test_cards_bind_models_to_the_certificate_also_without_a_list(run, tmp_path):
    (run / "SHA256SUMS").unlink()
    assert manifest_problems(run) == []
    sealed.swap(run)
    assert "model of cluster 1, by its card" in manifest_problems(run)[0]
    sealed.swap(run)
    (run / "privacy.json").write_text((run / "privacy.json").read_text().replace("4.0", "3.0"))
    assert "another privacy.json" in manifest_problems(run)[0]
    sealed.seal(run)  # a new list does not help
    assert "another privacy.json" in manifest_problems(run)[0]
    (run / "SHA256SUMS").unlink()
    for content in (b"", b"\xff" * 9, (10**6).to_bytes(8, "little") + b"[" * 10**6, b"\x02" + bytes(7) + b"[]"):
        (run / MODEL).write_bytes(content)
        assert any("damaged" in problem for problem in manifest_problems(run)), content[:20]


# ---- coterie privacy check --------------------------------------------------------------------------------


def checked(coterie, run, *words):
    status, out, err = coterie("privacy", "check", run, *words, "--json")
    assert err == ""
    answer = document(out)
    assert (status == 0) == (answer["problems"] == []) == (answer["verdict"] != "bad")
    return answer


def test_a_signature_is_verified_with_a_key(coterie, run, tmp_path):
    key, other = sealed.public_key(tmp_path / "operator.pub"), sealed.public_key(tmp_path / "other.pub", sealed.OTHER)
    unsigned = checked(coterie, run)
    assert unsigned["verdict"] == "good"
    assert "none (SHA256SUMS.sig is missing)" in unsigned["signature"]
    assert "not signed" in checked(coterie, run, "--public-key", key)["problems"][0]
    sealed.sign(run)
    assert "not verified" in checked(coterie, run)["signature"]
    signed = checked(coterie, run, "--public-key", key)
    assert (signed["verdict"], signed["signature"][:5]) == ("good", "valid")
    status, out, _ = coterie("privacy", "check", run, "--public-key", key)
    assert (status, out.splitlines()[-1]) == (0, "verdict: good")
    assert "no signature" in checked(coterie, run, "--public-key", other)["problems"][0]
    (run / "SHA256SUMS.sig").write_bytes(b"")
    assert checked(coterie, run, "--public-key", key)["signature"] == "wrong"
    (run / "SHA256SUMS").unlink()
    assert "SHA256SUMS is missing" in checked(coterie, run, "--public-key", key)["problems"][0]
    assert_refused(coterie("privacy", "check", run, "--public-key", run / MODEL), "--public-key", "Ed25519")


def test_a_changed_model_is_a_problem_whoever_asks(coterie, run):
    sealed.flip(run / MODEL)
    assert checked(coterie, run)["verdict"] == "bad"


def test_verdicts_on_runs_without_a_guarantee(coterie, run, tmp_path):
    seeded = sealed.make(tmp_path / "seeded", sealed.joint(), seed=3)
    assert checked(coterie, seeded)["verdict"] == "not certified"
    for name in ("privacy.json", "SHA256SUMS"):
        (run / name).unlink()
    assert checked(coterie, run)["verdict"] == "unfinished"
    assert json.loads((seeded / "privacy.json").read_text())["certified"] is False
