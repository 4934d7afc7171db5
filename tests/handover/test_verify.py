"""The stand-alone verifier gives the verdicts of ``coterie privacy check``: on 50 good folders, and 50 changed ones."""

import ast
import json
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as rdp_accountant
from kit import sealed
from kit.commands import document
from kit.forging import rewrite_ledger

import coterie.audit.printed  # noqa: F401 - adds the mechanism of the paper
from coterie.privacy import PLANS, Banded
from coterie.report.handover import verify
from coterie.server.checkpoints import tensor_content

MODEL = "models/cluster-0.safetensors"
VERDICTS = ("good", "bad", "cannot be recomputed", "not certified")
BANDED = {"clients": 100, "num_clusters": 2, "epsilon": 6.0, "delta": 1e-5, "clip_norm": 1.0}


@pytest.fixture(autouse=True, scope="module")
def losses_once():
    """Folders of one plan have the same losses, whose distribution takes dp-accounting seconds, and the same curves."""
    losses = cache(lambda events, seen: real_losses(Counter(dict(events)), seen))
    curve = cache(lambda rate, noise, orders: real_curve(rate, noise, np.array(orders)))
    real_losses, real_curve = verify.losses, rdp_accountant._compute_rdp_poisson_subsampled_gaussian
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verify, "losses", lambda events, seen: losses(frozenset(events.items()), seen))
        patched.setattr(
            rdp_accountant,
            "_compute_rdp_poisson_subsampled_gaussian",
            lambda q, noise_multiplier, orders: curve(q, noise_multiplier, tuple(orders)),
        )
        yield


def verified(folder, key=sealed.OPERATOR):
    """Verdict of the stand-alone verifier, as its main block gives it."""
    try:
        return VERDICTS[verify.verify(folder, key and key.public_key())]
    except Exception:
        return "bad"


def checked(coterie, folder, key=None):
    """Verdict of coterie privacy check."""
    status, out, err = coterie("privacy", "check", folder, "--json", *(["--public-key", key] if key else []))
    if err.startswith("error:"):
        assert status == 1
        return "bad"
    assert err == ""
    verdict = document(out)["verdict"]
    assert (status == 1) == (verdict == "bad")
    return verdict


# ---- what it is -------------------------------------------------------------------------------------------


def test_it_is_short_and_imports_two_packages_beside_the_standard_library():
    source = Path(verify.__file__).read_text()
    assert len(source.splitlines()) <= 153
    tree = ast.parse(source)
    roots = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    roots |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert roots - sys.stdlib_module_names == {"cryptography", "dp_accounting"}


@pytest.mark.parametrize("package", ["cryptography", "dp_accounting"])
def test_a_missing_package_is_named_in_one_line(package):
    without = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_path({verify.__file__!r})"
    done = subprocess.run([sys.executable, "-I", "-c", without], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (2, "", 1)
    assert package in done.stdout
    assert done.stdout.endswith(": pip install cryptography dp-accounting\n")


# Runs the script argv[1] once for each list of words in standard input, in one process: its libraries load slowly.
CALLS = """
import contextlib, io, json, runpy, sys

answers, script = [], sys.argv[1]
for words in json.load(sys.stdin):
    sys.argv = [script, *words]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            answers.append([end.code or 0, out.getvalue().splitlines()[-1]])
json.dump(answers, sys.stdout)
"""


@pytest.mark.slow
def test_it_runs_as_a_script_elsewhere(tmp_path):
    run, short = tmp_path / "run", tmp_path / "short"
    sealed.sign(sealed.make(run, sealed.joint()))
    shutil.copytree(run, short)
    shutil.rmtree(short / "models")
    key, other = sealed.public_key(tmp_path / "operator.pub"), sealed.public_key(tmp_path / "other.pub", sealed.OTHER)
    script = shutil.copy(verify.__file__, tmp_path / "verify.py")

    def output(*command, **words):
        done = subprocess.run([sys.executable, "-I", *command], capture_output=True, text=True, cwd="/", **words)
        assert done.stderr == ""
        return done

    done = output(script, run, "--public-key", key)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "verdict: good")
    calls = {
        (short, key): [1, "verdict: bad"],
        (short, key, "--without-models"): [0, "verdict: good"],
        (short, other, "--without-models"): [1, "verdict: bad"],
    }
    words = [[str(folder), "--public-key", str(public), *more] for folder, public, *more in calls]
    assert json.loads(output("-c", CALLS, script, input=json.dumps(words)).stdout) == list(calls.values())


# ---- good folders -----------------------------------------------------------------------------------------


def crash(ledger, plan, rounds):
    """A round is charged twice, and the noise of the others increases."""
    for number in (1, 1):
        ledger.charge_round(number, plan.event(), **{"for": "training"})
    again = plan.recalibrated(plan.noise_for(rounds - 1, {plan.event(): 2}))
    for number in range(2, rounds + 1):
        ledger.charge_round(number, again.event(), **{"for": "training"})


def extend(ledger, plan, rounds):
    """A run of few rounds is continued."""
    ledger.charge_round(1, plan.event(), **{"for": "training"})
    ledger.extend(rounds=rounds + 1)
    for number in range(2, rounds + 2):
        ledger.charge_round(number, plan.event(), **{"for": "training"})


@cache
def few():
    """A plan of few rounds that spends little of its budget."""
    return sealed.joint(epsilon=8.0).recalibrated(2.0)


def plans():
    """By name, what makes a plan and the other words of a folder: a noise multiplier takes a while to find."""
    start = {"run": "earlier", "clients": "same", "ledger": "0" * 16, "header": "0" * 16, "reasons": []}
    event = {"sampling_rate": 0.2, "noise_multiplier": 3.0, "sampler": "poisson", "count": 2}
    secret = {"participation": "secret", "min_separation": 3}
    private = {"evaluations": 1, "evaluation_noise": 0.1}
    return {
        "joint": lambda: (sealed.joint(), {}),
        "everybody": lambda: (sealed.joint(sampling_rate=1.0), {}),
        "many rounds": lambda: (sealed.joint(60, sampling_rate=0.05), {"rounds": 60}),
        "little epsilon": lambda: (sealed.joint(epsilon=0.2), {}),
        "much epsilon": lambda: (sealed.joint(epsilon=30.0), {}),
        "evaluations": lambda: (sealed.joint(evaluations=2, evaluation_noise=0.02), {}),
        "rdp": lambda: (sealed.joint(accountant="rdp"), {}),
        "a crash": lambda: (sealed.joint(5), {"charge": crash}),
        "continued": lambda: (few(), {"charge": extend}),
        "ended early": lambda: (sealed.joint(6), {"rounds": 2}),
        "initial models": lambda: (few(), {"start": {**start, "events": [event]}}),
        "banded": lambda: (Banded.calibrated(**BANDED, sampling_rate=0.25, rounds=9), {}),
        "banded secret": lambda: (Banded.calibrated(**BANDED, sampling_rate=0.1, rounds=9, **secret), {}),
        "record": lambda: (sealed.record(), {}),
        "first round": lambda: (sealed.record(first_batch_size=600), {}),
        "selections": lambda: (sealed.record(selection="gumbel", selections=2, selection_epsilon=0.1), {}),
        "histogram": lambda: (
            PLANS["joint"].calibrated_with_histogram(0.05, **BANDED, sampling_rate=0.5, rounds=3, **private),
            {},
        ),
        "secure": lambda: (PLANS["secure"].calibrated(**BANDED, sampling_rate=0.2, rounds=11), {}),
        "secure, evaluated": lambda: (
            PLANS["secure"].calibrated_with_histogram(0.05, **BANDED, sampling_rate=0.5, rounds=3, **private),
            {},
        ),
        "held-out records": lambda: (sealed.record(held_out_epsilon=4.9), {}),
        "profiles": lambda: (sealed.record(profiles=(1.0, 0.5)), {"public": {"unit-column": "patient_id"}}),
    }


@cache
def planned(name):
    """What ``plans`` makes, once."""
    return plans()[name]()


def good(folder, name, variant):
    """Make one of three variants of a folder, which its operator has signed."""
    plan, words = planned(name)
    changes = ({}, {"models": 1}, {"tuned": {"lr": 0.1}, "diagnostics": []})[variant]
    run = sealed.make(folder, plan, **{**words, **changes})
    if variant == 1:
        (run / "models/constants.safetensors").write_bytes(tensor_content({}, {}))
        sealed.seal(run)
    sealed.sign(run)
    return run


GOOD = [(name, variant) for variant in range(3) for name in plans()][:50]


def agree_on_good(coterie, tmp_path, cases):
    key = sealed.public_key(tmp_path / "operator.pub")
    verdicts = {}
    for name, variant in cases:
        run = good(tmp_path / f"{name}-{variant}", name, variant)
        verdicts[name, variant] = verified(run), checked(coterie, run, key)
    assert verdicts == dict.fromkeys(cases, ("good", "good"))


def test_both_call_a_good_folder_good(coterie, tmp_path):
    agree_on_good(coterie, tmp_path, [("joint", 0), ("banded", 1), ("profiles", 2), ("histogram", 0)])


def test_both_call_held_out_records_good(coterie, tmp_path):
    agree_on_good(coterie, tmp_path, [("held-out records", 0)])


def test_both_call_runs_without_a_trusted_server_good(coterie, tmp_path):
    agree_on_good(coterie, tmp_path, [("secure", 0), ("secure, evaluated", 0)])


def test_both_find_held_out_records_that_are_not_planned(coterie, tmp_path):
    def twice(ledger, plan, rounds):
        sealed.charge_rounds(ledger, plan, rounds)
        plan.charge_histogram(ledger, rounds)

    run = sealed.make(tmp_path / "run", sealed.record(held_out_epsilon=2.0), charge=twice)
    sealed.sign(run)
    assert verified(run) == "bad"
    assert checked(coterie, run) == "bad"


@pytest.mark.slow
def test_both_call_50_good_folders_good(coterie, tmp_path):
    assert len(GOOD) == len(set(GOOD)) == 50
    agree_on_good(coterie, tmp_path, GOOD)


# ---- folders that somebody without the key changed ----------------------------------------------------------


def remove(run, name):
    (run / name).unlink()


def shorten(run):
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))


def state(run, **changes):
    document = json.loads((run / "privacy.json").read_text())
    sealed.write_certificate(run, {**document, **changes})


def with_other(run, *names):
    """Take files of a run with another plan, which the operator has signed as well."""
    other = good(run.parent / "other", "much epsilon", 0)
    for name in names:
        shutil.copy(other / name, run / name)


def resign(run, key):
    """Make a new list of the files, and sign it."""
    sealed.write_model(run, 0)
    sealed.write_model(run, 1)
    sealed.seal(run, key)


KEYLESS = {
    **{name: change for name, (change, _) in sealed.CHANGES.items()},
    "no signature": lambda run: remove(run, "SHA256SUMS.sig"),
    "empty signature": lambda run: (run / "SHA256SUMS.sig").write_bytes(b""),
    "long signature": lambda run: sealed.append(run / "SHA256SUMS.sig", b"\0"),
    "signature of another key": lambda run: sealed.sign(run, sealed.OTHER),
    "signature of another run": lambda run: with_other(run, "SHA256SUMS.sig"),
    "certificate of another run": lambda run: with_other(run, "privacy.json"),
    "certificate and list of another run": lambda run: with_other(
        run, "privacy.json", "SHA256SUMS", "SHA256SUMS.sig", MODEL, "models/cluster-1.safetensors"
    ),
    "ledger of another run": lambda run: with_other(run, "ledger.jsonl"),
    "model of another run": lambda run: with_other(run, MODEL),
    "a charge dropped": shorten,
    "no ledger": lambda run: remove(run, "ledger.jsonl"),
    "no list": lambda run: remove(run, "SHA256SUMS"),
    "epsilon lowered": lambda run: state(run, epsilon=0.1),
    "epsilon lowered, all signed by another key": lambda run: [state(run, epsilon=0.1), resign(run, sealed.OTHER)],
    "all made anew, signed by another key": lambda run: resign(run, sealed.OTHER),
}

# ---- folders that the owner of the key changed, or that nobody has signed --------------------------------------


def certified(run, change):
    """Change the certificate, and all that follows from its bytes."""
    document = json.loads((run / "privacy.json").read_text())
    change(document)
    sealed.write_certificate(run, document)
    resign(run, sealed.OPERATOR)


def costs(document, factor=0.5):
    """Lower every cost."""
    for name in ("epsilon", "epsilon_participation_visible"):
        document[name] *= factor
    for name in document["accountants"]:
        document["accountants"][name] *= factor


def of_its_releases(document):
    """State the costs that follow from the releases in the certificate."""
    events = verify.releases(document["composed"][0])[1]
    curve, seen = (verify.losses(events, seen) for seen in (False, True))
    document["epsilon"] = document["accountants"]["pld"] = curve.get_epsilon_for_delta(document["delta"])
    document["epsilon_participation_visible"] = seen.get_epsilon_for_delta(document["delta"])
    document["attacker_right"] = (1 + seen.get_delta_for_epsilon(0)) / 2


def fewer(document):
    document["composed"][0][0]["charges"] -= 1
    of_its_releases(document)


def quieter(document):
    document["composed"][0][0]["noise_multiplier"] *= 2
    of_its_releases(document)


def charged(run, change):
    """Change a line of the ledger, and chain it again; the certificate stays."""
    rewrite_ledger(run / "ledger.jsonl", change)
    resign(run, sealed.OPERATOR)


def forge_text(run, old, new):
    text = (run / "privacy.json").read_text()
    assert old in text
    (run / "privacy.json").write_text(text.replace(old, new, 1))
    resign(run, sealed.OPERATOR)


def hidden(run, value):
    """Take a charge for training out of the count, in the ledger and in the certificate."""
    rewrite_ledger(run / "ledger.jsonl", lambda lines: lines[1].update(held_out_epsilon=value))
    document = json.loads((run / "privacy.json").read_text())
    document["charged"][0]["charges"] -= 1
    fewer(document)
    sealed.write_certificate(run, document)
    resign(run, sealed.OPERATOR)


DEEP = "[" * 100_000 + "]" * 100_000
OWNERS = {
    "all costs lowered": lambda run: certified(run, costs),
    "epsilon lowered by 1 %": lambda run: certified(run, lambda d: costs(d, 0.99)),
    "epsilon alone lowered": lambda run: certified(run, lambda d: d.update(epsilon=0.1)),
    "epsilon alone raised": lambda run: certified(run, lambda d: d.update(epsilon=3.9999)),
    "odds lowered": lambda run: certified(run, lambda d: d.update(attacker_right=0.51)),
    "visible epsilon lowered": lambda run: certified(run, lambda d: d.update(epsilon_participation_visible=4.0)),
    "a release left out": lambda run: certified(run, fewer),
    "more noise in the releases": lambda run: certified(run, quieter),
    "fewer charged": lambda run: certified(run, lambda d: d["charged"][0].update(charges=1)),
    "charges renumbered": lambda run: certified(run, lambda d: d.update(charges=1)),
    "fewer rounds": lambda run: certified(run, lambda d: d.update(rounds=1)),
    "another delta": lambda run: certified(run, lambda d: d.update(delta=1e-3)),
    "another unit": lambda run: certified(run, lambda d: d.update(unit="record")),
    "another mechanism": lambda run: certified(run, lambda d: d.update(mechanism="banded")),
    "more clients": lambda run: certified(run, lambda d: d["public_inputs"].update(clients=10**6)),
    "a reason beside certified": lambda run: certified(run, lambda d: d.update(reasons=["seeded"])),
    "a charge dropped and chained": lambda run: charged(run, lambda lines: lines.pop()),
    "a charge with more noise": lambda run: charged(run, lambda lines: lines[1].update(noise_multiplier=9.0)),
    "a seed": lambda run: charged(run, lambda lines: lines[0].update(seed=3)),
    "a charge twice": lambda run: charged(run, lambda lines: lines.append({**lines[-1], "charge": len(lines)})),
    "a charge of no clients": lambda run: charged(run, lambda lines: lines[1].update(sampling_rate=0)),
    **{
        f"a charge hidden as {value} for held-out records": lambda run, value=value: hidden(run, value)
        for value in (-1.0, 0, 1e-9, True)
    },
    "a charge of minus one": lambda run: charged(run, lambda lines: lines[1].update(count=-1)),
    "NaN": lambda run: forge_text(run, '"epsilon_budget": 4.0', '"epsilon_budget": NaN'),
    "a hidden NaN": lambda run: forge_text(run, '"reasons": []', '"reasons": [], "delta": NaN'),
    "minus epsilon": lambda run: certified(run, lambda d: costs(d, -1)),
    "infinity": lambda run: certified(run, lambda d: d.update(epsilon=None)),
    "an integer beyond floats": lambda run: certified(run, lambda d: d.update(epsilon=10**400)),
    "a text as epsilon": lambda run: certified(run, lambda d: d.update(epsilon="4")),
    "true as epsilon": lambda run: certified(run, lambda d: d.update(epsilon=True)),
    "deeply nested": lambda run: forge_text(run, '"reasons": []', f'"reasons": [], "more": {DEEP}'),
    "no object": lambda run: [(run / "privacy.json").write_text("[]"), resign(run, sealed.OPERATOR)],
    "a further charge in the certificate": lambda run: certified(run, lambda d: d["charged"].append(d["charged"][0])),
    "no releases": lambda run: certified(run, lambda d: d.update(composed=[])),
}
TAMPERED = {**KEYLESS, **OWNERS}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """Made once, read by many."""
    return good(tmp_path_factory.mktemp("intact") / "run", "joint", 0)


@pytest.mark.parametrize("how", TAMPERED)
def test_both_call_a_changed_folder_bad(coterie, intact, tmp_path, how):
    assert len(TAMPERED) >= 50
    run = shutil.copytree(intact, tmp_path / "run")
    TAMPERED[how](run)
    key = sealed.public_key(tmp_path / "operator.pub")
    assert (verified(run), checked(coterie, run, key)) == ("bad", "bad")
    if how in OWNERS:  # nor does it help to leave the signature out
        remove(run, "SHA256SUMS.sig")
        assert (verified(run, None), checked(coterie, run)) == ("bad", "bad")


# ---- other verdicts, and what no check of a folder can see -------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "header", "verdicts"),
    [
        ("rr-slot", {}, ("cannot be recomputed", "good")),  # dp-accounting has no distribution of its sampling
        ("rr-slot", {"seed": 3}, ("not certified", "not certified")),
        ("paper", {}, ("not certified", "not certified")),
        ("none", {}, ("not certified", "not certified")),
        ("joint", {"seed": 3}, ("not certified", "not certified")),
    ],
)
def test_verdicts_on_other_runs(coterie, tmp_path, plan, header, verdicts):
    numbers = {"clients": 100, "num_clusters": 2, "sampling_rate": 0.2, "rounds": 3}
    private = {**numbers, "epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0}
    made = PLANS[plan](**numbers) if plan == "none" else PLANS[plan].calibrated(**private)
    run = sealed.make(tmp_path / "run", made, **header)
    sealed.sign(run)
    key = sealed.public_key(tmp_path / "operator.pub")
    assert (verified(run), checked(coterie, run, key)) == verdicts
    if verdicts[1] == "not certified":
        certified(run, lambda document: document.update(certified=True, reasons=[]))
        assert (verified(run), checked(coterie, run, key)) == ("bad", "bad")
    certified(run, lambda document: document.update(rounds=2))
    assert (verified(run), checked(coterie, run, key)) == ("bad", "bad")


def test_a_profile_with_too_few_releases_is_not_good(coterie, tmp_path):
    run = good(tmp_path / "run", "profiles", 0)

    def change(document):
        document["composed"][1][0]["charges"] //= 2

    certified(run, change)
    key = sealed.public_key(tmp_path / "operator.pub")
    assert (verified(run), checked(coterie, run, key)) == ("cannot be recomputed", "bad")


def test_what_the_signature_alone_protects(coterie, tmp_path):
    """Sentences, and planned rounds that never took place: the owner of the key can change them in this check alone."""
    early = good(tmp_path / "early", "ended early", 0)

    def charged_only(document):
        document["composed"][0][0]["charges"] = 2
        of_its_releases(document)
        document["accountants"]["rdp"] = rdp(document)

    certified(early, charged_only)
    text = good(tmp_path / "text", "joint", 0)
    certified(text, lambda document: document.update(outside=[]))
    key = sealed.public_key(tmp_path / "operator.pub")
    for run in (early, text):
        assert (verified(run), checked(coterie, run, key)) == ("good", "bad")
        sealed.sign(run, sealed.OTHER)
        assert verified(run) == "bad"


def rdp(document):
    accountant = verify.rdp.RdpAccountant()
    for (_, rate, noise), many in verify.releases(document["composed"][0])[1].items():
        event = verify.PoissonSampledDpEvent(rate, verify.GaussianDpEvent(noise))
        accountant.compose(event, many)
    return accountant.get_epsilon(document["delta"])


def test_a_ledger_that_its_operator_makes_up_passes_both(coterie, tmp_path):
    """The operator runs the server: whoever does not trust it needs privacy at record level."""
    honest, made_up = sealed.joint(), sealed.joint(epsilon=1.0)
    assert made_up.noise_multiplier > honest.noise_multiplier
    run = sealed.make(tmp_path / "run", made_up)
    sealed.sign(run)
    key = sealed.public_key(tmp_path / "operator.pub")
    assert (verified(run), checked(coterie, run, key)) == ("good", "good")
