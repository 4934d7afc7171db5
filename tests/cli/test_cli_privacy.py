"""``coterie privacy`` and ``coterie audit``: known answers, forged papers, broken mechanisms."""

import json
import subprocess
import sys

import pytest
from kit.commands import assert_refused, document, settings, tree
from kit.forging import rewrite_ledger
from kit.tables import for_rows

from coterie.privacy import (
    Event,
    Joint,
    Ledger,
    LedgerError,
    RecordPlan,
    RRSlot,
    SharedBudget,
    certificate,
    epsilon,
    read_ledger,
)
from coterie.privacy.check import check
from coterie.server import RunConfig, participation

SETTING = ["--delta", "1e-3", "--sampling-rate", "0.1", "--rounds", "100"]


def chosen(**values):
    """Settings of a run, as options."""
    return [word for name, value in values.items() for word in ("--set", f"{name.replace('_', '-')}={value}")]


MANY = ["--clients", "1000"]
# The digits of MNIST divided among ten clients: round 1 takes full batches.
RECORD = ["--rounds", "200", "--delta", "1e-4"]
RECORD += chosen(strategy="fedavg", privacy_unit="record", samples_per_client=6600, batch_size=32, clients=10)
RECORD += chosen(local_epochs=1)
FIRST = chosen(first_batch_size=6600)


def answered(answer):
    """The document that a command printed, and nothing else."""
    status, out, err = answer
    assert (status, err) == (0, "")
    return document(out)


# ---- noise and epsilon ------------------------------------------------------------------------------------


def test_privacy_noise(coterie):
    answer = answered(coterie("privacy", "noise", "--epsilon", 4, *SETTING, "--json"))
    assert answer["noise_multiplier"] == pytest.approx(1.1002, rel=1.5e-3)
    assert 3.98 < answer["epsilon"] <= 4
    assert (answer["delta"], answer["unit"], answer["accountant"], answer["certifies"]) == (1e-3, "client", "pld", True)
    status, out, err = coterie("privacy", "noise", "--epsilon", 4, *SETTING)
    assert (status, err) == (0, "")
    assert f"{answer['noise_multiplier']:.6g}" in out
    unread = chosen(reseed_every=0)  # nobody reads the counts
    without = answered(coterie("privacy", "noise", "--epsilon", 4, *SETTING, *unread, "--json"))
    assert without["noise_multiplier_counts"] is None
    assert without["noise_multiplier_updates"] == without["noise_multiplier"]
    banded = answered(coterie("privacy", "noise", "--epsilon", 4, *SETTING, "--mechanism", "banded", "--json"))
    assert banded["min_separation"] == 10
    assert banded["model_noise"] < 1.05 * answer["model_noise"]


def test_the_noise_is_that_of_the_run(coterie, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('rounds = 7\nclusters = 2\n[privacy]\nclip-norm = "adaptive"\nepsilon = 3.0\n')
    values = {"rounds": 9, "clusters": 2, "clip-norm": "adaptive", "epsilon": 3.0, "evaluate": "private"}
    plan = RunConfig(values).plan
    words = ("privacy", "noise", "--config", config, "--rounds", 9, *chosen(evaluate="private"), "--json")
    answer = answered(coterie(*words))
    for name in ("noise_multiplier", "noise_multiplier_updates", "noise_multiplier_counts", "model_noise", "delta"):
        assert answer[name] == getattr(plan, name)


def test_participations_are_compared_at_one_budget(coterie, monkeypatch):
    monkeypatch.setattr(participation, "_RATES", (0.2, 1.0))  # the noise of each is searched for
    monkeypatch.setattr(participation, "seconds_of_client", lambda config: 0.01)
    words = ("privacy", "noise", "--compare", "--epsilon", 8, "--delta", "2e-5", "--rounds", 20)
    ways = answered(coterie(*words, "--json"))
    assert all(7.9 < way["epsilon" if way["protects"] == "outsiders" else "epsilon_observers"] <= 8 for way in ways)
    assert all(way["epsilon"] <= way["epsilon_observers"] for way in ways)
    order = [(way["protects"] == "outsiders", way["noise"]) for way in ways]
    assert order == sorted(order)
    best, secret = ways[0], next(way for way in ways if way["protects"] == "outsiders")
    assert (best["mechanism"], best["sampling_rate"], best["messages"]) == ("joint", 1, 500)  # as sampling-rate = auto
    assert secret["epsilon_observers"] > 8
    shown = {(way["mechanism"], way["sampling_rate"]): way for way in ways if way["protects"] == "observers"}
    assert shown["banded", 0.2]["slots"] == 5
    (secure,) = (way for way in ways if (way["protects"], way["sampling_rate"]) == ("the server", 1))
    assert 1 < secure["noise"] / best["noise"] < 1.002  # nobody drops out, and one of 500 clients is corrupt
    assert shown["banded", 0.2]["noise"] < shown["joint", 0.2]["noise"]
    status, out, _ = coterie(*words)
    assert status == 0
    assert "ε, observers" in out
    assert out.count("joint") == sum(way["mechanism"] == "joint" for way in ways) > 2


def test_a_fixed_cohort_is_a_whole_number_of_clients(coterie):
    """Of 25 clients a rate of 0.1 takes 2, not 2.5: the noise is that of a rate of 0.08."""
    words = ["privacy", "noise", "--epsilon", 4, "--delta", "1e-3", "--rounds", 100, "--mechanism", "rr-slot", "--json"]
    few = answered(coterie(*words, "--sampling-rate", 0.1, "--clients", 25))
    exact = answered(coterie(*words, "--sampling-rate", 0.08, *MANY))
    assert few["noise_multiplier"] == pytest.approx(exact["noise_multiplier"], rel=2e-3)


def test_privacy_epsilon_is_its_inverse(coterie):
    answer = answered(coterie("privacy", "epsilon", "--noise-multiplier", 1.1002, *SETTING, "--json"))
    assert answer["epsilon"] == answer["epsilon_pld"] == pytest.approx(4, rel=1e-3)
    assert answer["epsilon_rdp"] > answer["epsilon_pld"]
    assert set(answer) == {"epsilon", "epsilon_pld", "epsilon_rdp", "delta", "unit", "adjacency"}
    assert "4" in coterie("privacy", "epsilon", "--noise-multiplier", 1.1002, *SETTING)[1]
    nothing = answered(coterie("privacy", "epsilon", *chosen(privacy_unit="none"), "--json"))
    assert nothing["epsilon"] is None  # infinite
    assert "∞" in coterie("privacy", "epsilon", *chosen(privacy_unit="none"))[1]


def test_record_level_noise(coterie):
    one = answered(coterie("privacy", "noise", "--epsilon", 5, *RECORD, *FIRST, "--json"))
    assert one["noise_multiplier"] == one["first_noise_multiplier"] == pytest.approx(1.230, rel=0.01)
    assert (one["unit"], one["certifies"]) == ("record", True)
    assert 4.98 < one["epsilon"] <= 5
    assert set(one).isdisjoint({"model_noise", "noise_multiplier_updates", "min_separation"})
    back = ("--noise-multiplier", one["noise_multiplier"])
    cost = answered(coterie("privacy", "epsilon", *RECORD, *FIRST, *back, "--json"))
    assert cost["epsilon_pld"] == pytest.approx(one["epsilon"], rel=1e-9)


@for_rows(
    ("words", "parts"),
    [
        (["noise", "--epsilon", "nan", *SETTING], ["epsilon"]),
        (["noise", "--epsilon", "4", *SETTING, "--delta", "1"], ["delta"]),
        (["noise", "--epsilon", "4", *SETTING, "--sampling-rate", "0"], ["sampling-rate"]),
        (["noise", "--epsilon", "0", *SETTING], ["epsilon"]),
        (["noise", "--epsilon", "4", *SETTING, "--mechanism", "none"], ["mechanism", "none", "rr-slot"]),
        (["noise", "--epsilon", "4", *SETTING, "--clients", "3"], ["clusters", "4"]),
        (["noise", "--epsilon", "4", *SETTING, *chosen(accountant="guess")], ["guess", "pld"]),
        (["noise", "--epsilon", "4", "--set", "sampling-rate"], ["--set sampling-rate", "key=value"]),
        (["noise", "--config", "nowhere.toml"], ["nowhere.toml"]),
        (["noise", "--compare", *chosen(privacy_unit="none")], ["client-level"]),
        (["noise", "--compare", *chosen(noise_multiplier=2)], ["noise-multiplier is set"]),
        (["epsilon", "--noise-multiplier", "0", *SETTING], ["noise-multiplier"]),
        (["epsilon", "--noise-multiplier", "1", *SETTING, "--delta", "0"], ["delta"]),
        (["check", "nowhere"], ["nowhere", "ledger.jsonl"]),
    ],
)
def test_nonsense_is_refused(coterie, tmp_path, words, parts):
    assert_refused(coterie("privacy", *words, "--json"), *parts)
    assert tree(tmp_path) == {}


@pytest.mark.slow
def test_questions_about_privacy_do_not_wait_for_torch(tmp_path):
    """`noise` and `epsilon` build the plan of a run, whose strategies are Flower's."""
    calls = {
        ("privacy", "check", "nowhere"): [],
        ("audit", "--mechanism", "joint", "--draws", "1000"): [],
        ("privacy", "noise", "--epsilon", "4", *SETTING): ["flwr"],
        ("privacy", "epsilon", "--noise-multiplier", "1", *SETTING): ["flwr"],
    }
    code = f"""
import sys
from coterie.cli import main
for words in {[*calls]!r}:
    sys.argv = ["coterie", *words]
    try:
        main()
    except SystemExit:
        pass
    print(words, sorted({{"torch", "flwr", "matplotlib", "opacus"}} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = [line for line in done.stderr.splitlines() if not line.startswith("error:")]
    assert loaded == [f"{words} {modules}" for words, modules in calls.items()]


# ---- check ------------------------------------------------------------------------------------------------

NUMBERS = {"clients": 100, "num_clusters": 2, "sampling_rate": 0.2, "rounds": 4, "clip_norm": 0.3, "delta": 1e-4}
EVALUATIONS = {"evaluations": 2, "evaluation_noise": 0.1}
#: Whether a charge is for training or evaluation, by its round.
PLANNED = [(1, "event"), (2, "event"), (2, "evaluation_event"), (3, "event"), (4, "event"), (4, "evaluation_event")]


@pytest.fixture(params=[Joint, RRSlot], ids=["joint", "rr-slot"])
def papers(request, tmp_path):
    """The folder of a finished run, as far as its privacy is concerned."""
    plan = request.param(**NUMBERS, noise_multiplier=1.2, identifier_share=0.1, epsilon=8.0, **EVALUATIONS)
    return written(tmp_path / "run", plan, PLANNED)


def written(folder, plan, charges, **about):
    folder.mkdir()
    ledger = plan.ledger(folder / "ledger.jsonl", **{"seed": None, **about})
    for number, kind in charges:
        ledger.charge_round(number, getattr(plan, kind)(), **{"for": kind})
    ledger.close()
    certify(folder)
    return folder


def certify(folder):
    (folder / "privacy.json").write_text(json.dumps(certificate(*read_ledger(folder / "ledger.jsonl"))))


def rewrite(path, line, change):
    """Change one line of a ledger, or one document."""
    if path.suffix == ".jsonl":
        rewrite_ledger(path, lambda lines: change(lines[line]))
    else:
        entry = json.loads(path.read_text())
        change(entry)
        path.write_text(json.dumps(entry))


def problems(folder):
    """What `coterie privacy check` finds in a ledger and its certificate."""
    return check(*read_ledger(folder / "ledger.jsonl"), json.loads((folder / "privacy.json").read_text()))


def test_papers_in_order(coterie, papers):
    before = tree(papers)
    status, out, err = coterie("privacy", "check", papers)
    assert (status, err) == (0, "")
    assert out.splitlines()[-3] == "the certificate matches the ledger"
    assert out.splitlines()[-1] == "verdict: good"
    assert "yes" in next(line for line in out.splitlines() if line.startswith("certified"))
    answer = answered(coterie("privacy", "check", papers, "--json"))
    assert answer["problems"] == []
    assert answer["certificate"] == document((papers / "privacy.json").read_text())
    assert tree(papers) == before


def test_a_real_run_passes_and_so_does_one_without_privacy(coterie, tmp_path):
    kinds = [{"evaluate": "private", "evaluate_every": 1, "evaluate_noise": 0.2}, {"privacy_unit": "none"}]
    for number, changes in enumerate(kinds):
        status, out, err = coterie("run", *settings(**changes), "--out", f"run{number}", "--json")
        assert status == 0, err
        status, out, err = coterie("privacy", "check", f"run{number}")
        assert (status, err) == (0, ""), out
    assert "no privacy was asked for" in out
    assert "∞" in out


def test_more_noise_after_a_crash_is_in_order(tmp_path):
    plan = Joint.calibrated(**NUMBERS, epsilon=6.0)
    folder = tmp_path / "run"
    folder.mkdir()
    ledger = plan.ledger(folder / "ledger.jsonl")
    for number in (1, 2, 2):
        ledger.charge_round(number, plan.event())
    again = plan.recalibrated(plan.noise_for(2, {plan.event(): 3}))
    assert again.noise_multiplier > plan.noise_multiplier
    for number in (3, 4):
        ledger.charge_round(number, again.event())
    ledger.close()
    certify(folder)
    assert problems(folder) == []


def test_a_run_that_is_still_going_is_checked_as_far_as_it_got(coterie, papers):
    (papers / "privacy.json").unlink()
    ledger = papers / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:4]) + '{"charge": 4, "rou')
    status, out, _ = coterie("privacy", "check", papers)
    assert status == 0
    assert "so far" in out.splitlines()[-3]
    assert out.splitlines()[-1] == "verdict: unfinished"


@for_rows(
    ("line", "change", "parts"),
    [
        (0, {"delta": 1e-3}, ["the ledger has delta"]),
        (0, {"epsilon": 60.0}, ["the ledger has epsilon"]),
        (0, {"accountant": "rdp"}, ["the ledger has accountant"]),
        (2, {"noise_multiplier": 10.0}, ["charge 2 (round 2) records epsilon"]),
        (2, {"noise_multiplier": 0.5}, ["charge 2 (round 2) has noise 0.5, less than"]),
        (2, {"sampling_rate": 0.1}, ["charge 2 (round 2) is for", "not planned"]),
        (6, {"epsilon": 1.0}, ["charge 6 (round 4) records epsilon 1.0"]),
        (6, {"epsilon": None}, ["charge 6 (round 4) records epsilon null"]),
        (6, {"epsilon": "little"}, ['records epsilon "little"']),
    ],
)
def test_a_forged_ledger_is_found_out(papers, line, change, parts):
    ledger = papers / "ledger.jsonl"
    before = ledger.read_bytes()
    rewrite(ledger, line, lambda entry: entry.update(change))
    found = problems(papers)
    ledger.write_bytes(before)
    assert any(all(part in problem for part in parts) for problem in found), found


def test_what_is_found_out_fails_the_command(coterie, papers):
    rewrite(papers / "ledger.jsonl", 2, lambda entry: entry.update(noise_multiplier=10.0))
    found = problems(papers)
    status, out, err = coterie("privacy", "check", papers, "--json")
    assert (status, err, document(out)["problems"], document(out)["verdict"]) == (1, "", found, "bad")
    status, out, _ = coterie("privacy", "check", papers)
    assert status == 1
    assert out.count("problem: ") == len(found) > 0
    assert "matches the ledger" not in out


def test_another_sampler_in_between_ends_the_check(papers):
    sampler = {"poisson": "fixed", "fixed": "poisson"}
    rewrite(papers / "ledger.jsonl", 3, lambda entry: entry.update(sampler=sampler[entry["sampler"]]))
    found = problems(papers)
    assert "charge 3 (round 2) is for" in found[0]
    assert any("cannot be composed" in problem for problem in found)


@for_rows(
    ("change", "part"),
    [
        (lambda c: c.update(epsilon=0.99 * c["epsilon"]), "privacy.json has epsilon = "),
        (lambda c: c.update(certified=False), "privacy.json has certified = false, but the ledger gives true"),
        (lambda c: c.update(certified=1), "privacy.json has certified = 1, but the ledger gives true"),
        (lambda c: c.update(mechanism="paper"), 'privacy.json has mechanism = "paper"'),
        (lambda c: c.update(accountant="dp-accounting 0.6.0, RDP"), "privacy.json has accountant = "),
        (lambda c: c.update(more=True), "privacy.json has more = true, but the ledger gives nothing"),
        (lambda c: c.pop("adjacency"), "privacy.json has adjacency = nothing, but the ledger gives"),
        (lambda c: c["accountants"].update(rdp=1.0), "privacy.json has accountants.rdp = 1.0"),
        (lambda c: c["public_inputs"].update(clients=7), "privacy.json has public_inputs.clients = 7, but the ledger"),
        (lambda c: c["outside"].pop(), "privacy.json has outside = "),
        (lambda c: c["charged"][0].update(charges=3), "privacy.json has charged = "),
    ],
)
def test_a_forged_certificate_is_found_out(papers, change, part):
    certify(papers)
    rewrite(papers / "privacy.json", 0, change)
    (found,) = problems(papers)
    assert part in found


def test_versions_and_rounding_may_differ(papers):
    def later(stated):
        stated["coterie"] = "9.1.0"
        stated["accountant"] = "dp-accounting 0.9.2, PLD"
        stated["epsilon"] *= 1 + 1e-9

    rewrite(papers / "privacy.json", 0, later)
    assert problems(papers) == []


def test_a_run_that_is_not_certified_says_why_and_is_in_order(coterie, tmp_path):
    plan = Joint.calibrated(**NUMBERS, epsilon=6.0)
    folder = written(tmp_path / "run", plan, PLANNED[:2], seed=3)
    status, out, _ = coterie("privacy", "check", folder)
    assert status == 0
    assert "not certified: seeded noise (seed 3)" in out


@for_rows(
    ("name", "content", "parts"),
    [
        ("ledger.jsonl", "", ["ledger.jsonl", "empty"]),
        ("ledger.jsonl", "dear diary\n", ["ledger.jsonl", "line 1"]),
        ("ledger.jsonl", "\udcff\n", ["ledger.jsonl", "it is not text"]),
        ("ledger.jsonl", '{"ledger": 1}\n', ["contains no plan"]),
        ("ledger.jsonl", '{"ledger": 1, "plan": {"mechanism": "magic"}}\n', ["contains no plan", "magic"]),
        ("ledger.jsonl", '{"ledger": 1, "plan": {"mechanism": "joint"}}\n', ["contains no plan"]),
        ("privacy.json", "{", ["privacy.json", "not valid JSON"]),
        ("privacy.json", "[]", ["privacy.json", "JSON object"]),
    ],
)
def test_damaged_papers_are_an_error(coterie, papers, name, content, parts):
    before = (papers / name).read_bytes()
    (papers / name).write_bytes(content.encode(errors="surrogateescape"))
    answer = coterie("privacy", "check", papers, "--json")
    (papers / name).write_bytes(before)
    assert_refused(answer, *parts)


def test_the_plan_of_a_record_level_run_is_checked_too():
    numbers = {"num_examples": 600, "batch_size": 30, "rounds": 2, "epsilon": 30.0, "delta": 1e-4}
    plan = RecordPlan(**numbers, first_batch_size=600, noise_multiplier=1.0)
    ledger = Ledger(plan.delta, plan.epsilon)
    for event, count in plan.planned().items():
        for _ in range(count):
            ledger.charge_round(1, event)
    header = {"ledger": 1, "delta": 1e-4, "epsilon": 30.0, "accountant": "pld", "plan": plan.terms()}
    assert check(header, ledger.charges, certificate(header, ledger.charges)) == []
    forged = [{**ledger.charges[0], "sampling_rate": 0.5}, *ledger.charges[1:]]
    assert "charge 1 (round 1) is for poisson sampling at rate 0.5, which is not planned" in check(header, forged, None)
    with pytest.raises(LedgerError, match="no plan"):
        check({"ledger": 1}, [], None)


# ---- several runs -----------------------------------------------------------------------------------------


def test_the_total_of_several_runs(coterie, tmp_path):
    one = Joint(**NUMBERS, noise_multiplier=1.2, epsilon=8.0)
    other = Joint(**NUMBERS | {"sampling_rate": 0.1, "delta": 1e-5}, noise_multiplier=2.0, epsilon=8.0)
    written(tmp_path / "whole", one, [(number, "event") for number in range(1, 5)])
    written(tmp_path / "begun", other, [(1, "event")])
    found = answered(coterie("privacy", "total", "whole", "begun", "--json"))
    events = {one.event(): 4, other.event(): 4}
    assert found["epsilon"] == pytest.approx(epsilon(events, 1e-5), rel=1e-9)
    assert found["epsilon_rdp"] == pytest.approx(epsilon(events, 1e-5, "rdp"), rel=1e-9)
    assert (found["delta"], found["certified"], found["reasons"], found["clients"]) == (1e-5, True, [], 100)
    written(tmp_path / "seeded", one, PLANNED[:1], seed=3)
    assert "not certified: seeded: seeded noise (seed 3)" in coterie("privacy", "total", "whole", "seeded")[1]
    assert [each["run"] for each in found["runs"]] == ["whole", "begun"]
    assert found["epsilon"] < sum(epsilon({e: n}, 1e-5) for e, n in events.items())
    at = answered(coterie("privacy", "total", "whole", "begun", "--delta", "1e-3", "--json"))
    assert at["epsilon"] == pytest.approx(epsilon(events, 1e-3), rel=1e-9)
    status, out, err = coterie("privacy", "total", "whole", "begun")
    assert (status, err) == (0, "")
    assert f"{found['epsilon']:.6g}" in out
    lax = answered(coterie("privacy", "total", "whole", "begun", "--delta", "0.02", "--json"))
    assert lax["certified"] is False
    assert "delta = 0.02 is above 1/100" in lax["reasons"][0]


def test_runs_that_do_not_add_up_are_refused(coterie, tmp_path):
    numbers = {"noise_multiplier": 1.2, "epsilon": 8.0}
    written(tmp_path / "one", Joint(**NUMBERS, **numbers), PLANNED[:1])
    written(tmp_path / "more", Joint(**NUMBERS | {"clients": 200}, **numbers), PLANNED[:1])
    written(tmp_path / "fixed", RRSlot(**NUMBERS, **numbers, identifier_share=0.2), PLANNED[:1])
    record = RecordPlan(num_examples=60, batch_size=6, rounds=2, epsilon=8.0, delta=1e-4, noise_multiplier=2.0)
    (tmp_path / "record").mkdir()
    Ledger(1e-4, 8.0, tmp_path / "record" / "ledger.jsonl", about={"plan": record.terms()}).close()
    assert_refused(coterie("privacy", "total", "one", "more"), "one has 100 clients, but more has 200")
    assert_refused(coterie("privacy", "total", "one", "fixed"), "different adjacencies")
    assert_refused(coterie("privacy", "total", "one", "record"), "record has privacy unit record")
    assert_refused(coterie("privacy", "total", "one", "one"), "must be distinct")
    assert_refused(coterie("privacy", "total", "one", "nowhere"), "nowhere", "cannot be read")


def test_a_budget_that_runs_share(coterie, tmp_path):
    new = ("--epsilon", 4, "--delta", "1e-4", "--clients", 100)
    assert_refused(coterie("budget", "create", "b.jsonl", *new[:4], "--clients", 100, "--sampler", "odd"), "sampler")
    assert_refused(coterie("budget", "create", "b.jsonl", *new[:2], "--delta", 2, "--clients", 100), "delta")
    assert_refused(coterie("budget", "create", "b.jsonl", "--epsilon", 0, *new[2:]), "--epsilon must be positive")
    assert coterie("budget", "create", "b.jsonl", *new) == (0, "", "")
    assert_refused(coterie("budget", "create", "b.jsonl", *new), "budgets cannot be changed")
    ledger = Ledger(1e-5, 9.0)
    ledger.share(SharedBudget(tmp_path / "b.jsonl", clients=100, sampler="poisson", epsilon=9.0, delta=1e-5))
    ledger.charge_round(1, Event(0.2, 1.5))
    ledger.close()
    spent = answered(coterie("budget", "show", "b.jsonl", "--json"))
    assert spent["epsilon"] == pytest.approx(epsilon({Event(0.2, 1.5): 1}, 1e-4))
    assert (spent["epsilon_budget"], spent["charges"]) == (4.0, 1)


def test_runs_of_the_command_line_share_a_budget(coterie):
    words = (*settings(evaluate="off"), "--budget-file", "budget.jsonl", "--json")
    status, _, err = coterie("run", *words, "--out", "first")
    assert status == 0, err
    status, _, err = coterie("run", *words, "--out", "second")
    assert status == 1
    assert "budget" in err
    spent = answered(coterie("budget", "show", "budget.jsonl", "--json"))
    assert 0 < spent["epsilon"] <= spent["epsilon_budget"]
    assert coterie("privacy", "check", "first")[0] == 0


# ---- audit ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_audit_of_what_is_shipped(coterie):
    status, out, err = coterie("audit", "--part", "mechanisms", "--draws", 60_000, "--json")
    assert (status, err) == (0, "")
    report = document(out)
    assert (report["draws"], report["seed"], report["violations"]) == (60_000, 0, [])
    assert {finding["mechanism"] for finding in report["findings"]} == {"joint", "banded", "secure", "rr-slot", "paper"}
    for finding in report["findings"]:
        assert finding["violated"] is not finding["certifying"]
        assert all({"epsilon", "delta_lower_bound", "delta_claimed"} == set(delta) for delta in finding["deltas"])
    assert any(finding["deltas"] for finding in report["findings"])


def test_audit_for_people(coterie, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # workers of tests set it to 80
    status, out, err = coterie("audit", "--mechanism", "joint", "--draws", 2000, "--seed", 1)
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == ["mechanism", "attack", "claim", "proved", "verdict"]
    assert out.count("holds") == 14  # thirteen attacks and the last sentence
    assert "control" not in out
    assert "but not its absence" in out.splitlines()[-1]


@pytest.mark.slow
def test_audit_fails_when_a_mechanism_that_certifies_is_broken(coterie, monkeypatch):
    monkeypatch.setattr(RRSlot, "identifier_sensitivity", 1.0)
    monkeypatch.setattr(RRSlot, "check_noise", lambda plan: None)  # which finds it, too
    words = ("audit", "--mechanism", "rr-slot", "--draws", 60_000)
    status, out, err = coterie(*words, "--json")
    assert (status, err) == (1, "")
    assert document(out)["violations"] == ["rr-slot: replaced client (gaussian identifiers)"]
    status, out, _ = coterie(*words)
    assert status == 1
    assert "do not trust certificates" in out.splitlines()[-1]


def test_audit_fails_when_noise_is_missing(coterie, monkeypatch):
    scale = Joint.noise_multiplier_updates.fget
    monkeypatch.setattr(Joint, "noise_multiplier_updates", property(lambda plan: scale(plan) / 2))
    monkeypatch.setattr(Joint, "check_noise", lambda plan: None)
    status, out, _ = coterie("audit", "--mechanism", "joint", "--draws", 20_000, "--json")
    assert status == 1
    assert "joint: additional client with an oversized update" in document(out)["violations"]


def test_audit_refuses_what_it_does_not_know(coterie):
    assert_refused(coterie("audit", "--mechanism", "magic", "--json"), "--mechanism magic", "rr-slot")
    assert_refused(coterie("audit", "--part", "magic", "--json"), "--part magic", "randomness")


def test_commands_that_are_gone_say_what_to_use(coterie, tmp_path):
    for command in ("spent", "budget"):
        assert_refused(
            coterie("privacy", command, "ledger.jsonl"), f"privacy {command} was removed: use coterie budget"
        )
    assert_refused(coterie("privacy", "curve"), "curve was removed: use coterie privacy epsilon with --rounds")
    assert_refused(coterie("privacy", "check", "budget"), "budget")  # a folder of this name
