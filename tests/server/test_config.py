"""The schema: what a user may type, what it becomes, and what is refused before anything starts."""

import math
import re
import tomllib

import generated as pages
import pytest
import tomli_w
from kit.tables import for_rows

from coterie.cli.run import settings_of
from coterie.fields.removed import REMOVED
from coterie.fields.settings import flat, nested
from coterie.server import SETTINGS, ConfigError, RunConfig, planning
from coterie.server.continuation import differences
from coterie.server.planning import participation_warnings
from coterie.server.resolution import COMMON, combine
from coterie.strategies.fedprox import FedProxSettings
from coterie.strategies.registry import STRATEGIES


def message(values):
    with pytest.raises(ConfigError) as caught:
        RunConfig(values)
    return str(caught.value)


def test_the_block_of_pyproject_is_generated():
    pyproject = pages.PYPROJECT.read_text()
    assert pages.block() in pyproject, "run `make settings`"
    assert flat(tomllib.loads(pyproject)["tool"]["flwr"]["app"]["config"]) == dict.fromkeys(SETTINGS, "auto")
    assert pages.PAGE.read_text() == pages.page(), "run `make settings`"


def test_the_last_part_of_a_name_is_unambiguous():
    common = [each.key for table in COMMON for each in table.declared().values()]
    assert len(common) == len(set(common))
    for method in STRATEGIES.values():
        assert not {each.key for each in method.settings_class.declared().values()} & set(common)


def test_defaults_are_valid_and_documented():
    config = RunConfig({})
    defaults = {name: each.shown_default for name, each in SETTINGS.items() if name in config.values}
    automatic = {"aggregation.sampling-rate": 1.0, "evaluation.evaluate": "diagnostic"}
    assert config.values == defaults | automatic | {"evaluation.evaluate-clients": 200}
    assert all(each.help and each.allowed for each in SETTINGS.values())


def test_simulations_of_many_clients_evaluate_a_sample():
    exact = {"evaluate": "diagnostic"}

    def sampled(deployed=False, **values):
        return RunConfig(values, deployed=deployed).evaluation.evaluate_clients

    assert sampled() == sampled(clients=201) == 200
    assert sampled(clients=200) == sampled(**{"evaluate-clients": 0}) == 0
    assert sampled(**{"evaluate-clients": 30}) == sampled(deployed=True, **{"evaluate-clients": 30, **exact}) == 30
    assert sampled(deployed=True) == sampled(deployed=True, **exact) == 0
    assert sampled(evaluate="private") == sampled(evaluate="off") == sampled(strategy="kfed") == 0
    with pytest.raises(ConfigError, match="evaluate-clients = 30 has no effect"):
        sampled(evaluate="private", **{"evaluate-clients": 30})


def test_all_clients_take_part_where_that_is_affordable():
    """Full participation has the least noise against those who observe it, and costs messages alone."""

    def rate(**values):
        return RunConfig({name.replace("_", "-"): value for name, value in values.items()}).sampling_rate

    assert rate() == rate(clients=5000) == rate(strategy="fedavg") == 1
    assert rate(clients=50_000) == rate(clients=50_000, sampling_rate="auto") == 0.1
    assert rate(sampling_rate=0.3) == 0.3
    for mechanism in ("banded", "rr-slot"):  # these take turns, or need the amplification
        assert rate(mechanism=mechanism) == 0.2
    assert rate(privacy_unit="none") == 0.2
    assert rate(strategy="fedavg", privacy_unit="record", samples_per_client=90) == 1


def test_the_step_of_the_server_follows_from_public_numbers():
    def step(**values):
        return RunConfig({"noise-multiplier": 4.0, **{n.replace("_", "-"): v for n, v in values.items()}}).server_lr

    # the noise of all rounds moves a parameter by 0.3: eta C sigma sqrt(T + 1) / (qM/k) = 0.3
    noise = 20.0 * math.sqrt(81) * 0.3 / 500
    assert step(clusters=1, reseed_every=0, noise_multiplier=20.0) * noise == pytest.approx(0.3)
    assert step(clip_norm=0.6) == pytest.approx(step() / 2)
    assert step(clients=250) == pytest.approx(step() / 2)
    assert step(clients=4000) == 4  # where noise is no limit, clipped updates are
    assert step(server_lr=1.25) == 1.25
    assert RunConfig({"privacy-unit": "none"}).server_lr == 1


def test_the_step_of_the_server_follows_from_the_noise_of_clients_at_record_level():
    def step(**values):
        numbers = {"strategy": "fedavg", "privacy-unit": "record", "samples-per-client": 90, "batch-size": 30}
        numbers |= {"clients": 16, "rounds": 25, "local-epochs": 2, "lr": 0.5, "clip-norm": 2.0}
        numbers |= {"noise-multiplier": 9.0}
        return RunConfig({**numbers, **{name.replace("_", "-"): value for name, value in values.items()}}).server_lr

    # 25 rounds of 6 steps, each with the noise lr z c / b in the update of one of 16 clients
    noise = 0.5 * 9.0 * 2.0 / 30 * math.sqrt(25 * 6) / math.sqrt(16)
    assert step() * noise == pytest.approx(0.3)
    assert step(lr=1.0, clip_norm=4.0) == pytest.approx(step() / 4)
    assert step(strategy="oracle", clusters=4) == pytest.approx(step() / 2)  # four clients per model
    assert step(lr_decay=0.5, lr=2.0) == pytest.approx(step() * 5 * math.sqrt(0.75) / 4)  # sum of 0.25^t
    assert step(noise_multiplier=1.0) == 1  # clients' own steps are limited by their noise, the server's is not longer
    assert step(server_lr=1.25) == 1.25


def test_the_last_models_are_averaged_under_client_level_privacy():
    assert RunConfig({}).averaging.last == RunConfig({"clusters": 0}).averaging.last == 0.2
    assert RunConfig({"average-last": 0}).averaging.last == RunConfig({"privacy-unit": "none"}).averaging.last == 0


def test_values_are_coerced_from_strings():
    texts = {name: str(value) for name, value in RunConfig({}).values.items()}
    assert RunConfig(texts) == RunConfig({})
    config = RunConfig({"clusters": "3", "epsilon": "2", "delta": "1e-6", "seed": "7", "resume": "True", "groups": 3})
    expected = {"clusters": 3, "epsilon": 2.0, "delta": 1e-6, "seed": 7, "resume": True, "groups": "3"}
    assert {name: config[name] for name in expected} == expected
    assert all(type(config[name]) is type(value) for name, value in expected.items())


@for_rows(
    ("values", "parts"),
    [
        ({"epsilonn": 1}, ["unknown setting 'epsilonn'", "did you mean 'epsilon'"]),
        ({"batch_size": 1}, ["unknown setting 'batch_size'", "did you mean 'batch-size'"]),
        ({"epsilon": math.nan}, ["epsilon = nan", "finite"]),
        ({"epsilon": "nan"}, ["epsilon = 'nan'"]),
        ({"epsilon": math.inf}, ["epsilon = inf", "finite"]),
        ({"epsilon": True}, ["epsilon = True"]),
        ({"epsilon": "many"}, ["epsilon = 'many'"]),
        ({"clip-norm": math.nan}, ["clip-norm = nan"]),
        ({"delta": 0}, ["delta = 0", "'auto'", "between 0 and 1"]),
        ({"delta": math.nan}, ["delta = nan"]),
        ({"delta": "automatic"}, ["delta = 'automatic'"]),
        ({"sampling-rate": math.nan}, ["sampling-rate = nan"]),
        ({"rounds": 2.5}, ["rounds = 2.5", "an integer"]),
        ({"rounds": "1e999"}, ["rounds = '1e999'"]),
        ({"clients": math.nan}, ["clients = nan"]),
        ({"seed": -1}, ["seed = -1", "'auto'"]),
        ({"seed": 2**63}, ["seed = 9223372036854775808"]),
        ({"batch-size": 10**400}, ["batch-size = 1000"]),
        ({"label-skew": "non-iid:-0.5"}, ["label-skew = 'non-iid:-0.5'", "non-iid:SHARE (0 to 1)"]),
        ({"label-skew": "non-iid:1.01"}, ["label-skew = 'non-iid:1.01'"]),
        ({"label-skew": "dirichlet:nan"}, ["label-skew = 'dirichlet:nan'"]),
        ({"label-skew": "dirichlet:1e+10"}, ["label-skew = 'dirichlet:1e+10'"]),
        ({"resume": "perhaps"}, ["resume = 'perhaps'"]),
        # qM/k is 0.2 * 500 / 4 = 25
        ({"sampling-rate": 0.2, "rebalance-min": 25.01}, ["rebalance-min", "at most qM/k = 25", "25.01"]),
        ({"min-clients": 501}, ["min-clients = 501", "exceeds the number of clients (500)"]),
        ({"min-replies": 0.5}, ["min-replies = 0.5", "which repeated requests would reveal"]),
        ({"clusters": 501}, ["clusters = 501", "exceeds the number of clients (500)"]),
        ({"strategy": "fedavg", "rebalance-min": 1}, ["fedavg", "rebalance-min"]),
        ({"strategy": "fedavg", "clusters": 3}, ["fedavg", "clusters = 3"]),
        ({"strategy": "icfa"}, ["strategy = 'icfa'", "did you mean 'ifca'"]),
        ({"model": "mlp32"}, ["model = 'mlp32'", "did you mean 'mlp-32'"]),
        ({"dataset": "minst"}, ["dataset = 'minst'", "did you mean 'mnist'"]),
        ({"shift": "rotate"}, ["shift = 'rotate'", "did you mean 'rotation'"]),
        ({"privacy-unit": "clients"}, ["privacy-unit = 'clients'", "did you mean 'client'"]),
        ({"groups": "0"}, ["groups", "'0'"]),
        ({"groups": "two"}, ["groups", "'two'"]),
        ({"groups": "2:-1"}, ["groups", "'2:-1'"]),
        ({"groups": "1:nan"}, ["groups", "'1:nan'"]),
        ({"groups": "9", "clients": 8}, ["8 clients", "groups"]),
        ({"groups": "1000:1", "clients": 8}, ["without a client"]),
    ],
)
def test_refused_with_the_key_the_value_and_what_is_allowed(values, parts):
    text = message(values)
    for part in parts:
        assert part in text, text


def test_bounds_that_are_allowed():
    config = RunConfig({"sampling-rate": 1, "rebalance-min": 125, "clusters": 4, "groups": "2:1:1", "seed": 0})
    assert config["rebalance-min"] == 125.0  # qM/k itself
    assert config.seed == 0  # a seed, although it is false


@for_rows("values", [{}, {"clusters": 1}, {"clusters": "auto", "reseed-every": "auto"}])
def test_fedavg_has_one_model_and_nothing_to_release_counts_for(values):
    config = RunConfig({"strategy": "fedavg", **values})
    assert (config["clusters"], config.reseeding, config.plan.identifier_share) == (1, None, 0.0)


@for_rows(
    ("values", "complaint"),
    [
        ({"strategy": "fedavg", "clusters": 4}, "clusters = 4: fedavg trains one model; set it to 1"),
        ({"strategy": "fedavg", "reseed-every": 5}, "reseed-every = 5: fedavg has no clusters"),
        ({"landmarks": 3}, "lcfl.landmarks = 3: strategy = 'ifca' does not use it"),
        ({"lcfl.landmarks": 0}, "lcfl.landmarks = 0: strategy = 'ifca' does not use it"),
        ({"proximal-mu": 0.5}, "fedprox.proximal-mu = 0.5: strategy = 'ifca' does not use it"),
        ({"strategy": "lcfl", "proximal-mu": 0.5}, "fedprox.proximal-mu = 0.5: strategy = 'lcfl' does not use it"),
        ({"lcfl.proximal-mu": 0.5}, "lcfl.proximal-mu was removed: the clusters of lcfl train by FedAvg"),
        ({"aggregator": "median:0.3"}, "aggregator = 'median:0.3': must be mean, median, trimmed-mean"),
        ({"identifiers": "exponential"}, "no effect with privacy.mechanism = 'joint', only with rr-slot"),
        ({"masks": True, "mechanism": "joint"}, "only with secure"),
        ({"masks": True, "mechanism": "banded"}, "only with secure"),
        ({"participation": "secret"}, "no effect with privacy.mechanism = 'joint', only with banded"),
        ({"participation": "visible"}, "only with banded; leave it out, or change privacy.mechanism"),
        ({"participation": "visible", "mechanism": "rr-slot"}, "no effect with privacy.mechanism = 'rr-slot'"),
        ({"strategy": "lcfl", "mechanism": "banded"}, "privacy.mechanism = banded: lcfl has no privacy by default"),
        (
            {"strategy": "rc-dpfl", "samples-per-client": 90, "mechanism": "banded"},
            "privacy.mechanism = 'banded' is for privacy-unit = client: at record level, clients train by DP-SGD",
        ),
        (
            {"strategy": "ppfc-gan", "privacy-unit": "record", "samples-per-client": 90, "clip-norm": "adaptive"},
            "clip-norm = adaptive requires several rounds: ppfc-gan has one",
        ),
        ({"loss-noise": 2}, "no effect with privacy.privacy-unit = 'client', only with record"),
        ({"epsilon": 2, "privacy": {"epsilon": 3}}, "privacy.epsilon is set twice (also to 2)"),
        ({"strategy": "lcfl", "epsilon": 4}, "privacy.epsilon = 4: lcfl has no privacy by default; set"),
        ({"strategy": "lcfl", "epsilon": 8}, "set privacy-unit to record, or leave it out"),
        ({"strategy": "ppfc-gan", "privacy-unit": "auto", "delta": 1e-5}, "privacy.delta = 1e-05: ppfc-gan has no"),
        ({"strategy": "cfl", "noise-multiplier": 2}, "privacy.noise-multiplier = 2: cfl has no privacy by default"),
        ({"strategy": "kfed", "epsilon": 2}, "privacy.epsilon = 2: kfed has no privacy; leave it out"),
        ({"clip": 1}, "unknown setting 'clip'"),
        ({"privacy": {"epsilonn": 1}}, "unknown setting 'privacy.epsilonn'; did you mean 'privacy.epsilon'"),
    ],
)
def test_what_has_no_effect_is_refused(values, complaint):
    assert complaint in message(values)


PATHS = ("out", "start-from", "data-dir", "table-schema", "pretrained", "budget-file")


@for_rows("name", PATHS)
def test_a_path_may_begin_with_the_home_folder_and_has_no_variables(name):
    setting = next(setting for setting in SETTINGS.values() if setting.key == name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", "/home/alice")
        assert setting.parse("~/runs/first") == "/home/alice/runs/first"
    assert setting.parse("runs/a~b") == "runs/a~b"
    for path in ("$HOME/runs", "runs/${HOME}"):
        with pytest.raises(ConfigError, match=re.escape(f"{path!r}: variables are not replaced")):
            setting.parse(path)
    with pytest.raises(ConfigError, match="there is no user of this name"):
        setting.parse("~nobody-has-this-name/runs")


def test_every_setting_that_names_a_file_or_folder_is_a_path():
    named = {setting.key for setting in SETTINGS.values() if re.search(r"\b(file|folder)\b", setting.allowed)}
    assert named == set(PATHS) == {setting.key for setting in SETTINGS.values() if setting.path}


def test_a_removed_setting_is_refused_with_what_to_use():
    names = {name for name in REMOVED if name.replace("-", "").isalpha()}
    assert not names & {setting.key for setting in SETTINGS.values()}
    for name in names:
        for given in (name, f"table.{name}"):
            assert message({given: 1}) == f"{name} was removed: {REMOVED[name]}"
        with pytest.raises(ConfigError, match="resume the run with the version that began it"):
            RunConfig.stored(nested({**RunConfig({}).values, name: 1}))


def test_without_privacy_a_budget_is_allowed_if_the_unit_is_named():
    """As in a sweep over units, or in the configuration of a run folder."""
    config = RunConfig({"strategy": "lcfl", "privacy-unit": "none", "epsilon": 4})
    assert RunConfig(config.values) == config
    assert RunConfig({"strategy": "lcfl", "epsilon": "auto", "delta": "auto"}).budget == math.inf


def small(strategy, unit):
    """Settings with which every method can be planned at a unit."""
    settings = {"strategy": strategy, "privacy-unit": unit, "clients": 12, "groups": "2", "samples-per-client": 40}
    return settings | ({"clusters": 2} if STRATEGIES[strategy].clustered or strategy == "ppfc-gan" else {})


COMBINATIONS = [(name, unit) for name, method in STRATEGIES.items() for unit in method.units]


@pytest.mark.parametrize(("strategy", "unit"), COMBINATIONS, ids="-".join)
def test_auto_is_not_set_and_every_source_means_the_same(strategy, unit, tmp_path):
    given = small(strategy, unit)
    config = RunConfig(given)
    by_flower = combine(given)  # flwr run: every setting of pyproject.toml, some of them replaced
    assert RunConfig(dict.fromkeys(SETTINGS, "auto") | by_flower) == config
    assert RunConfig(nested(by_flower)) == config  # a file with tables
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(given))
    texts = [f"{name}={value}" for name, value in given.items()]  # --set
    assert RunConfig(settings_of(tmp_path / "settings.toml", [], {})) == config
    assert RunConfig(settings_of(None, texts, {})) == config
    assert RunConfig(config.values) == config  # as stored


@for_rows(
    ("values", "name", "value"),
    [
        ({}, "clusters", 4),
        ({"strategy": "cfl", "privacy-unit": "none"}, "clusters", 0),
        ({"strategy": "cfl", "privacy-unit": "none", "clusters": 3}, "clusters", 3),
        ({"strategy": "cfl"}, "sampling-rate", 1.0),
        ({"strategy": "kfed"}, "label-skew", "non-iid:0.5"),
        ({"strategy": "kfed", "label-skew": "non-iid:0"}, "label-skew", "non-iid:0"),
        ({"strategy": "kfed", "dataset": "own", "input-shape": "16", "num-classes": 3}, "label-skew", "none"),
        ({"strategy": "kfed", "label-skew": "none"}, "label-skew", "none"),  # given, though it is the default of others
        ({"dataset": "own", "input-shape": "16", "num-classes": 0}, "model", "regression"),
        ({"dataset": "own", "input-shape": "16", "num-classes": 3}, "model", "mlp-32"),
        ({"dataset": "own", "input-shape": "16", "num-classes": 0, "model": "mlp-32"}, "model", "mlp-32"),
    ],
)
def test_explicit_settings_win_over_the_method_the_data_set_and_the_default(values, name, value):
    assert RunConfig(values)[name] == value


def test_a_stored_configuration_is_read_without_the_settings_of_other_methods():
    config = RunConfig({"strategy": "fedprox", "clusters": 1, "proximal-mu": 0.3})
    assert RunConfig.stored({**config.values, "lcfl.landmarks": 0}) == config
    assert config.options == FedProxSettings(proximal_mu=0.3)


def test_other_mechanisms_have_their_own_usual_numbers():
    plan = RunConfig({"mechanism": "rr-slot", "epsilon": 100, "rounds": 3}).plan
    assert (plan.mechanism, plan.identifier_share, plan.accountant) == ("rr-slot", 0.2, "pld")
    assert plan.divisor == "released"
    alone = RunConfig({"mechanism": "rr-slot", "strategy": "fedavg", "epsilon": 100, "rounds": 3}).plan
    assert alone.identifier_share == 0.0  # one model: no labels


def test_noise_can_be_given_and_evaluations_are_paid_for():
    assert RunConfig({"noise-multiplier": 1.7}).plan.noise_multiplier == 1.7
    plan = RunConfig({"evaluate": "private", "evaluate-every": 7, "rounds": 20}).plan
    assert plan.evaluations == 3  # after 7, 14 and 20
    assert plan.noise_multiplier > RunConfig({"rounds": 20}).plan.noise_multiplier


MANY = {"clients": 2000, "rounds": 2}
ALONE = {"strategy": "fedavg", "privacy-unit": "record", "samples-per-client": 100, "rounds": 2}


@for_rows(
    ("values", "deployed", "evaluate"),
    [
        (MANY, False, "diagnostic"),
        (MANY, True, "private"),
        ({**MANY, "evaluate": "auto"}, True, "private"),
        ({**MANY, "evaluate": "diagnostic"}, True, "diagnostic"),
        ({**MANY, "evaluate": "off"}, True, "off"),
        ({**MANY, "evaluate": "private"}, False, "private"),
        ({**MANY, "mechanism": "rr-slot"}, True, "private"),
        ({**MANY, "privacy-unit": "none"}, True, "diagnostic"),
        ({"strategy": "local", "clients": 20}, True, "diagnostic"),
        (ALONE, False, "diagnostic"),
        (ALONE, True, "off"),
        ({"strategy": "rc-dpfl", **ALONE, "privacy-unit": "record"}, True, "off"),
        ({"clients": 3, "groups": "1", "clusters": 1, "sampling-rate": 1.0}, True, "off"),  # too few to afford it
    ],
)
def test_automatic_evaluation_depends_on_who_the_clients_are(values, deployed, evaluate):
    config = RunConfig(values, deployed=deployed)
    assert config["evaluate"] == evaluate
    assert bool(config.plan.evaluations) == (evaluate == "private")
    assert RunConfig(config.values).values == config.values  # as stored
    warned = any("evaluate = 'auto' is off" in warning for warning in config.warnings())
    assert warned == (evaluate == "off" and config["clients"] == 3)


def test_automatic_evaluation_leaves_errors_to_their_cause():
    with pytest.raises(ConfigError, match="clusters = 2001 exceeds the number of clients"):
        RunConfig({**MANY, "clusters": 2001}, deployed=True)


def test_the_plan_follows_the_keys():
    config = RunConfig({"clients": 40, "clusters": 2, "rounds": 9, "groups": "2", "epsilon": 3})
    plan = config.plan
    assert (plan.clients, plan.num_clusters, plan.rounds, plan.sampling_rate) == (40, 2, 9, 1.0)
    assert (plan.epsilon, plan.delta, plan.clip_norm, plan.identifier_share) == (3.0, 1 / 4000, 0.3, 0.04)
    without = RunConfig({"clients": 40, "clusters": 2, "reseed-every": 0, "epsilon": 3, "rounds": 9}).plan
    assert without.noise_multiplier_counts is None  # nobody reads the counts: no privacy is spent on them
    assert without.noise_multiplier_updates == plan.noise_multiplier
    nothing = RunConfig({"privacy-unit": "none"})
    assert not nothing.plan.private
    assert nothing.budget == math.inf


def test_adaptive_clipping_is_a_word_and_auto_is_not_set():
    config = RunConfig({"clip-norm": "adaptive"})
    assert config["clip-norm"] is None
    assert config.values["privacy.clip-norm"] == "adaptive"
    assert RunConfig.stored(config.values) == config  # as a run folder holds it
    assert config.plan.clip_share == 0.01
    assert RunConfig({"clip-norm": "auto"}).plan.clip_norm == 0.3
    assert RunConfig({"clip-norm": "auto"}).plan.clip_share == 0


def test_clients_get_no_seed_unless_the_run_has_one():
    assert "seed" not in RunConfig({}).for_clients()
    seeded = RunConfig({"seed": 7}).for_clients()
    assert (seeded["seed"], seeded["partition-seed"]) == (7, 7)
    private = {"epsilon", "delta", "clip-norm", "out", "evaluate", "rebalance-min"}
    assert not private & set(seeded)


def test_differences_ignore_where_a_run_is_kept():
    there = {"out": "b", "resume": True, "data-dir": "d", "device": "cpu", "registration-timeout": 1}
    there |= {"round-timeout": 2}
    there |= {"min-clients": 1, "min-replies": 0.5, "privacy-unit": "none"}
    here = RunConfig({"out": "a", "privacy-unit": "none"})
    assert differences(here, RunConfig(there)) == {}
    assert differences(here, RunConfig({**there, "epsilon": 1, "rounds": 9})) == {
        "rounds": (80, 9),
        "privacy.epsilon": (8.0, 1.0),
    }


def test_warns_of_a_delta_that_promises_little():
    assert planning.delta(RunConfig({"epsilon": 100, "clients": 100})) == 1e-4
    assert RunConfig({"epsilon": 100, "clients": 100}).warnings() == []
    assert RunConfig({"epsilon": 100, "clients": 100, "delta": 0.001}).warnings() == []  # 1/(10 M) itself
    (warning,) = RunConfig({"epsilon": 100, "clients": 100, "delta": 0.0011}).warnings()
    assert "delta = 0.0011" in warning
    assert RunConfig({"epsilon": 100, "clients": 100, "delta": 0.5, "privacy-unit": "none"}).warnings() == []


def test_private_evaluation_needs_test_data_of_the_clients_themselves():
    with pytest.raises(ConfigError, match=r"validation-clients = 4 with evaluate = 'private': .* set"):
        RunConfig({"validation-clients": 4, "evaluate": "private"})
    for evaluate in ("diagnostic", "off"):
        RunConfig({"validation-clients": 4, "evaluate": evaluate})


@for_rows(("settings", "when"), [({}, "round 1"), ({"strategy": "fedavg", "privacy-unit": "record"}, "each round")])
@for_rows("least", [0, 2])
def test_thresholds_on_attendance_lie_outside_the_guarantee(settings, when, least):
    settings = {**settings, "samples-per-client": 100} if settings else settings
    outside = planning.about(RunConfig({**settings, "min-clients": least, "evaluate": "off"}))["diagnostics"]
    assert "whether any reply could be used, to training and to evaluations: a run without one fails" in outside
    stated = [phrase for phrase in outside if "min-clients" in phrase]
    assert stated == (
        [f"whether enough clients (min-clients) are there before {when} begins: {FAILS}"] if least else []
    )


FAILS = "a run without them fails"


@for_rows("wrong", [{"privacy-unit": "none"}, {"seed": 0}])
def test_a_shared_budget_is_for_runs_that_are_certified_at_client_level(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"budget-file with {name} = .*change {name}"):
        RunConfig({"budget-file": "budget.jsonl", **wrong})


FEW = {"clients": 3, "groups": "1", "clusters": 1, "sampling-rate": 1.0, "rounds": 3}


def test_warns_of_noise_that_drowns_the_signal_with_the_numbers():
    (warning,) = RunConfig(FEW).warnings()
    config = RunConfig(FEW)
    size = 64 * 32 + 32 + 32 * 10 + 10
    assert config["model"] == "mlp-32"
    times = config.plan.noise_multiplier_updates * math.sqrt(size) / (3 * math.sqrt(3))
    assert f"moves a model {times:.3g} times as far" in warning
    assert f"{size} parameters, 3 clients per model" in warning
    many = 3 * math.ceil(times)
    assert f"about {many} clients instead of 3" in warning
    assert RunConfig({**FEW, "clients": 2 * many}).warnings() == []
    assert RunConfig({**FEW, "privacy-unit": "none"}).warnings() == []
    records = {**FEW, "strategy": "fedavg", "privacy-unit": "record", "samples-per-client": 400, "batch-size": 40}
    assert RunConfig(records).warnings() == []
    (warning,) = RunConfig({**records, "epsilon": 0.1, "batch-size": 1}).warnings()
    assert "larger batches" in warning


RECORD = {"strategy": "rc-dpfl", "clients": 12, "samples-per-client": 100, "rounds": 3, "batch-size": 10, "delta": 1e-4}


def test_a_sampling_rate_that_a_mechanism_rounds_is_announced():
    visible = {"mechanism": "banded", "clients": 600, "groups": "4"}
    (warning,) = RunConfig({**visible, "sampling-rate": 0.3}).warnings()
    assert warning == "sampling-rate = 0.3: a cohort of mechanism banded has a share of 0.333 of the clients"
    assert RunConfig({**visible, "sampling-rate": 0.2}).warnings() == []
    assert RunConfig({**visible, "participation": "secret", "sampling-rate": 0.3}).warnings() == []


def test_methods_of_record_level_have_defaults_of_their_own():
    config = RunConfig(RECORD)
    assert (config["privacy-unit"], config["sampling-rate"], config["reseed-every"]) == ("record", 1.0, 0)
    assert RunConfig({"strategy": "rc-dpfl", "privacy-unit": "none", "clients": 12})["privacy-unit"] == "none"
    level = config.plan
    assert level.unit == "record"
    (plan,) = level.client_plans
    assert (plan.num_examples, plan.batch_size, plan.first_batch_size, plan.selections) == (100, 10, 100, 2)
    assert plan.cost() <= 8.0
    (plan,) = RunConfig({**RECORD, "strategy": "f-cdpfl", "first-batch-size": 50}).plan.client_plans
    assert (plan.first_batch_size, plan.selections, plan.selection) == (50, 3, "gumbel")
    (plan,) = RunConfig({**RECORD, "strategy": "fedavg", "privacy-unit": "record"}).plan.client_plans
    assert (plan.first_batch_size, plan.selections, plan.selection) == (None, 0, "none")


def test_clients_alone_all_take_part_without_privacy():
    config = RunConfig({"strategy": "local"})
    assert (config["privacy-unit"], config["sampling-rate"], config["clusters"]) == ("none", 1.0, 1)
    with pytest.raises(ConfigError, match="local supports privacy-unit none, not 'client'"):
        RunConfig({"strategy": "local", "privacy-unit": "client"})


def test_clients_may_have_terms_of_their_own():
    profiles = "epsilon=2 batch-size=20; samples-per-client=50 delta=1e-5"
    level = RunConfig({**RECORD, "profiles": profiles}).plan
    first, second = level.client_plans
    assert (first.epsilon, first.batch_size, first.num_examples, first.delta) == (2.0, 20, 100, 1e-4)
    assert (second.epsilon, second.batch_size, second.num_examples, second.delta) == (8.0, 10, 50, 1e-5)
    assert level.worst is second
    assert level.weight_of_clients().tolist() == [100, 50] * 6
    assert level.noise_multiplier == second.noise_multiplier


@for_rows(
    ("wrong", "complaint"),
    [
        ({"samples-per-client": 0}, "record level requires a public number of records per client"),
        ({"sampling-rate": 0.5}, "at record level all clients participate in every round"),
        ({"evaluate": "private"}, "at record level use diagnostic or off"),
        ({"rebalance-min": 2}, "rebalance-min = 2.0 requires noisy cluster sizes"),
        ({"reseed-every": 3}, "reseed-every = 3 requires noisy cluster sizes"),
        ({"privacy-unit": "none", "rebalance-min": 1}, "rc-dpfl does not support rebalancing"),
        ({"profiles": "epsilons=2"}, "profiles: 'epsilons=2' must set one of .*; did you mean 'epsilon'"),
        ({"profiles": "epsilon=-2"}, "epsilon = '-2': must be a finite number above 0"),
        ({"profiles": "samples-per-client=200"}, "must be at most that of the run"),
        ({"strategy": "ifca", "privacy-unit": "record"}, "ifca supports privacy-unit client or none, not 'record'"),
        ({"privacy-unit": "client"}, "rc-dpfl supports privacy-unit record or none"),  # said, so not replaced
        ({"strategy": "oracle", "clusters": 0}, "oracle does not determine the number of clusters"),
        ({"selection": "loud"}, "must be gumbel, exact"),
    ],
)
def test_what_record_level_cannot_do_is_refused(wrong, complaint):
    with pytest.raises(ConfigError, match=complaint):
        RunConfig({**RECORD, **wrong})


OWN = {"dataset": "own", "input-shape": "1x8x8", "num-classes": 10, "clients": 5}


def test_own_data_are_described_by_public_facts():
    config = RunConfig(OWN)
    assert (config["groups"], config["shift"], config["num-classes"]) == ("1", "none", 10)
    assert config.examples == ((1, 8, 8), 10)
    assert RunConfig({**OWN, "features": "pool2"}).examples == ((1, 4, 4), 10)
    assert RunConfig({**OWN, "features": "hog"}).examples == ((8, 7, 7), 10)
    assert {"input-shape": "1x8x8", "num-classes": 10}.items() <= config.for_clients().items()
    assert RunConfig({name: str(value) for name, value in OWN.items()}) == config
    numbers = RunConfig({**OWN, "input-shape": "16", "num-classes": 0})
    assert (numbers["model"], numbers.examples) == ("regression", ((16,), 0))
    for method in ("ppfc-gan", "kfed"):  # whose defaults divide a data set
        assert RunConfig({**OWN, "strategy": method, "clusters": 3})["label-skew"] == "none"
    record = RunConfig({**OWN, "strategy": "fedavg", "privacy-unit": "record", "samples-per-client": 50})
    assert record.plan.client_plans[0].num_examples == 50


SCHEMA = """version = 1
[label]
column = "y"
classes = ["a", "b", "c"]
[[columns]]
name = "age"
type = "number"
mean = 50
scale = 10
missing = "indicator"
"""
OWN_TABLES = {"dataset": "own", "table-schema": "schema.toml", "clients": 5}


@pytest.fixture
def schema_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path / "schema.toml"


def test_a_schema_determines_shape_and_classes_and_stays_with_the_run(schema_file):
    config = RunConfig(OWN_TABLES)
    assert (config["input-shape"], config["num-classes"], config.examples) == ("2", 3, ((2,), 3))
    assert config.facts.schema.feature_names == ("age", "age (missing)")
    schema_file.unlink()
    again = RunConfig.stored(config.values)  # as a run folder holds it
    assert again == config
    assert again.facts.schema == config.facts.schema
    assert again.for_clients()["table-schema"] == str(config.facts.schema)
    assert RunConfig(OWN).for_clients()["table-schema"] == ""
    schema_file.write_text(SCHEMA.replace("mean = 50", "mean = 51"))
    assert list(differences(RunConfig(OWN_TABLES), config)) == ["data.table-schema"]
    target = SCHEMA.replace("[label]", "[target]").replace('classes = ["a", "b", "c"]', "scale = 7")
    schema_file.write_text(target)
    assert (RunConfig(OWN_TABLES)["model"], RunConfig(OWN_TABLES).examples) == ("regression", ((2,), 0))


def test_a_schema_whose_values_stay_large_is_warned_of(schema_file):
    assert not any("table-schema" in warning for warning in RunConfig(OWN_TABLES).warnings())
    schema_file.write_text(SCHEMA + "range = [0, 1e6]\n")
    assert any("column 'age' reach 1e+05 after scaling" in warning for warning in RunConfig(OWN_TABLES).warnings())


@for_rows(
    ("wrong", "complaint"),
    [
        ({"table-schema": "absent.toml"}, r"absent\.toml: cannot be read: No such file"),
        ({"input-shape": "3"}, r"data\.input-shape = '3': the table-schema makes it 2; leave it out"),
        ({"num-classes": 2}, r"data\.num-classes = 2: the table-schema makes it 3; leave it out"),
        ({"dataset": "digits"}, "table-schema is for dataset = 'own'; leave it out with 'digits'"),
        ({"table-schema": '{"version": 1}'}, "table-schema: must have one of"),
    ],
)
def test_what_a_schema_cannot_be_is_refused(schema_file, wrong, complaint):
    with pytest.raises(ConfigError, match=complaint):
        RunConfig({**OWN_TABLES, **wrong})


@for_rows(
    ("wrong", "complaint"),
    [
        ({"input-shape": ""}, "dataset = 'own' requires input-shape, public shape of an example"),
        ({"num-classes": "auto"}, "dataset = 'own' requires num-classes, public number of classes"),
        ({"num-classes": -1}, "num-classes = -1: must be 'auto' or an integer, at least 0"),
        ({"input-shape": "8x8"}, "input-shape = '8x8': must be channels x height x width"),
        ({"dataset": "digits"}, "input-shape = '1x8x8' is for dataset = 'own'; leave it out with 'digits'"),
        ({"dataset": "digits", "input-shape": ""}, "num-classes = 10 is for dataset = 'own'"),
        ({"groups": "2"}, "groups = '2': clients' own data are neither partitioned nor shifted; set it to '1'"),
        ({"shift": "rotation-90"}, "shift = 'rotation-90': .* set it to 'none'"),
        ({"label-skew": "dirichlet:0.5"}, "label-skew = 'dirichlet:0.5': .* set it to 'none'"),
        ({"validation-clients": 3}, "validation-clients = 3: .* set it to 0"),
        ({"samples-per-client": 50}, "samples-per-client = 50: .* only record-level privacy requires"),
        ({"strategy": "fedavg", "privacy-unit": "record"}, "samples-per-client = 0: record level"),
    ],
)
def test_what_own_data_cannot_be_is_refused(wrong, complaint):
    with pytest.raises(ConfigError, match=complaint):
        RunConfig({**OWN, **wrong})


@for_rows(
    ("settings", "warned"),
    [
        ({"sampling-rate": 0.2}, "epsilon is 19.5, not 8"),
        ({}, ""),
        ({"mechanism": "banded"}, ""),
        ({"mechanism": "banded", "participation": "secret", "sampling-rate": 0.3}, "epsilon is 10.7, not 7.99"),
        ({"privacy-unit": "none"}, ""),
        ({"strategy": "fedavg", "privacy-unit": "record", "samples-per-client": 90}, ""),
    ],
)
def test_deployed_runs_warn_if_participation_must_be_secret(settings, warned):
    found = participation_warnings(RunConfig({**settings, "delta": 2e-5}).plan)
    assert bool(found) == bool(warned)
    assert warned in "".join(found)
