"""One-line mutations that break a guarantee, and the test that catches each.

``python -m tests.mutations [WORD ...]`` applies them one by one (those whose name has all the words) to a copy of the
working tree, runs the named test there, and reports which are killed. It exits with 1 when one survives. A test of the
suite keeps the list in step with the code (tests/test_mutations.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_COPIED = ("coterie", "tests", "benchmarks", "pyproject.toml", "README.md", "docs")
_PRIVACY, _PLAN, _BASE = "coterie/privacy", "coterie/privacy/plan.py", "coterie/strategies/method.py"
_EXCHANGE = "coterie/rounds/exchange.py"
_LOOP, _POST = "coterie/strategies/loop.py", "coterie/strategies/post_processing.py"
_MECHANISMS, _RANDOMNESS = "tests/audit/test_audit_mechanisms.py", "tests/audit/test_audit_randomness.py"
_SECURE = f"{_PRIVACY}/mechanisms/secure.py"
_BANDED, _STREAMS = f"{_PRIVACY}/mechanisms/banded.py", "tests/audit/test_audit_streams.py"
_HOSTILE = "tests/client/test_hostile_server.py"
_GUARD, _SITE = "coterie/guard", "tests/guard/test_guarded_site.py"
_FILTER, _ADAPTIVE = f"{_PRIVACY}/filter.py", "tests/privacy/test_filter.py"
_SITES, _SERVER, _RUN = f"{_GUARD}/owners.py", f"{_GUARD}/server.py", "tests/guard/test_guarded_run.py"
_TRAINING, _APPS = f"{_GUARD}/watched_training.py", "tests/guard/test_faulty_apps.py"
_SEARCH = "tests/strategies/test_model_search.py"
_GENERATORS, _CLIENTAPP = "coterie/generators.py", "coterie/flower/clientapp.py"
_CLUSTERED, _CLUSTERED_TEST = "coterie/client/clustered.py", "tests/client/test_clustered.py"
_PLUGINS_TEST = "tests/client/test_training_plugins.py"
_TRAINERS_TEST = "tests/client/test_trainers.py"
_SUPEREXEC = "tests/flower/test_superexec.py"
_SIZES, _REPLY_SIZES = "coterie/flower/sizes.py", "tests/client/test_reply_sizes.py"
_ROWS, _ROW_WISE = "coterie/models/rows.py", "tests/models/test_rows.py"
_PARTS = "tests/client/test_training_parts.py"
_BOUNDS = "tests/server/test_bounds.py"
_RUNS, _RECORDS = "tests/audit/test_audit_runs.py", "tests/audit/test_audit_records.py"
_GO_ON, _CONTINUATION = "tests/server/test_continuation.py", "coterie/server/continuation.py"
_STARTS, _START_MODELS = "tests/server/test_start_models.py", "coterie/server/start_models.py"
_PAM, _PAM_TEST = "coterie/clustering/medoids.py", "tests/clustering/test_medoids.py"

_ROSTER, _REGISTRY = "coterie/deploy/roster.py", "tests/rounds/test_client_registry.py"
_REQUEST = "coterie/deploy/run_request.py"
_CONSENT = "tests/client/test_consent.py"
_POLICY = "tests/client/test_policy.py"
_MASKING, _MASKING_TEST = "coterie/secure/masking.py", "tests/secure/test_masking.py"


@dataclass(frozen=True)
class Mutation:
    """One line of ``file``, what replaces it, and the test that must fail then."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "quartiles: the noise forgets the number of columns",
        f"{_PRIVACY}/quantiles.py",
        "math.sqrt(len(histograms)) * gaussian",
        "gaussian",
        "tests/privacy/test_quantiles.py::test_the_noise_is_the_multiplier_times_the_sensitivity",
    ),
    Mutation(
        "quartiles: each record of a unit weighs 1",
        f"{_PRIVACY}/quantiles.py",
        "weights = 1 / sizes[of]",
        "weights = 1 + 0 * sizes[of]",
        "tests/privacy/test_quantiles.py::test_adding_a_unit_with_all_its_records_moves_them_by_no_more",
    ),
    Mutation(
        "masking: shares leave without signatures of the survivors",
        _MASKING,
        "if len(good) < self.round.threshold:",
        "if False:",
        f"{_MASKING_TEST}::test_shares_need_enough_signatures",
    ),
    Mutation(
        "masking: two lists of survivors can both get enough signatures",
        _MASKING,
        "or 2 * t <= n + c:",
        "or False:",
        f"{_MASKING_TEST}::test_thresholds_that_allow_two_lists_of_survivors_are_refused",
    ),
    Mutation(
        "masking: a second list of survivors is signed",
        _MASKING,
        "self._next(3)",
        "self._kept.step = 3",
        f"{_MASKING_TEST}::test_a_second_list_of_survivors_is_not_signed",
    ),
    Mutation(
        "masking: openings need no signature",
        _MASKING,
        "            if not self.verify(client, _said(",
        "            if False and not self.verify(client, _said(",
        f"{_MASKING_TEST}::test_a_hostile_server_s_openings_are_refused_before_a_vector_leaves",
    ),
    Mutation(
        "masking: a survivor's seed and key are both given",
        _MASKING,
        "dropped = held.keys() - set(signed)",
        "dropped = held.keys()",
        f"{_MASKING_TEST}::test_a_client_gives_a_seed_or_a_key_never_both",
    ),
    Mutation(
        "masking: signatures count for every opening of a round",
        _MASKING,
        'b"survivors" + round.digest + opened +',
        'b"survivors" + round.digest +',
        f"{_MASKING_TEST}::test_signatures_of_a_round_that_was_opened_twice_do_not_count",
    ),
    Mutation(
        "masking: rounding lets a vector exceed the norm",
        "coterie/secure/integers.py",
        "room = 1 - math.sqrt(len(values)) / (2 * steps) - 2.0**-40",
        "room = 1.0",
        "tests/secure/test_integers.py::test_integers_have_a_norm_of_at_most_the_steps_and_err_by_half_a_step",
    ),
    Mutation(
        "secure: noise is sized for all who stay, the corrupt ones included",
        _SECURE,
        "return self._least(self.clients // self.slots) - self.corrupt",
        "return self._least(self.clients // self.slots)",
        "tests/privacy/test_secure_plan.py::test_the_least_honest_survivors_have_the_noise_of_the_guarantee",
    ),
    Mutation(
        "secure: a round is released by fewer than the least survivors",
        _SECURE,
        "if survivors < least:",
        "if survivors < least - 1:",
        "tests/privacy/test_secure_plan.py::test_too_few_survivors_release_nothing_and_use_the_permit",
    ),
    Mutation(
        "secure: counts are not part of a vector's norm",
        _SECURE,
        "return STEPS * math.sqrt(1 - counts - norms),",
        "return STEPS * math.sqrt(1 - norms),",
        "tests/privacy/test_secure_plan.py::test_the_norm_of_a_vector_is_at_most_that_of_the_grid",
    ),
    Mutation(
        "secure: a simulation draws the noise of one client",
        _SECURE,
        "return discrete_gaussian(rng, self.noise_of_all(noise, survivors) * STEPS, size)",
        "return discrete_gaussian(rng, self.noise_steps, size)",
        "tests/privacy/test_secure_plan.py::test_noise_of_a_release_is_that_of_all_survivors",
    ),
    Mutation(
        "secure: discrete noise is counted by the distribution of Gaussian losses",
        f"{_PRIVACY}/accountants.py",
        'if event.sampler == "discrete":\n            return\n',
        'if event.sampler == "none":\n            return\n',
        "tests/privacy/test_secure_plan.py::test_its_cost_is_that_of_gaussian_noise_by_rdp_in_every_account",
    ),
    Mutation(
        "the filter of a ledger gives all of delta to both parts",
        _FILTER,
        "self.order, self.delta - self.pinned_delta)",
        "self.order, self.delta)",
        f"{_ADAPTIVE}::test_requests_of_other_kinds_are_accepted_by_their_divergence_at_one_order",
    ),
    Mutation(
        "a later request pins other events",
        f"{_PRIVACY}/ledger.py",
        "            if first:\n                allowed",
        "            if True:\n                allowed",
        f"{_ADAPTIVE}::test_the_ledger_refuses_one_of_the_two_continuations",
    ),
    Mutation(
        "each request may use the order that suits it",
        _FILTER,
        "or self.epsilon_of(events) <= self.epsilon * SLACK",
        "or epsilon(events, self.delta) <= self.epsilon * SLACK",
        f"{_ADAPTIVE}::test_servers_that_choose_the_worst_request_at_every_loss",
    ),
    Mutation(
        "more steps than pinned are accepted",
        _FILTER,
        "all(amount <= left.get(event, 0.0) * SLACK",
        "all(amount <= left.get(event, 0.0) * 1.2",
        f"{_ADAPTIVE}::test_all_events_of_a_plan_that_fills_the_budget_are_accepted_and_nothing_else",
    ),
    Mutation(
        "keys of 16 bits",
        f"{_PRIVACY}/randomness.py",
        "AESCounter(key=secrets.randbits(128))",
        "AESCounter(key=secrets.randbits(16))",
        f"{_RANDOMNESS}::test_what_is_shipped_holds",
    ),
    Mutation(
        "the sampler draws an empty cohort again",
        f"{_PRIVACY}/mechanisms/joint.py",
        "return np.flatnonzero(rng.random(self.clients) < self.sampling_rate)",
        "return np.flatnonzero((c := rng.random(self.clients)) < max(self.sampling_rate, c.min() * 1.001))",
        f"{_RANDOMNESS}::test_what_is_shipped_holds",
    ),
    Mutation(
        "the server draws an empty cohort again",
        _EXCHANGE,
        'return self._run.plan.sample(self._run.streams.stream("cohort", number, self._attempt), number)',
        "return next(c for i in range(99) "
        'if len(c := self._run.plan.sample(self._run.streams.stream("cohort", number, self._attempt, i), number)))',
        f"{_RUNS}::test_what_is_shipped_holds",
    ),
    Mutation(
        "the search for the number of clusters reads the number of replies",
        _POST,
        "arrays = search.observe(run.state.arrays, histogram)",
        "arrays = search.observe(run.state.arrays, histogram + run.statistics.accepted / 8)",
        f"{_SEARCH}::test_decisions_follow_from_released_sizes_and_public_numbers_alone",
    ),
    Mutation(
        "the noise shrinks with the number of clusters",
        "coterie/rounds/run_state.py",
        "plan = replace(plan, num_clusters=num_clusters)",
        "plan = replace(plan, num_clusters=num_clusters, noise_multiplier=0.05)",
        f"{_SEARCH}::test_decisions_follow_from_released_sizes_and_public_numbers_alone",
    ),
    Mutation(
        "the shared block is divided by the number of replies",
        _PLAN,
        "cohort = self.rate * self.clients",
        "cohort = max(float(contributions.counts.sum()), 1.0)",
        f"{_RUNS}::test_what_is_shipped_holds",
    ),
    Mutation(
        "the shared block is divided by the size of the cohort",
        _BASE,
        "released.sums[:, : self.shared] / released.cohort",
        "released.sums[:, : self.shared] / max(len(self.plan.sample("
        "self.run.streams.stream('cohort', self.attempt - 1, self.attempt - 1), self.attempt - 1)), 1)",
        f"{_RUNS}::test_what_is_shipped_holds",
    ),
    Mutation(
        "updates up to 5 % too long are not clipped",
        f"{_PRIVACY}/clipping.py",
        "long = lengths * ratio > 1 - _MARGIN",
        "long = lengths * ratio > 1.05",
        f"{_MECHANISMS}::test_what_certifies_holds_and_the_controls_are_broken",
    ),
    Mutation(
        "updates are clipped to 5 % too much",
        f"{_PRIVACY}/clipping.py",
        "np.where(long, (1 - _MARGIN) / lengths, ratio)",
        "np.where(long, 1.05 / lengths, ratio)",
        f"{_MECHANISMS}::test_what_certifies_holds_and_the_controls_are_broken",
    ),
    Mutation(
        "gradients are clipped to 5 % too much",
        "coterie/client/ghost.py",
        "torch.where(kept, (1 - _MARGIN) / torch.clamp(",
        "torch.where(kept, 1.05 / torch.clamp(",
        f"{_RECORDS}::test_what_is_shipped_holds_and_the_attacks_have_power",
    ),
    Mutation(
        "noise of single precision",
        f"{_PRIVACY}/randomness.py",
        "total += rng.standard_normal(shape)",
        "total += rng.standard_normal(shape, dtype=np.float32)",
        f"{_RANDOMNESS}::test_what_is_shipped_holds",
    ),
    Mutation(
        "a permit can be used twice",
        f"{_PRIVACY}/ledger.py",
        "        self._open = False",
        "        self._open = True",
        "tests/privacy/test_plan.py::test_a_permit_pays_once_and_for_its_own_event_alone",
    ),
    Mutation(
        "a charge is not synced",
        f"{_PRIVACY}/ledger.py",
        "os.fsync(file.fileno())",
        "file.fileno()",
        "tests/privacy/test_ledger.py::test_a_charge_is_synced_before_the_permit_exists",
    ),
    Mutation(
        "recalibration forgets what was spent",
        _LOOP,
        "noise = plan.noise_for(remaining, spent)",
        "noise = plan.noise_for(remaining)",
        "tests/strategies/test_released_only.py::test_noise_after_a_crash_makes_up_for_the_wasted_charges",
    ),
    Mutation(
        "sums of single precision",
        f"{_PRIVACY}/contributions.py",
        "np.zeros((draws, plan.num_clusters, size), self.dtype)",
        "np.zeros((draws, plan.num_clusters, size), np.float32)",
        f"{_MECHANISMS}::test_what_certifies_holds_and_the_controls_are_broken",
    ),
    Mutation(
        "counts have no noise where their share is small",
        f"{_PRIVACY}/noise.py",
        "return self.noise_multiplier / math.sqrt(self.identifier_share) if self.identifier_share else None",
        "return self.noise_multiplier * (self.identifier_share > 0.05) if self.identifier_share else None",
        f"{_MECHANISMS}::test_what_certifies_holds_and_the_controls_are_broken",
    ),
    Mutation(
        "sizes after their last round, without a share of the noise",
        _PLAN,
        "output = self.of_round(permit.round).perturb(contributions, noise, coins, matrix, state)",
        "output = replace(self.of_round(permit.round).perturb(contributions, noise, coins, matrix, state), "
        "histogram=contributions.counts)",
        f"{_MECHANISMS}::test_what_certifies_holds_and_the_controls_are_broken",
    ),
    Mutation(
        "sizes after their last round, beside updates with all of the noise",
        f"{_PRIVACY}/noise.py",
        "return self.noise_multiplier / math.sqrt(1 - self.identifier_share - self.clip_share)",
        "return self.noise_multiplier / math.sqrt(1 - self.clip_share)",
        "tests/privacy/test_plan.py::test_every_round_is_the_same_event_with_and_without_sizes",
    ),
    Mutation(
        "too little noise on updates after the last round with sizes",
        _PLAN,
        "replace(self, identifier_share=0.0, sizes_until=math.inf)",
        "replace(self, noise_multiplier=0.98 * self.noise_multiplier, identifier_share=0.0, sizes_until=math.inf)",
        f"{_STREAMS}::test_the_measured_noise_is_the_claimed_one",
    ),
    Mutation(
        "a missing reply changes the divisor",
        _BASE,
        "mean = released.sums / released.divisors[:, None]",
        "mean = released.sums / (released.divisors[:, None] * max(self.run.statistics.accepted, 1) / "
        "max(self.run.statistics.asked, 1))",
        f"{_RUNS}::test_what_is_shipped_holds",
    ),
    Mutation(
        "the redraw matrix follows true counts",
        _LOOP,
        "released = exchange.release()",
        "released = replace(exchange.release(), histogram=exchange._contributions.counts[0])",
        "tests/strategies/test_released_only.py::test_rebalancing_reads_released_sizes_alone",
    ),
    Mutation(
        "the matrix has one band too many",
        _BANDED,
        "return banded_matrix(self.rounds, self.slots)",
        "return banded_matrix(self.rounds, min(self.slots + 1, self.rounds))",
        f"{_STREAMS}::test_the_measured_noise_is_the_claimed_one",
    ),
    Mutation(
        "columns of the matrix are too long",
        f"{_PRIVACY}/mechanisms/factorization.py",
        "return bands * _by_column(1 / _norms(bands), bands.shape[1])",
        "return bands * _by_column(1.001 / _norms(bands), bands.shape[1])",
        f"{_STREAMS}::test_the_measured_noise_is_the_claimed_one",
    ),
    Mutation(
        "a client's contributions are rounded down",
        f"{_PRIVACY}/mechanisms/turns.py",
        "return -(-rounds // self.slots)",
        "return rounds // self.slots",
        "tests/privacy/test_banded.py::test_a_calibrated_plan_meets_its_budget_with_evaluations",
    ),
    Mutation(
        "slots of runs with other numbers of slots are one slot",
        f"{_PRIVACY}/accountants.py",
        "most[plain, event.slots] = max(most.get((plain, event.slots), 0), count)",
        "most[plain, 0] = max(most.get((plain, 0), 0), count)",
        "tests/privacy/test_banded.py::test_cost_is_that_of_the_slot_with_most_events",
    ),
    Mutation(
        "a charged round of a slot is charged again",
        f"{_PRIVACY}/ledger.py",
        "once = event.slot is not None and not self._several_runs",
        "once = False",
        "tests/privacy/test_banded.py::test_the_ledger_counts_per_slot_and_refuses_a_round_twice",
    ),
    Mutation(
        "a charged round of a slot is run again after a crash",
        _LOOP,
        "return [number for number in remaining if number not in lost]",
        "return list(remaining)",
        "tests/strategies/test_banded_runs.py::test_a_round_that_was_charged_before_a_crash_is_skipped",
    ),
    Mutation(
        "noise rows can be stored",
        _BANDED,
        'raise TypeError("noise rows stay in memory: they are never stored or sent")',
        "return object.__reduce__(self)",
        "tests/privacy/test_banded.py::test_noise_rows_are_never_stored_or_sent",
    ),
    Mutation(
        "a replaced model continues the noise of the old one",
        _BANDED,
        "np.where(origins < 0, 0.0, factors)",
        "factors",
        "tests/privacy/test_banded.py::test_a_restart_of_a_cluster_is_a_block_diagonal_matrix_for_it_alone",
    ),
    Mutation(
        "two models continue the noise of one",
        _BANDED,
        "if len(np.unique(continued)) < len(continued) or not",
        "if not",
        "tests/privacy/test_banded.py::test_rows_of_noise_have_one_heir_and_never_grow",
    ),
    Mutation(
        "models that a search removes leave their noise to others",
        "coterie/strategies/model_search.py",
        "found.origins[kept], found.factors[kept]",
        "np.arange(kept.sum()), found.factors[kept]",
        "tests/strategies/test_model_search.py::test_every_model_names_its_origin_and_how_much_it_shrank",
    ),
    Mutation(
        "frozen parameters train",
        "coterie/models/trainable.py",
        "for name, parameter in network.named_parameters() if parameter.requires_grad}",
        "for name, parameter in network.named_parameters()}",
        "tests/models/test_trainable.py::test_frozen_parameters_are_no_part_of_it",
    ),
    Mutation(
        "a network that mixes records has each record in a batch of its own",
        "coterie/client/dpsgd.py",
        "if _differing(clipping.named, both, wanted) or _differing(clipping.named, together, sums):",
        "if _differing(clipping.named, both, wanted):",
        "tests/client/test_dpsgd.py::test_networks_without_gradients_of_records_are_refused",
    ),
    Mutation(
        "DP-SGD in half precision",
        "coterie/client/dpsgd.py",
        "if value.dtype in (torch.float16, torch.bfloat16):",
        "if False:",
        f"{_PARTS}::test_what_cannot_be_clipped_by_records_is_refused",
    ),
    Mutation(
        "DP-SGD of a network whose buffers change",
        "coterie/client/dpsgd.py",
        "if changed := differing(before, constants(plain)):",
        "if changed := []:",
        f"{_PARTS}::test_what_cannot_be_clipped_by_records_is_refused",
    ),
    Mutation(
        "a client trains with other constants than the server's",
        "coterie/client/cohort.py",
        "if networks.fingerprint(built) != constants:",
        "if False:",
        "tests/server/test_constants.py::test_a_client_that_builds_others_says_so",
    ),
    Mutation(
        "a batch has a fixed size",
        "coterie/client/dpsgd.py",
        "return np.flatnonzero(coins.random(size) < self.batch_size / self.num_examples)",
        "return coins.permutation(size)[: self.batch_size]",
        "tests/client/test_dpsgd.py::test_every_record_is_taken_with_probability_b_over_n",
    ),
    Mutation(
        "noise in the first step of a round alone",
        "coterie/client/dpsgd.py",
        "total = torch.as_tensor(np.stack(noise), device=device)",
        "total = torch.as_tensor(np.stack(noise), device=device) * (step == 0)",
        f"{_RECORDS}::test_what_is_shipped_holds_and_the_attacks_have_power",
    ),
    Mutation(
        "noise on losses without the root of their number",
        f"{_PRIVACY}/losses.py",
        "gaussian(rng, deviation, units.shape[1:])",
        "gaussian(rng, deviation / units.shape[1] ** 0.5, units.shape[1:])",
        f"{_RECORDS}::test_what_is_shipped_holds_and_the_attacks_have_power",
    ),
    Mutation(
        "positions that cancel hide from the norm",
        "coterie/client/ghost.py",
        "torch.maximum(squares, spread / _MAX_CANCELLATION**2)",
        "squares",
        "tests/client/test_ghost.py::test_positions_that_cancel_cannot_hide_from_the_norm",
    ),
    Mutation(
        "the noise of round 1 is lowered after calibration",
        f"{_PRIVACY}/first_round.py",
        'return RecordPlan.calibrated(**given | {"noise_multiplier": most})',
        'return replace(RecordPlan.calibrated(**given | {"noise_multiplier": most}), first_noise_multiplier=enough)',
        "tests/privacy/test_first_round.py::test_the_plan_is_within_its_budget_and_its_bound",
    ),
    Mutation(
        "round 1 is priced as a round of small batches",
        f"{_PRIVACY}/first_round.py",
        'return RecordPlan.calibrated(**given | {"first_noise_multiplier": enough})',
        'return replace(RecordPlan.calibrated(**given | {"first_noise_multiplier": enough, "first_batch_size": '
        "None}), first_batch_size=batch)",
        "tests/privacy/test_first_round.py::test_the_plan_is_within_its_budget_and_its_bound",
    ),
    Mutation(
        "NaN passes the clip",
        f"{_PRIVACY}/clipping.py",
        "rows[~np.isfinite(given).all(axis=1)] = 0.0",
        "rows[np.isinf(given).any(axis=1)] = 0.0",
        f"{_MECHANISMS}::test_what_certifies_holds_and_the_controls_are_broken",
    ),
    Mutation(
        "a private evaluation has half of its noise",
        _PLAN,
        "gaussian(noise, self.evaluation_noise * self.clients, ())",
        "gaussian(noise, self.evaluation_noise * self.clients / 2, ())",
        "tests/privacy/test_plan.py::test_a_private_evaluation_has_the_planned_noise",
    ),
    Mutation(
        "a private evaluation is charged for half of its sensitivity",
        _PLAN,
        'sensitivity = 1.0 if self.sampler == "fixed" else 0.5',
        'sensitivity = 0.5 if self.sampler == "fixed" else 0.25',
        f"{_MECHANISMS}::test_what_certifies_holds_and_the_controls_are_broken",
    ),
    Mutation(
        "a histogram of scores has half of its noise",
        _PLAN,
        "deviation = self.histogram_noise * sensitivity",
        "deviation = self.histogram_noise * sensitivity / 2",
        f"{_MECHANISMS}::test_what_certifies_holds_and_the_controls_are_broken",
    ),
    Mutation(
        "a replaced client moves a histogram of scores by one client's norm",
        _PLAN,
        'sensitivity = math.sqrt(2) if self.sampler == "fixed" else 1.0',
        "sensitivity = 1.0",
        f"{_MECHANISMS}::test_what_certifies_holds_and_the_controls_are_broken",
    ),
    Mutation(
        "a client may send negative counts of scores",
        f"{_PRIVACY}/score_histograms.py",
        "if given is None or not (given >= 0).all():",
        "if given is None:",
        "tests/privacy/test_score_histograms.py::test_one_client_moves_the_sum_by_at_most_its_norm",
    ),
    Mutation(
        "a histogram of scores counts a record twice",
        "coterie/client/record_level.py",
        "return count_scores(found[:, 1] - found[:, 0], shard.test.y, shard.test_shares)",
        "return 2 * count_scores(found[:, 1] - found[:, 0], shard.test.y, shard.test_shares)",
        "tests/client/test_held_out_histograms.py::test_a_held_out_record_is_counted_once_and_a_training_record_never",
    ),
    Mutation(
        "a histogram of scores counts a unit by record",
        "coterie/datasets/units.py",
        "UNIT_SHARES // np.bincount(self.of_record))",
        "UNIT_SHARES)",
        "tests/audit/test_audit_records.py::test_what_certifies_holds_for_units",
    ),
    Mutation(
        "a unit of training and test data counts in a histogram of scores",
        "coterie/datasets/units.py",
        "np.isin(self.names, trained.names)",
        "np.zeros(len(self), bool)",
        "tests/audit/test_audit_records.py::test_what_certifies_holds_for_units",
    ),
    Mutation(
        "the noise of a histogram of units is that of one share",
        "coterie/client/record_level.py",
        "noisy_counts(counts, epsilon / ones, rng)",
        "noisy_counts(counts, epsilon, rng)",
        "tests/client/test_held_out_units.py::test_the_noise_covers_all_shares_of_a_unit",
    ),
    Mutation(
        "training records are counted where none is held out",
        "coterie/client/record_level.py",
        "if shard.test.x is shard.x or not len(shard.test.y):",
        "if not len(shard.test.y):",
        "tests/client/test_held_out_histograms.py::test_where_nothing_is_held_out_nothing_is_counted",
    ),
    Mutation(
        "held-out records of several runs do not add up",
        f"{_PRIVACY}/ledger.py",
        "if not self._held_out + epsilon <= self.budget * (1 + 1e-9):",
        "if not epsilon <= self.budget * (1 + 1e-9):",
        "tests/privacy/test_held_out.py::test_held_out_records_have_the_budget_to_themselves",
    ),
    Mutation(
        "a lost charge of held-out records is not reconciled",
        f"{_PRIVACY}/ledger.py",
        "if unseen > 0:\n            self._write_held_out",
        "if unseen < 0:\n            self._write_held_out",
        "tests/privacy/test_held_out.py::test_a_lost_charge_is_noticed_and_reconciled",
    ),
    Mutation(
        "the odds of held-out records are left out",
        f"{_PRIVACY}/certificate.py",
        "max(accountant.delta(math.log(odds)), randomised, 0.0)",
        "max(accountant.delta(math.log(odds)), 0.0)",
        "tests/privacy/test_held_out.py::test_the_certificate_covers_both_and_states_the_worse_odds",
    ),
    Mutation(
        "a reply that comes twice counts twice",
        _EXCHANGE,
        "if client is None or client in answered:",
        "if client is None:",
        "tests/strategies/test_base.py::test_a_reply_that_comes_twice_counts_once",
    ),
    Mutation(
        "a client forgets what it spent in earlier rounds",
        f"{_PRIVACY}/ledger.py",
        "        total = self.events + Counter(events)\n        if not total",
        "        total = Counter(events)\n        if not total",
        "tests/privacy/test_ledger.py::test_a_client_s_budget_holds_over_all_rounds",
    ),
    Mutation(
        "no number of a request is too large",
        "coterie/fields.py",
        "most = value < self.high if self.below else value <= self.high",
        "most = True",
        f"{_HOSTILE}::test_a_hostile_request_is_refused_alike_and_charges_nothing",
    ),
    Mutation(
        "a plan has any sampling rate and any noise",
        "coterie/fields.py",
        "return right and not isinstance(value, bool) and value in self.bounds",
        "return right and not isinstance(value, bool)",
        "tests/test_fields.py::test_no_object_has_a_value_beyond_the_declared_limits",
    ),
    Mutation(
        "a server chooses how a client's table is read",
        "coterie/client/app.py",
        "(asked.shape, asked.task, asked.fingerprint) != (",
        "(asked.shape, asked.task, declared.fingerprint) != (",
        "tests/client/test_own_tables.py::test_a_run_with_another_schema_is_refused_before_the_data_are_touched",
    ),
    Mutation(
        "a check of gradients takes a target without one",
        "coterie/client/dpsgd.py",
        "target = loss.probe if isinstance(loss, Task) else 0",
        "target = 0",
        "tests/server/test_survival.py::test_a_network_that_mixes_records_is_refused_for_times_too",
    ),
    Mutation(
        "a record that is censored within a bin counts as free of the event in it",
        "coterie/tasks.py",
        'free = np.searchsorted(self.edges, time, side="right")',
        'free = np.searchsorted(self.edges, time, side="right") + 1',
        "tests/server/test_survival.py::test_a_time_becomes_the_bins_without_the_event",
    ),
    Mutation(
        "weights of classes scale gradients after the clip",
        "coterie/client/dpsgd.py",
        "_Together(partial(clipped_sums, model, loss=task), 3 * widths)",
        "_Together(partial(clipped_sums, model), 3 * widths)",
        "tests/test_tasks.py::test_dp_sgd_clips_the_gradient_of_each_record_of_a_task",
    ),
    Mutation(
        "a request for other data than the declared ones is accepted",
        "coterie/client/app.py",
        "if client.data is not None and client.declared is not None:",
        "if False:",
        f"{_HOSTILE}::test_a_hostile_request_is_refused_alike_and_charges_nothing",
    ),
    Mutation(
        "a refusal states what was spent",
        "coterie/client/budget.py",
        "if not client.deployed:",
        "if True:",
        f"{_HOSTILE}::test_a_refusal_does_not_tell_what_was_spent_elsewhere",
    ),
    Mutation(
        "a budget belongs to a client's id",
        "coterie/client/budget.py",
        "path = ledger_path(client, folder)\n    private_folder(path.parent)",
        "path = own\n    private_folder(path.parent)",
        f"{_HOSTILE}::test_the_same_data_in_two_federations_share_one_budget",
    ),
    Mutation(
        "data that do not fit are refused by a deployed client",
        "coterie/datasets/own.py",
        "shard = read(strict=simulated)",
        "shard = read(strict=True)",
        f"{_HOSTILE}::test_whether_a_request_is_answered_and_what_it_costs_depends_on_no_record",
    ),
    Mutation(
        "a private reply tells that a client has no records",
        "coterie/client/cohort.py",
        "        if self.plans:\n            return {}\n        charged",
        "        charged",
        "tests/client/test_empty_sites.py::test_at_record_level_a_simulated_client_replies_as_if_it_had_records",
    ),
    Mutation(
        "a deployed client tells that it has no records",
        "coterie/client/cohort.py",
        "simulated = [client for client in self.clients if client.folder is None]",
        "simulated = list(self.clients)",
        "tests/client/test_empty_sites.py::test_a_deployed_client_replies_as_if_it_had_records",
    ),
    Mutation(
        "a guarded epoch is not charged",
        f"{_GUARD}/watched_training.py",
        "self._charge(events)",
        "pass",
        f"{_SITE}::test_what_the_app_executes_is_charged_and_sent",
    ),
    Mutation(
        "a guarded site draws the same noise again",
        f"{_GUARD}/watched_training.py",
        'self._noise = Streams().stream("noise")',
        'self._noise = Streams(0).stream("noise")',
        f"{_SITE}::test_the_noise_has_the_charged_scale_and_ignores_the_apps_seed",
    ),
    Mutation(
        "gradients have the noise of the whole event although the share of short ones is released, too",
        "coterie/privacy/record.py",
        "return NoiseSplit(self.noise(first), 0.0, self.clip_share).updates",
        "return self.noise(first)",
        "tests/privacy/test_record.py::test_the_share_of_short_gradients_is_a_coordinate_of_the_same_event",
    ),
    Mutation(
        "the number of short gradients has no noise",
        "coterie/client/dpsgd.py",
        "noisy = counted + float(gaussian(noises, deviation, (1,))[0])",
        "noisy = counted",
        "tests/client/test_dpsgd.py::test_the_share_of_short_gradients_has_the_planned_noise",
    ),
    Mutation(
        "the number of short gradients has the noise of one epoch",
        "coterie/client/dpsgd.py",
        "deviation = self.noise_of_norms * math.sqrt(self.steps)",
        "deviation = self.noise_of_norms * math.sqrt(self.num_examples // self.batch_size)",
        "tests/client/test_dpsgd.py::test_the_share_of_short_gradients_has_the_planned_noise",
    ),
    Mutation(
        "the number of short gradients of round 1 has the noise of later rounds",
        "coterie/client/dpsgd.py",
        "noise_of_norms=plan.noise_of_norms(first)",
        "noise_of_norms=plan.noise_of_norms(False)",
        "tests/strategies/test_records.py::test_gradients_and_the_number_of_short_ones_share_the_charged_noise",
    ),
    Mutation(
        "secret coins of banded hide attendance",
        _BANDED,
        'f"{stated.outside[0]}; {attendance}"',
        "stated.outside[0]",
        "tests/privacy/test_certificate.py::test_a_certificate_names_all_that_is_outside_the_guarantee",
    ),
    Mutation(
        "Fourier transforms are exact",
        f"{_PRIVACY}/accountants.py",
        "_ROUND_OFF = 1e-16",
        "_ROUND_OFF = 0.0",
        "tests/privacy/test_accounting.py::test_at_a_tiny_delta_the_smaller_bound_counts",
    ),
    Mutation(
        "a cost is remembered when further events are composed",
        f"{_PRIVACY}/accountants.py",
        "            self._costs = {}",
        "            pass",
        "tests/privacy/test_accounting.py::test_a_cost_is_that_of_all_events_so_far",
    ),
    Mutation(
        "series of Renyi divergences end early",
        f"{_PRIVACY}/renyi.py",
        "_NEGLIGIBLE = 30.0",
        "_NEGLIGIBLE = 3.0",
        "tests/privacy/test_renyi.py::test_divergences_are_those_of_dp_accounting",
    ),
    Mutation(
        "the largest sum of losses is rounded down",
        f"{_PRIVACY}/loss_distributions.py",
        "*map(math.ceil, tightest(1))",
        "*map(math.floor, tightest(1))",
        "tests/privacy/test_loss_distributions.py::test_a_release_and_its_compositions",
    ),
    Mutation(
        "costs above 600 are the lower end of their interval",
        f"{_PRIVACY}/accountants.py",
        "    while high - low > 1e-9 * high:",
        "    while low == _LARGE:",
        "tests/privacy/test_accounting.py::test_costs_above_600_are_the_closed_form",
    ),
    Mutation(
        "a last message of one loss is free",
        f"{_PRIVACY}/record.py",
        "        if rest:",
        "        if rest > 1:",
        "tests/privacy/test_losses.py::test_all_messages_together_cost_what_one_release_of_the_loss_noise_costs",
    ),
    Mutation(
        "a reply does not pay for its choice by loss",
        f"{_PRIVACY}/record.py",
        "chooses=release_spec.choice)",
        "chooses=False)",
        "tests/privacy/test_selection.py::test_a_reply_pays_for_the_choice_that_its_request_asks_for",
    ),
    Mutation(
        "a ledger may hold twice its budget",
        f"{_PRIVACY}/check.py",
        "if not spent <= plan.epsilon * (1 + _TOLERANCE):",
        "if not spent <= plan.epsilon * 2:",
        "tests/privacy/test_certificate.py::test_charges_slightly_above_the_budget_are_a_problem",
    ),
    Mutation(
        "any certificate may lack entries of the plan",
        f"{_PRIVACY}/check.py",
        'and _LATER.isdisjoint(header["plan"])',
        "and True",
        "tests/privacy/test_certificate.py::test_entries_that_version_0_2_has_not_may_be_missing_only_together",
    ),
    Mutation(
        "the names of a guarded site are those of a ledger that is no longer there",
        f"{_GUARD}/site_names.py",
        " if content.startswith(before) else None",
        "",
        "tests/guard/test_site_names.py::test_another_ledger_is_read_as_a_whole",
    ),
    Mutation(
        "gradients of infinite norm are kept",
        "coterie/client/ghost.py",
        "kept = norms.isfinite()",
        "kept = ~norms.isnan()",
        "tests/client/test_ghost.py::test_gradients_that_are_not_finite_do_not_count",
    ),
    Mutation(
        "a guarded site draws the same batches again",
        f"{_GUARD}/watched_training.py",
        'coins = Streams().stream("batches")',
        'coins = Streams(0).stream("batches")',
        f"{_SITE}::test_batches_are_poisson_samples",
    ),
    Mutation(
        "a guarded site adds less noise than it charges",
        f"{_GUARD}/watched_training.py",
        "drawn = torch.from_numpy(gaussian(self._noise, noise, ",
        "drawn = torch.from_numpy(gaussian(self._noise, noise / 1.5, ",
        f"{_SITE}::test_the_noise_has_the_charged_scale_and_ignores_the_apps_seed",
    ),
    Mutation(
        "a guarded site clips gradients to twice the norm",
        f"{_GUARD}/watched_training.py",
        "clip_factors(norms, clip_norm)",
        "clip_factors(norms / 2, clip_norm)",
        f"{_SITE}::test_one_record_of_any_gradient_moves_the_sum_by_at_most_the_clipping_norm",
    ),
    Mutation(
        "a guarded app may step twice on a batch",
        f"{_GUARD}/watched_training.py",
        "self._watch.use_batch(records, noise)",
        "pass",
        f"{_SITE}::test_training_that_is_not_private",
    ),
    Mutation(
        "a guarded app may change parameters between steps",
        f"{_GUARD}/watched_training.py",
        "self._watch.check_unchanged()",
        "pass",
        f"{_SITE}::test_training_that_is_not_private",
    ),
    Mutation(
        "a guarded app may reply with other arrays",
        f"{_GUARD}/mod.py",
        "if not _equal(_like(_arrays(reply), received), arrays):",
        "if False:",
        f"{_SITE}::test_a_reply_that_private_training_did_not_produce",
    ),
    Mutation(
        "a guarded reply has the true number of records",
        f"{_GUARD}/mod.py",
        "values |= {name: terms.num_examples for name in record if name in _EXAMPLES}",
        "values |= {name: record[name] for name in record if name in _EXAMPLES}",
        f"{_SITE}::test_the_reply_says_the_same_whatever_was_spent",
    ),
    Mutation(
        "NumPy's generator is not reseeded after a fork",
        _GENERATORS,
        "np.random.seed()",
        "pass",
        f"{_SUPEREXEC}::test_no_two_messages_draw_the_same",
    ),
    Mutation(
        "PyTorch's generator is not reseeded after a fork",
        _GENERATORS,
        "torch.seed()",
        "pass",
        f"{_SUPEREXEC}::test_no_two_messages_draw_the_same",
    ),
    Mutation(
        "all GPUs get one seed",
        _GENERATORS,
        "_reseed_devices(backend)",
        "pass",
        "tests/test_generators.py::test_each_gpu_gets_a_seed_of_its_own",
    ),
    Mutation(
        "a process of a message that imports its app is not reseeded before",
        _CLIENTAPP,
        "reseed_generators()\n    if loaded is None:",
        "if loaded is None:",
        f"{_SUPEREXEC}::test_no_two_imports_of_an_app_draw_the_same",
    ),
    Mutation(
        "generators of an app's modules go on where the template's are",
        _CLIENTAPP,
        "[*generators, *(loaded.generators if loaded else ())]",
        "generators",
        f"{_SUPEREXEC}::test_no_two_messages_draw_the_same",
    ),
    Mutation(
        "workers of the local engine are not reseeded",
        "coterie/engine/workers.py",
        "    reseed_generators()\n",
        "",
        "tests/engine/test_in_process.py::test_workers_do_not_share_random_generators",
    ),
    Mutation(
        "a guarded model's buffers may change between steps",
        _TRAINING,
        "for name, values in (now | buffers).items():",
        "for name, values in now.items():",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "a guarded model's buffers outside its state may change",
        _TRAINING,
        "return dict(module.named_buffers(remove_duplicate=False))",
        "return {k: v for k, v in module.named_buffers() if k in module.state_dict()}",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "a guarded model may get other parameters",
        _TRAINING,
        "if now.keys() != self._parameters.keys() or (now | buffers).keys() != self._last.keys():",
        "if False:",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "a guarded model may exchange parameters",
        _TRAINING,
        "if parameter is not self._parameters[name]:",
        "if False:",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "a guarded app may freeze a layer before a step",
        _TRAINING,
        "if parameter.requires_grad != self._requires_grad[name]:",
        "if False:",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "a guarded app may train without a parameter that requires a gradient",
        _TRAINING,
        "if not self._trained:",
        "if False:",
        f"{_APPS}::test_a_faulty_app_is_refused",
    ),
    Mutation(
        "a guarded step keeps gradients that the app wrote",
        _TRAINING,
        "parameter.grad = gradients.get(parameter)",
        "parameter.grad = gradients.get(parameter, parameter.grad)",
        f"{_APPS}::test_a_fault_without_effect_is_accepted",
    ),
    Mutation(
        "a guarded app may write momentum before make_private",
        _TRAINING,
        "if not _is_new(self._base):",
        "if False:",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "a guarded app may change momentum between steps",
        _TRAINING,
        "if not _same(self._state, _state(base)):",
        "if False:",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "a guarded app may exchange the base optimizer",
        _TRAINING,
        "if self.original_optimizer is not base or _groups(base) != self._groups:",
        "if _groups(base) != self._groups:",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "a guarded app may change parameter groups",
        _TRAINING,
        "if self.original_optimizer is not base or _groups(base) != self._groups:",
        "if self.original_optimizer is not base:",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "hooks may run in a guarded step",
        _TRAINING,
        "if any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):",
        "if any((_global_optimizer_pre_hooks, _global_optimizer_post_hooks)):",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "hooks of all optimizers may run in a guarded step",
        _TRAINING,
        "if any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):",
        "if any(hooks):",
        f"{_APPS}::test_a_faulty_app_is_refused",
    ),
    Mutation(
        "a guarded step calls what the app put in the place of the base step",
        _TRAINING,
        "type(self._base).step(self._base)",
        "self._base.step()",
        f"{_APPS}::test_an_action_at_each_place_of_an_app",
    ),
    Mutation(
        "a guarded step leaves the gradients of records to the base optimizer",
        _TRAINING,
        "parameter.grad_sample = None  # none is used twice, nor seen by the base optimizer",
        "pass",
        f"{_APPS}::test_a_faulty_app_is_refused",
    ),
    Mutation(
        "a guarded run composes charges by node",
        _SITES,
        "        sites.join(*reporter(charge))",
        "        sites.join(reporter(charge)[0], reporter(charge)[0])",
        f"{_RUN}::test_a_site_that_returns_with_new_keys_is_one_site",
    ),
    Mutation(
        "nodes without a name are sites of their own",
        _SITES,
        'site, absorbed = self._root(("name", name))',
        'site, absorbed = self._root(("name", name or node))',
        f"{_RUN}::test_nodes_without_a_name_are_composed_and_the_certificate_states_the_way_out",
    ),
    Mutation(
        "a new node has a budget of its own in a guarded run",
        _SITES,
        'reported = ("node", node) in self._parents',
        "reported = True",
        f"{_RUN}::test_nodes_without_a_name_share_the_budget_of_a_run_also_new_ones",
    ),
    Mutation(
        "each node has the budget of a guarded run",
        _SERVER,
        "return self._sites.of(str(node))",
        'return "node", str(node)',
        f"{_RUN}::test_the_budget_of_a_run_is_per_site_and_not_per_node",
    ),
    Mutation(
        "messages under way do not count in a guarded run",
        _SERVER,
        "event: count * (under_way + 1)",
        "event: count",
        f"{_RUN}::test_messages_that_are_under_way_count",
    ),
    Mutation(
        "what a node was charged under an earlier name is lost",
        _SERVER,
        "self._events[site] += self._events.pop(absorbed, Counter())",
        "pass",
        f"{_RUN}::test_the_budget_counts_what_nodes_and_names_connect",
    ),
    Mutation(
        "a guarded site may change its name within a run",
        f"{_GUARD}/mod.py",
        "        _check_name(client, folder, path, details)",
        "        pass",
        f"{_SITE}::test_a_site_keeps_its_name_in_a_run",
    ),
    Mutation(
        "replies leave without a fixed size",
        "coterie/client/app.py",
        "        fix_size(reply)",
        "        fix_size",
        f"{_REPLY_SIZES}::test_the_size_of_a_reply_depends_on_no_record",
    ),
    Mutation(
        "integers of a reply are not padded to one size",
        _SIZES,
        "sum(_LARGEST_INTEGER - _width(value) for value in integers)",
        "_LARGEST_INTEGER",
        f"{_REPLY_SIZES}::test_the_size_of_a_reply_depends_on_no_record",
    ),
    Mutation(
        "equal arrays of a reply are sent once",
        _SIZES,
        'b"\\t" if number >> i & 1 else b" "',
        'b" "',
        "tests/flower/test_sizes.py::test_the_size_of_an_update_does_not_depend_on_its_values",
    ),
    Mutation(
        "equal chunks of arrays are sent once",
        _SIZES,
        "ends.append(ends[-1] - _CHUNK // 2 + next(shortening))",
        "ends.append(ends[-1] - _CHUNK // 2)",
        "tests/flower/test_sizes.py::test_the_size_of_an_update_does_not_depend_on_its_values",
    ),
    Mutation(
        "the certificate does not name the peak memory",
        "coterie/server/planning.py",
        '        "the peak memory of the run",\n',
        "",
        "tests/server/test_run.py::test_every_value_of_a_private_run_is_released_public_or_named_as_outside",
    ),
    Mutation(
        "the largest feature sets the tolerance of all",
        _ROWS,
        "scale = np.abs(outputs).max(axis=0)",
        "scale = np.full(outputs.shape[1], np.abs(outputs).max())",
        f"{_ROW_WISE}::test_features_that_mix_images_are_refused",
    ),
    Mutation(
        "features of which other images make NaN pass",
        _ROWS,
        "~(difference <= tolerance).all(axis=0)",
        "(difference > tolerance).any(axis=0)",
        f"{_ROW_WISE}::test_features_that_mix_images_are_refused",
    ),
    Mutation(
        "features are tried beside similar images alone",
        _ROWS,
        "enumerate(others)",
        "enumerate(others[:0])",
        f"{_ROW_WISE}::test_features_that_mix_images_are_refused",
    ),
    Mutation(
        "networks are checked in float32 alone",
        "coterie/models/checks.py",
        "shape, dtype=parameter.dtype)",
        "shape, dtype=torch.float32)",
        f"{_ROW_WISE}::test_networks_that_mix_examples_are_refused",
    ),
    Mutation(
        "the clients' bound of seeds is not that of the server",
        "coterie/wire/requests.py",
        "    seed: Annotated[int | None, SEED] = None",
        "    seed: Annotated[int | None, ROUNDS] = None",
        f"{_BOUNDS}::test_a_client_accepts_the_requests_of_every_configuration",
    ),
    Mutation(
        "a step size may decay to 0, which clients reject",
        "coterie/server/config.py",
        "if not training.lr * training.lr_decay**last > 0:",
        "if False:",
        f"{_BOUNDS}::test_a_step_size_does_not_decay_to_0",
    ),
    Mutation(
        "a seed above 2^53 is rounded",
        "coterie/settings.py",
        "int(Decimal(str(value)))",
        "int(float(value))",
        f"{_BOUNDS}::test_seeds_are_exact",
    ),
    Mutation(
        "the report ignores the conditions of a declaration",
        "coterie/report/configuration.py",
        "return _depends(config, key) and all(",
        "return all(",
        "tests/report/test_comparison.py::test_a_setting_is_used_if_and_only_if_the_command_does_not_refuse_it",
    ),
    Mutation(
        "a resumed run is not compared with the data of the first session",
        "coterie/server/folder.py",
        "origin.require_same(earlier)",
        "pass",
        "tests/server/test_resume_data.py::test_changed_data_are_refused_before_anything_changes",
    ),
    Mutation(
        "a round is charged though no client is registered",
        _LOOP,
        "    if required and not registry.nodes:",
        "    if False:",
        "tests/server/test_resume_data.py::test_without_a_registered_client_no_round_is_charged",
    ),
    Mutation(
        "further rounds do not count what is spent",
        _CONTINUATION,
        "besides = ledger.events + Counter",
        "besides = Counter",
        f"{_GO_ON}::test_the_rounds_that_an_error_names_fit_and_no_more",
    ),
    Mutation(
        "further rounds exceed the budget",
        _CONTINUATION,
        "if extended.private and (most",
        "if False and (most",
        f"{_GO_ON}::test_rounds_that_cannot_be_are_refused_and_change_nothing",
    ),
    Mutation(
        "correlated noise is continued beyond its rounds",
        _CONTINUATION,
        "if plan.fixed_rounds:",
        "if False:",
        f"{_GO_ON}::test_rounds_that_cannot_be_are_refused_and_change_nothing",
    ),
    Mutation(
        "charges do not state the further rounds",
        f"{_PRIVACY}/ledger.py",
        "        if self._extended:",
        "        if False:",
        f"{_GO_ON}::test_the_certificate_covers_both_parts_at_the_same_noise",
    ),
    Mutation(
        "a certificate ignores the further rounds",
        f"{_PRIVACY}/certificate.py",
        'return plan_of(header["plan"]).extended(extended_terms(charges))',
        'return plan_of(header["plan"])',
        f"{_GO_ON}::test_a_certificate_counts_the_further_rounds_from_their_first_charge",
    ),
    Mutation(
        "a charge makes the plan shorter",
        f"{_PRIVACY}/statement.py",
        "max(getattr(self, name), value)",
        "value",
        f"{_GO_ON}::test_an_extended_ledger_cannot_be_shortened",
    ),
    Mutation(
        "private evaluations of further rounds are not planned",
        _CONTINUATION,
        '"evaluations": due + evaluated',
        '"evaluations": plan.evaluations',
        f"{_GO_ON}::test_private_evaluations_of_the_further_rounds_are_planned_and_charged",
    ),
    Mutation(
        "the charges of the run whose models are the start do not count",
        f"{_PRIVACY}/ledger.py",
        "count_events(self.charges) + earlier_events(self.header)",
        "count_events(self.charges)",
        f"{_STARTS}::test_ledger_and_certificate_compose_both_runs",
    ),
    Mutation(
        "a certificate leaves out the run whose models are the start",
        f"{_PRIVACY}/certificate.py",
        "client_plan.expected(charges, plan, earlier)",
        "client_plan.expected(charges, plan)",
        f"{_STARTS}::test_ledger_and_certificate_compose_both_runs",
    ),
    Mutation(
        "noise is calibrated as if the run whose models are the start had cost nothing",
        _START_MODELS,
        "+evaluations + self.events",
        "+evaluations",
        f"{_STARTS}::test_ledger_and_certificate_compose_both_runs",
    ),
    Mutation(
        "planned rounds of a stopped run do not count in the run that starts from it",
        _START_MODELS,
        "earlier.expected(charges, earlier, earlier_events(header))",
        "count_events(charges) + earlier_events(header)",
        f"{_STARTS}::test_planned_rounds_of_a_stopped_run_count",
    ),
    Mutation(
        "a private run starts from models of the same clients without privacy",
        _START_MODELS,
        "if not earlier.private:",
        "if False:",
        f"{_STARTS}::test_runs_that_do_not_fit_are_refused",
    ),
    Mutation(
        "runs of different adjacencies are composed",
        _START_MODELS,
        "if (earlier.sampler, earlier.adjacency) != (plan.sampler, plan.adjacency):",
        "if False:",
        f"{_STARTS}::test_runs_that_do_not_fit_are_refused",
    ),
    Mutation(
        "a run from seeded models is certified",
        f"{_PRIVACY}/certificate.py",
        'for reason in start.get("reasons", ())',
        "for reason in ()",
        f"{_STARTS}::test_an_uncertified_start_makes_the_run_uncertified",
    ),
    Mutation(
        "no point takes a medoid's place",
        _PAM,
        "if changes.min() < 0:",
        "if False:",
        f"{_PAM_TEST}::test_no_swap_lowers_the_cost",
    ),
    Mutation(
        "swaps end after n points, not after n points without one",
        _PAM,
        "swapped, assignment, 0",
        "swapped, assignment, tries",
        f"{_PAM_TEST}::test_no_swap_lowers_the_cost",
    ),
    Mutation(
        "swaps that raise the cost by rounding errors are made",
        _PAM,
        "if assignment[1].sum() < near.sum():",
        "if True:",
        f"{_PAM_TEST}::test_swaps_that_change_the_cost_by_rounding_errors_end",
    ),
    Mutation(
        "a client's ledger is not compared with its anchor",
        f"{_PRIVACY}/ledger.py",
        " and chained and chained[2].decode() == mark.chain else None",
        " else None",
        "tests/privacy/test_anchors.py::test_a_ledger_that_lost_a_charge_is_refused_until_it_is_reconciled",
    ),
    Mutation(
        "a charge leaves no anchor",
        f"{_PRIVACY}/ledger.py",
        "        if events:\n            self._add_anchor()\n        return first",
        "        return first",
        "tests/privacy/test_anchors.py::test_a_ledger_that_lost_a_charge_is_refused_until_it_is_reconciled",
    ),
    Mutation(
        "reconciling counts charges of others as the client's own",
        f"{_PRIVACY}/ledger.py",
        "Counter({} if before is None else before.events)",
        "self._events",
        "tests/privacy/test_anchors.py::test_a_ledger_that_went_on_elsewhere_costs_both_branches",
    ),
    Mutation(
        "data that are read-only are charged in the state folder",
        "coterie/client/budget.py",
        "if not os.access(beside if beside.exists() else home, os.W_OK):",
        "if False:",
        "tests/client/test_hostile_server.py::test_data_that_are_read_only_need_a_named_budget_file",
    ),
    Mutation(
        "the records of a GAN are read before the charge",
        "coterie/client/points.py",
        "    if cohort.plans:\n",
        "    if cohort.plans and [_clamped(cohort, client, 1.0) for client in clients]:\n",
        f"{_HOSTILE}::test_data_are_read_after_the_charge_and_never_for_a_refused_request",
    ),
    Mutation(
        "a roster that nobody signed is read",
        _ROSTER,
        "        if not any(is_signed(key, _PURPOSE, content, signature) for key in keys):",
        "        if not keys:",
        "tests/deploy/test_roster.py::test_a_changed_roster_is_refused",
    ),
    Mutation(
        "an expired entry of a roster is valid",
        _ROSTER,
        "if member.end <= datetime.now(UTC):",
        "if False:",
        f"{_REGISTRY}::test_an_entry_that_expires_during_a_run_ends_the_part_of_its_node",
    ),
    Mutation(
        "an older roster replaces a newer one",
        _ROSTER,
        "if roster.number < self._roster.number:",
        "if False:",
        f"{_REGISTRY}::test_a_node_is_replaced_during_a_run",
    ),
    Mutation(
        "a node takes the place of another in the roster",
        "coterie/rounds/client_registry.py",
        "if self._roster is not None and self._members[node] != claim.client:",
        "if self._roster is not None and self._members[node] is None:",
        f"{_REGISTRY}::test_a_registered_node_takes_no_other_client_s_place",
    ),
    Mutation(
        "without a roster, the lowest node id is the client",
        "coterie/rounds/client_registry.py",
        "for node in sorted(self._claims, key=lambda node: self._joined[node]):",
        "for node in sorted(self._claims):",
        f"{_REGISTRY}::test_the_node_that_was_registered_first_keeps_its_client",
    ),
    Mutation(
        "a policy is not asked",
        "coterie/client/app.py",
        "    refused = policy.refuses(strategy, releases)",
        '    refused = ""',
        f"{_POLICY}::test_what_the_policy_does_not_allow_is_refused_before_anything_else",
    ),
    Mutation(
        "the limit of a policy leaves out the request itself",
        "coterie/client/budget.py",
        "not epsilon(made + events, delta) <= limit",
        "not epsilon(made, delta) <= limit",
        f"{_POLICY}::test_epsilon_is_limited_below_the_budget",
    ),
    Mutation(
        "a client does not look for the head of a request",
        "coterie/client/budget.py",
        "    if not held:",
        "    if False:",
        "tests/client/test_heads.py::test_data_and_state_restored_together_are_noticed_by_the_next_request_of_the_run",
    ),
    Mutation(
        "heads of charges for other servers count",
        "coterie/client/budget.py",
        "    return charge.get(HEAD) == head and (made or",
        "    return charge.get(HEAD) == head and (True or",
        "tests/client/test_heads.py::test_no_server_and_no_client_learns_of_the_charges_for_another",
    ),
    Mutation(
        "a server keeps heads at client level",
        _EXCHANGE,
        "        if self._run.plan.clients_keep_ledgers and (head :=",
        "        if (head :=",
        "tests/client/test_heads.py::test_at_client_level_a_server_takes_no_head",
    ),
    Mutation(
        "a server that resumes forgets the heads",
        "coterie/strategies/loop.py",
        '            run.heads = dict(zip(kept["clients"].tolist(), kept["heads"].tolist(), strict=True))',
        "            pass",
        "tests/server/test_resume_deployed.py"
        "::test_a_client_restored_with_data_and_state_is_noticed_also_by_a_server_that_resumes",
    ),
    Mutation(
        "a process that starts takes an older roster",
        _ROSTER,
        "            if roster.number < newest:",
        "            if False:",
        "tests/deploy/test_roster.py::test_a_process_that_starts_refuses_an_older_roster",
    ),
    Mutation(
        "a signed request may have been changed",
        _REQUEST,
        "        if not is_signed(_public_key(request.key), _PURPOSE, content, signature):",
        "        if False:",
        "tests/deploy/test_run_request.py::test_a_changed_request_is_none",
    ),
    Mutation(
        "anybody in the roster signs requests for runs",
        _REQUEST,
        "        member = roster.member(fingerprint(self.key.encode()), SUBMITTER)",
        "        member = roster._by_key[fingerprint(self.key.encode())]",
        "tests/deploy/test_run_request.py::test_another_key_cannot_be_put_in_and_a_node_signs_none",
    ),
    Mutation(
        "a client asks for no signed request",
        "coterie/client/app.py",
        "    if refused or policy.submitters is None:",
        "    if True:",
        f"{_CONSENT}::test_everything_else_is_refused",
    ),
    Mutation(
        "every submitter is allowed",
        "coterie/client/consent.py",
        "        if self.submitter not in allowed:",
        "        if False:",
        f"{_CONSENT}::test_everything_else_is_refused",
    ),
    Mutation(
        "a signed request pays again in every run",
        "coterie/client/budget.py",
        "client.run if name == RUN else _request_id(client)",
        "client.run if name == RUN else client.run",
        f"{_CONSENT}::test_a_request_used_again_in_other_runs_spends_its_epsilon_once",
    ),
    Mutation(
        "sums of charges are kept for another ledger",
        f"{_PRIVACY}/sums.py",
        "        if whole:",
        "        if False:",
        "tests/privacy/test_charge_sums.py::test_sums_that_do_not_fit_are_computed_again",
    ),
    Mutation(
        "refusals are counted at client level",
        _EXCHANGE,
        "in CHARGED_REQUESTS and not self._withheld:",
        "in CHARGED_REQUESTS:",
        "tests/server/test_refusals.py::test_at_client_level_a_refusal_reveals_and_changes_nothing",
    ),
    Mutation(
        "a reply leaves although it is not in the audit log",
        "coterie/client/audited.py",
        "if not _record(client, asked | decision):",
        "if not _record(client, asked | decision) and False:",
        "tests/client/test_audited.py::test_a_reply_that_cannot_be_recorded_does_not_leave",
    ),
    Mutation(
        "an app's clustered reply has all that the app replies",
        _CLUSTERED,
        "{name: content[name] for name in self._reports if name in content}",
        "content",
        f"{_CLUSTERED_TEST}::test_nothing_but_the_update_and_the_cluster_leaves",
    ),
    Mutation(
        "the text of an app's exception leaves a clustered client",
        _CLUSTERED,
        "        except Exception as error:\n            raise ClientError(failed) from error",
        "        except ZeroDivisionError as error:\n            raise ClientError(failed) from error",
        f"{_CLUSTERED_TEST}::test_an_evaluation_without_a_loss_is_one_line",
    ),
    Mutation(
        "the state of a choice of a cluster is kept",
        _CLUSTERED,
        "asked, deepcopy(asked.context), model",
        "asked, asked.context, model",
        f"{_CLUSTERED_TEST}::test_the_state_of_training_is_kept_and_that_of_a_choice_dropped",
    ),
    Mutation(
        "an app that trains by itself accepts a plan of DP-SGD",
        _CLUSTERED,
        "if self.request.record_plans is not None:",
        "if False:",
        f"{_CLUSTERED_TEST}::test_what_an_app_cannot_do_is_refused_before_it_runs",
    ),
    Mutation(
        "a client accepts an own optimizer or loss beside a plan of DP-SGD",
        "coterie/client/cohort.py",
        "for kind in local.plugins if plans else ():",
        "for kind in ():",
        f"{_PLUGINS_TEST}::test_a_client_refuses_them_beside_a_plan_of_dp_sgd",
    ),
    Mutation(
        "the guard trains a parameter that the message lacks",
        "coterie/guard/watched_training.py",
        "or trains.keys() - set(keys)",
        "",
        "tests/guard/test_guarded_adapters.py::test_what_is_no_constant_is_refused",
    ),
    Mutation(
        "a trainer changes the records of its client",
        "coterie/client/trainers.py",
        "*(part.copy() for part in examples)",
        "*examples",
        f"{_TRAINERS_TEST}::test_a_loop_of_sgd_is_the_built_in_one",
    ),
    Mutation(
        "a trainer changes PyTorch's generator",
        "coterie/client/trainers.py",
        "torch.random.fork_rng(devices), torch.enable_grad()",
        "torch.enable_grad()",
        f"{_TRAINERS_TEST}::test_pytorchs_generator_is_seeded_for_each_client_and_put_back",
    ),
    Mutation(
        "a client accepts code that differs from the server's",
        "coterie/client/app.py",
        "config.sources != (here := sources(config.training.plugins))",
        "not (here := sources(config.training.plugins))",
        "tests/client/test_own_data.py::test_a_client_compares_the_code_of_its_training_with_the_servers",
    ),
    Mutation(
        "a record-level run accepts an own optimizer or loss",
        "coterie/server/config.py",
        "for kind, name in self.training.plugins.items():",
        "for kind, name in ():",
        f"{_PLUGINS_TEST}::test_record_level_refuses_them",
    ),
]


def survives(mutation: Mutation) -> bool:
    """Whether the named test passes in a copy of the tree with this mutation.

    Raises:
        RuntimeError: the test cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in _COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, Path(folder, name))
        file = Path(folder, mutation.file)
        file.write_text(file.read_text().replace(mutation.old, mutation.new))
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutation.test]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # pytest's status for tests that failed is 1
        raise RuntimeError(f"{mutation.test} cannot be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main(words: list[str]) -> int:
    """Number of mutations that survive."""
    survivors = 0
    for mutation in MUTATIONS:
        if all(word in mutation.name for word in words):
            alive = survives(mutation)
            survivors += alive
            print(f"{'SURVIVES' if alive else 'killed':8} {mutation.name:60} {mutation.test}", flush=True)
    print(f"{survivors} survive")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
