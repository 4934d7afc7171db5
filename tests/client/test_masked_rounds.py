"""Masked rounds of deployed clients: exact sums whoever drops out, crashes at any point, and no second answer."""

import json
import os
import re
import shutil
import stat
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from kit.masked_sites import CLUSTERS, LAYOUT, MODELS_SENT, STEPS, Hidden, Server, Sites, opened, plan_of
from kit.tables import for_rows

from coterie.client import masked_rounds
from coterie.client.state import ClientError
from coterie.deploy.backups import back_up
from coterie.privacy import epsilon
from coterie.privacy.anchors import Anchors
from coterie.privacy.discrete_gaussians import STEPS as STEPS_OF_GRID
from coterie.privacy.ledger_lines import event_of
from coterie.privacy.secure_aggregation import SecureError, discrete_gaussian, noise_layers, to_modulus
from coterie.privacy.secure_aggregation.keys import agree, unseal
from coterie.wire.messages import CONFIG, REPLY, SCORE_COUNTS, Layout


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    from coterie.deploy.certificates import create

    return create(tmp_path_factory.mktemp("masked") / "pki", 12, ["superlink"]).folder


@pytest.fixture
def hidden(monkeypatch):
    return Hidden.of_all(monkeypatch)


DROPPED = [
    # clients; those that drop out before steps 1, 2, 3 and 4
    (10, (), (), (), ()),
    (7, (3,), (), (), ()),
    (7, (), (0,), (), ()),
    (8, (), (7, 2), (), ()),
    (7, (), (), (5,), ()),
    (8, (), (), (), (1, 7)),
    (10, (0,), (4,), (8,), ()),
    (10, (0,), (), (8,), (9,)),
    (10, (0,), (4, 5), (), ()),
    (6, (), (), (), ()),
    (7, (6,), (), (0,), ()),
    (8, (1,), (2,), (), ()),
    (9, (), (8, 0), (), ()),
]


@pytest.mark.parametrize(("clients", "first", "second", "third", "fourth"), DROPPED)
def test_the_sum_is_that_of_the_survivors_whoever_drops_out(
    pki, tmp_path, hidden, clients, first, second, third, fourth
):
    sites = Sites(tmp_path, pki, clients)
    server = Server(sites, plan_of(clients))
    server.open([client for client in server.cohort if client not in first])
    server.train([client for client in server.openings if client not in second])
    server.sign([client for client in server.vectors if client not in third])
    server.unmask([client for client in server.signatures if client not in fourth])
    np.testing.assert_array_equal(server.total(), hidden.total(server.vectors, revealing=server.shares))
    for client in range(clients):
        assert len(sites.charges(client)) == (client in server.vectors)
        assert sites.state(client, "open-round").exists() == (client in server.openings and client not in server.shares)


BOTH = Layout(tuple(f"{part}.{name}" for part in ("global", "cluster") for name in LAYOUT.names), LAYOUT.shapes * 2)
METHODS = {
    "ifca": {},
    "ifca, after the last round with sizes": {"number": 3},
    "fedavg": {"training": {"cluster": 0}, "models": MODELS_SENT[:1]},
    "fesem": {"training": {"assign": "nearest", "clip": 1.0}},
    "fedprox": {"training": {"penalty": "proximal", "penalty_weight": 0.1}},
    "rr-cluster": {"training": {"redraw": (0.5, 0.5, 0.2, 0.8)}},
    "rr-cluster, assigned": {"training": {"redraw": (0.5, 0.5, 0.2, 0.8), "rebalance_train": "assigned"}},
    "fedcam": {
        "training": {"additive": True},
        "layout": BOTH,
        "shared": LAYOUT.size,
        "models": np.tile(MODELS_SENT, (1, 2)),
    },
    "fedper": {
        "training": {"cluster": 1},
        "layout": Layout(LAYOUT.names[:1], LAYOUT.shapes[:1]),
        "models": MODELS_SENT[:1, : LAYOUT.sizes[0]],
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_with_sums_gives_the_sums_of_its_clients(pki, tmp_path, hidden, monkeypatch, method):
    """The sum less the noise is that of the clipped updates, which the same clients would have sent."""
    sites, plan, updates = Sites(tmp_path, pki, 6), plan_of(6, sizes_until=2.0), []

    def trained(cohort):
        labels, redrawn, moved = original(cohort)
        updates.append((int(labels[0]), int(redrawn[0]), moved[0]))
        return labels, redrawn, moved

    def noise(rng, std, size):
        noises.append(discrete_gaussian(rng, std, size))
        return noises[-1]

    original, noises = masked_rounds.train_without_dp, []
    monkeypatch.setattr(masked_rounds, "train_without_dp", trained)
    monkeypatch.setattr(noise_layers, "discrete_gaussian", noise)
    server = Server(sites, plan, **METHODS[method])
    server.open()
    server.train()
    count = len(plan.layers.deviations)
    kept = noises[count - 1 :: count]  # of all clients, each keeps its first layer, which it draws last
    server.sign()
    server.unmask()
    np.testing.assert_array_equal(server.total(), hidden.total())
    of_round = plan.of_round(server.number)
    clean = [of_round.encode(update, label, redrawn, server.shared) for label, redrawn, update in updates]
    np.testing.assert_array_equal(server.total(), to_modulus(np.sum(clean, axis=0) + np.sum(kept, axis=0)))
    assert np.abs(np.sum(clean, axis=0)[: CLUSTERS * server.layout.size]).max() > 1000


SCORES = {"evaluations": 2, "evaluation_noise": 0.25, "histograms": 1, "histogram_noise": 20.0}


def scored(sites, plan, release, number=1, attempt=1):
    """A round that evaluates."""
    server = Server(sites, plan, number, attempt, release=release)
    server.run()
    return server


#: Entries of a reply to step 2 beside the masked vector.
VECTOR_ENTRIES = {"client-id", "round", "padding", "view-signature"}


@pytest.mark.parametrize("release", ["accuracy", "histogram"])
def test_the_sum_of_an_evaluation_is_that_of_the_clients_scores_and_their_noise(
    pki, tmp_path, hidden, monkeypatch, release
):
    """What leaves is the masked vector alone; the charge is that of the evaluation."""

    def noise(rng, std, size):
        noises.append((std, discrete_gaussian(rng, std, size)))
        return noises[-1][1]

    def reported(cohort):
        values.append(original(cohort)[0])
        return [values[-1]]

    noises, values, original = [], [], masked_rounds.reports
    monkeypatch.setattr(noise_layers, "discrete_gaussian", noise)
    monkeypatch.setattr(masked_rounds, "reports", reported)
    sites, plan = Sites(tmp_path, pki, 6, epsilon=20.0, delta=1e-4), plan_of(6, **SCORES)
    server, scores = scored(sites, plan, release), plan.scores(release)
    key = "accuracy" if release == "accuracy" else SCORE_COUNTS
    clean = [scores.encode(value[key]) for value in values]
    np.testing.assert_array_equal(server.total(), hidden.total())
    kept = noises[1 : 2 * 6 : 2]  # the first of two layers of every client, which it draws last
    expected = np.sum(clean, axis=0) + np.sum([drawn for _, drawn in kept], axis=0)
    np.testing.assert_array_equal(server.total(), to_modulus(expected))
    assert len(server.total()) == scores.size == {"accuracy": 1, "histogram": 64}[release]
    assert {std for std, _ in kept} == {scores.event.noise_multiplier * STEPS_OF_GRID / np.sqrt(6 - 1)}
    assert any(vector.any() for vector in clean)
    for client in range(6):
        (charge,) = sites.charges(client)
        assert (charge["for"], charge["masked"]) == (release, ["run", 1, 1])
        assert charge["noise_multiplier"] == scores.event.noise_multiplier
        assert sites.log(client)[1]["released"] == "masked scores"
    reply = sites.ask(2, "evaluate.masked", server.train_content(2))  # again
    assert (set(reply), set(reply.config_records[REPLY])) == ({"update", REPLY}, VECTOR_ENTRIES)
    assert list(reply.array_records["update"]) == ["masked"]


@pytest.mark.parametrize("failure", ["error", "not a number"])
def test_an_evaluation_that_fails_is_noise_alone_and_no_error(pki, tmp_path, hidden, monkeypatch, failure):
    def reported(cohort):
        if failure == "error":
            raise ValueError("a secret")
        return [{"accuracy": float("nan")}]

    sites, plan = Sites(tmp_path, pki, 6), plan_of(6, **SCORES)
    monkeypatch.setattr(masked_rounds, "reports", reported)
    monkeypatch.setattr(noise_layers, "discrete_gaussian", lambda rng, std, size: np.zeros(size, np.int64))
    for attempt, release in enumerate(("accuracy", "histogram")):
        server = scored(sites, plan, release, attempt=attempt)
        assert not server.total().any()


def test_rounds_and_evaluations_take_turns_and_are_charged_apart(pki, tmp_path, hidden):
    sites, plan = Sites(tmp_path, pki, 6), plan_of(6, **SCORES)
    attempt = 0
    for number in (1, 2, 3):
        for release in ("training", "accuracy", "histogram")[: 1 + (number > 1) + (number > 2)]:
            server = scored(sites, plan, release, number, attempt)
            np.testing.assert_array_equal(server.total(), hidden.total())
            attempt += 1
    kinds = [charge["for"] for charge in sites.charges(3)]
    assert kinds == ["training", "training", "accuracy", "training", "accuracy", "histogram"]
    assert Counter(event_of(charge) for charge in sites.charges(3)) == plan.planned_of_client
    spent = epsilon(plan.planned_of_client, plan.delta)
    assert spent <= plan.epsilon


def test_an_owner_who_asks_for_a_report_gets_one_of_masked_rounds(pki, tmp_path):
    sites = Sites(tmp_path, pki, 6, **{"local-report": True})
    server = Server(sites, plan_of(6))
    server.open()
    server.train()
    report = json.loads(sites.state(2, "report.json").read_text())
    assert report["round"] == 1


def test_three_rounds_in_a_row_and_a_round_that_was_given_up(pki, tmp_path, hidden):
    sites, plan = Sites(tmp_path, pki, 6), plan_of(6)
    given_up = Server(sites, plan)
    given_up.open()
    given_up.train()
    for number in (2, 3):
        np.testing.assert_array_equal(Server(sites, plan, number).run(), hidden.total())
    assert [charge["round"] for charge in sites.charges(4)] == [1, 2, 3]
    assert "none of the plan's 3" in sites.refusal(4, "train.open", Server(sites, plan, 4).open_content())
    assert "was opened before" in sites.refusal(4, "train.open", given_up.open_content())


def test_the_noise_has_the_deviation_of_the_plan_and_is_never_the_same(pki, tmp_path, hidden, monkeypatch):
    monkeypatch.setattr(masked_rounds, "train_without_dp", lambda cohort: 1 / 0)  # zeros, and the label 0
    sites, plan, noises = Sites(tmp_path, pki, 6), plan_of(6), []
    for number in (1, 2, 3):
        server = Server(sites, plan, number)
        server.open()
        server.train()
        noises += [vector.view(np.int32).astype(float) for vector in hidden.values()]
    nothing = plan.encode(np.zeros(LAYOUT.size, np.float32), 0, 0)
    entries = np.concatenate([noise - nothing for noise in noises])
    assert len({noise.tobytes() for noise in noises}) == 18
    assert abs(entries.std() / plan.layers.deviation() - 1) < 5 / np.sqrt(2 * len(entries))
    assert abs(np.corrcoef(noises)[np.triu_indices(18, 1)]).max() < 0.6


def test_a_seed_of_the_server_does_not_give_the_noise(pki, tmp_path, hidden):
    """Two federations with equal data and messages, which train alike by the seed."""
    plan, vectors = plan_of(6), []
    for name in ("one", "other"):
        sites = Sites(tmp_path / name, pki, 6)
        server = Server(sites, plan)
        server.open()
        for client in server.cohort:
            sites.ask(client, "train.masked", server.train_content(client, config={"seed": 5}))
        vectors.append({client: vector.copy() for client, vector in hidden.items()})
    apart = [(vectors[0][client] - vectors[1][client]).view(np.int32).std() for client in range(6)]
    assert min(apart) > plan.layers.deviation()


def test_replies_hold_nothing_but_what_the_protocol_needs(pki, tmp_path):
    sites, server = opened(tmp_path, pki)
    reply = sites.ask(2, "train.masked", server.train_content(2))
    assert set(reply) == {"update", REPLY}
    assert set(reply.config_records[REPLY]) == VECTOR_ENTRIES
    assert list(reply.array_records["update"]) == ["masked"]
    masked = reply.array_records["update"]["masked"]
    assert (masked.dtype, masked.shape) == ("uint32", (server.plan.vector_size(LAYOUT.size, 0),))


@pytest.mark.parametrize("failure", ["diverged", "error", "no data"])
def test_what_fails_in_training_is_a_vector_of_zeros_and_no_error(pki, tmp_path, hidden, monkeypatch, failure):
    sites, plan = Sites(tmp_path, pki, 6), plan_of(6)
    server = Server(sites, plan)
    server.open()

    def trained(cohort):
        if failure == "error":
            raise ValueError("a secret")
        update = np.full((1, LAYOUT.size), np.nan, np.float32)
        return np.array([1]), np.array([1]), update

    if failure == "no data":
        (sites.path / "site-0" / "data" / "train.npz").write_bytes(b"damaged")
    else:
        monkeypatch.setattr(masked_rounds, "train_without_dp", trained)
    content = server.train_content(0)
    assert set(sites.ask(0, "train.masked", content)) == {"update", REPLY}
    blocks = (hidden[0].view(np.int32) - plan.encode(np.zeros(LAYOUT.size, np.float32), 0, 0)).astype(float)
    assert abs(blocks[: CLUSTERS * LAYOUT.size]).max() < 6 * plan.layers.deviation()


def test_files_with_secrets_are_private_and_no_backup_has_them(pki, tmp_path):
    sites, server = opened(tmp_path, pki)
    server.train()
    for ending in ("open-round", "masking-key", "box-keys"):
        assert stat.S_IMODE(sites.state(3, ending).stat().st_mode) == 0o600
    copied = back_up(tmp_path / "backup.tar", [sites.state(3, "open-round").parent])
    assert not [name for name in copied if "open-round" in name or "box-keys" in name]
    assert [name for name in copied if name.endswith("masking-key")]


def test_secrets_are_gone_before_the_last_reply_leaves(pki, tmp_path):
    sites, server = opened(tmp_path, pki)
    server.train()
    server.sign()
    kept = sites.state(3, "open-round").read_bytes()
    _, _, rest = kept.partition(b"\n")
    secret = rest[rest.index(b'"seed": "') + 9 :][:62]
    assert len(bytes.fromhex(secret.decode())) == 31
    server.unmask()
    for path in sites.state(3, "open-round").parent.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes(), path
    assert not sites.state(3, "open-round").exists()


def test_stolen_state_folders_open_no_box_of_a_round_that_is_over(pki, tmp_path):
    """Boxes are recorded; afterwards every key that is left in the folders of all clients is tried on them."""
    sites, server = opened(tmp_path, pki)
    before = opened_boxes(sites, server)
    server.train()
    assert (before, opened_boxes(sites, server)) == (6 * 5, 0)
    server.run("train.survivors")
    assert opened_boxes(sites, server) == 0
    again = Server(sites, plan_of(6), 2)
    assert {key.box for key in again.keys.values()} & {key.box for key in server.keys.values()} == set()
    assert again.keys == server.next_keys


def opened_boxes(sites, server):
    """Return the number of boxes that keys in the state folders open."""
    count, round = 0, server.round
    for receiver in range(6):
        folder = sites.state(receiver, "box-keys").parent
        contents = [path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"]
        kept = [bytes.fromhex(text.decode()) for content in contents for text in re.findall(rb'"(\w{64})"', content)]
        keys = {key for key in kept if len(key) == 32} | {
            content[start : start + 32] for content in contents if len(content) <= 64 for start in (0, 32)
        }
        for sender, opening in server.openings.items():
            if sender != receiver:
                direction = f"{sender} to {receiver}".encode()
                count += any(
                    opens(key, server.keys[sender].box, opening.boxes[receiver], round, direction)
                    for key in keys
                    if len(key) == 32
                )
    return count


def opens(key, sender, box, round, direction):
    try:
        agreed = agree(X25519PrivateKey.from_private_bytes(key), sender, b"box", round.digest, direction)
        return bool(unseal(agreed, box, round.digest))
    except SecureError:
        return False


# ---- repeated messages and crashes -----------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends a process at once: no handler of exceptions runs, as after kill -9."""


class Machine:
    """Kills the process at the n-th operation on files, before or after it."""

    OPERATIONS = ((os, "replace"), (os, "fsync"), (Path, "unlink"))

    def __init__(self, monkeypatch, point, before):
        self.left, self.before = point, before
        for owner, name in self.OPERATIONS:
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, operation):
        def counted(*arguments, **options):
            self.left -= 1
            if self.left == 0 and self.before:
                raise Killed
            result = operation(*arguments, **options)
            if self.left == 0 and not self.before:
                raise Killed
            return result

        return counted


#: Operations on files in every step: of the ledger, of a state that is written, of one that is removed.
POINTS = [(step, point) for step, many in zip(STEPS, (8, 12, 4, 6), strict=True) for point in range(1, many + 1)]


def outcome(sites, step, content, client=0):
    """What leaves a client: a reply, or the text of an error; nothing if it is killed."""
    try:
        return as_sent(sites.ask(client, step, content))
    except ClientError as error:
        return str(error)
    except Killed:
        return None


def as_sent(reply):
    return {name: record.object_id for name, record in reply.items()}


class Crashes:
    """A round before a step of client 0, whose files are the same again before each crash.

    Args:
        path: an empty folder.
        pki: certificates, keys and roster.
        step: the type of its message.
        node: further keys of every node configuration.
    """

    def __init__(self, path, pki, step, **node):
        self.sites, self.step = Sites(path / "sites", pki, 6, **node), step
        self.server = Server(self.sites, plan_of(6))
        if step == "train.open":
            self.server.open(self.server.cohort[1:])
        for run in self.server.steps[: STEPS.index(step)]:
            run()
        self.site, self.copy = path / "sites" / "site-0", path / "copy"
        shutil.copytree(self.site, self.copy)

    def message(self):
        return self.server.content(self.step, 0)

    def at(self, monkeypatch, point, before):
        """Kill client 0 at an operation on files, and return the message that it answered."""
        shutil.rmtree(self.site)
        shutil.copytree(self.copy, self.site)
        message = self.message()
        with monkeypatch.context() as patched:
            Machine(patched, point, before)
            assert outcome(self.sites, self.step, message) is None
        return message


killed = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@killed
@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_is_killed_never_gives_two_answers(pki, tmp_path, monkeypatch, step):
    """Killed at every operation on files of every step; then the same message, another one, and the same again."""
    crashes = Crashes(tmp_path, pki, step)
    charged = len(crashes.sites.charges(0)) + (step == "train.masked")

    @for_rows("before", [True, False])
    @for_rows("point", [point for name, point in POINTS if name == step])
    def crash(point, before):
        message = crashes.at(monkeypatch, point, before)
        other = crashes.message()
        other.config_records[CONFIG]["lr"] = 0.5  # another message for the same step
        if step == "train.survivors":
            other = crashes.server.survivors_content(sorted(crashes.server.vectors)[:-1])
        later = [outcome(crashes.sites, step, content) for content in (other, message, message)]
        left = [reply for reply in later if isinstance(reply, dict)]
        assert all("another message" in reply for reply in later if not isinstance(reply, dict))
        assert left  # one of both is answered
        assert all(one == left[0] for one in left)
        assert len(crashes.sites.charges(0)) == charged

    crash()


@killed
@pytest.mark.parametrize("point", sorted({point for _, point in POINTS}))
def test_a_round_goes_on_after_crashes(pki, tmp_path, monkeypatch, hidden, point):
    """Client 0 is killed at this operation on files of every step that has so many."""
    sites = Sites(tmp_path, pki, 6)
    server = Server(sites, plan_of(6))
    for name, run in zip(STEPS, server.steps, strict=True):
        if (name, point) in POINTS:
            with monkeypatch.context() as patched:
                Machine(patched, point, before=point % 2 == 0)
                assert outcome(sites, name, server.content(name, 0)) is None
        run()
    np.testing.assert_array_equal(server.total(), hidden.total())
    assert len(sites.charges(0)) == 1
    assert not sites.state(0, "open-round").exists()


@killed
def test_a_crash_costs_nothing_of_a_client_s_own_budget(pki, tmp_path, monkeypatch):
    """One charge for one vector, and an anchor of it, wherever the crash comes."""
    crashes = Crashes(tmp_path, pki, "train.masked", epsilon=20.0, delta=1e-4)

    @for_rows("before", [True, False])
    @for_rows("point", range(1, 14))
    def crash(point, before):
        message = crashes.at(monkeypatch, point, before)
        assert isinstance(outcome(crashes.sites, "train.masked", message), dict)
        assert [charge["round"] for charge in crashes.sites.charges(0)] == [1]
        last = Anchors(crashes.sites.state(0, "anchors.jsonl")).last()
        assert (last.charges, last.end) == (1, (crashes.site / "data" / ".coterie-budget.jsonl").stat().st_size)

    crash()


@killed
def test_secrets_that_a_crash_has_left_are_removed_with_the_next_message(pki, tmp_path, monkeypatch):
    sites = Sites(tmp_path, pki, 6)
    server = Server(sites, plan_of(6))
    for step in (server.open, server.train, server.sign):
        step()
    with monkeypatch.context() as patched:
        Machine(patched, point=5, before=True)
        assert outcome(sites, "train.unmask", server.unmask_content()) is None
    assert sites.state(0, "open-round").exists()
    assert isinstance(outcome(sites, "train.open", server.open_content()), dict)
    assert not sites.state(0, "open-round").exists()


def test_repeated_messages_get_the_same_reply_at_every_time(pki, tmp_path):
    sites = Sites(tmp_path, pki, 6)
    server = Server(sites, plan_of(6))
    sent = {}
    for name, run in zip(STEPS, server.steps, strict=True):
        sent[name] = server.content(name, 2)
        run()
        for earlier, content in sent.items():
            first = as_sent(sites.ask(2, earlier, content))
            assert as_sent(sites.ask(2, earlier, content)) == first
    assert len(sites.charges(2)) == 1


def test_a_damaged_state_is_named(pki, tmp_path):
    sites, server = opened(tmp_path, pki)
    sites.state(1, "open-round").write_bytes(b"{}")
    assert "client-1.open-round and client-1.rounds away" in sites.refusal(1, "train.masked", server.train_content(1))


def test_the_audit_log_says_what_was_released(pki, tmp_path):
    sites, server = opened(tmp_path, pki, 6, epsilon=20.0, delta=1e-4)
    server.train()
    entries = [(entry["type"], entry["decision"], entry.get("released")) for entry in sites.log(1)]
    assert entries == [("train.open", "answered", None), ("train.masked", "answered", "masked updates")]
    assert 0 < sites.log(1)[-1]["epsilon"] < 20
    assert json.loads(json.dumps(sites.charges(1)))[0]["masked"] == ["run", 1, 0]
