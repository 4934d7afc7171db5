"""Masked sums: exact for every set of clients that drop out, and what a hostile server or client gets from them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from kit.tables import for_rows

from coterie.privacy.secure_aggregation import (
    MaskedRound,
    MaskingClient,
    NoiseLayers,
    SecureError,
    Shares,
    unmasked_sum,
)
from coterie.privacy.secure_aggregation.keys import add_mask

CLIENTS = range(20)
TASK = b"task"
NO_LAYERS = NoiseLayers((20,), ())
SIGNERS = {client: Ed25519PrivateKey.generate() for client in CLIENTS}
KEYS = {client: X25519PrivateKey.generate() for client in CLIENTS}
ROSTER = {client: key.public_key().public_bytes_raw() for client, key in KEYS.items()}


def verify(client, content, signature):
    try:
        SIGNERS[client].public_key().verify(signature, content)
    except InvalidSignature:
        return False
    return True


def round_of(cohort=(1, 3, 4, 7, 9, 12), threshold=4, corrupt=1, size=8, **changed):
    return MaskedRound(b"run", 5, 0, b"plan", tuple(cohort), threshold, corrupt, size, NO_LAYERS, **changed)


def client_of(round, client):
    return MaskingClient(round, client, ROSTER, SIGNERS[client].sign, verify)


def opened(client):
    """Return the opening of a client, by its box key."""
    return client.open(KEYS[client.client])


@dataclass
class Play:
    """One round of honest parties, up to a step."""

    round: MaskedRound
    clients: Mapping[int, MaskingClient]
    openings: dict
    vectors: dict
    masked: dict
    views: dict

    @classmethod
    def of(cls, round, openers=None, survivors=None):
        clients = {client: client_of(round, client) for client in round.cohort}
        openings = {client: opened(clients[client]) for client in openers or round.cohort}
        rng = np.random.default_rng(1)
        vectors = {c: rng.integers(0, 2**32, round.size, dtype=np.uint32) for c in survivors or sorted(openings)}
        views = {client: clients[client].receive(openings, TASK) for client in vectors}
        masked = {client: clients[client].masked(vector) for client, vector in vectors.items()}
        return cls(round, clients, openings, vectors, masked, views)

    def shares(self, signers=None):
        survivors = sorted(self.masked)
        signatures = {client: self.sign(client, survivors) for client in signers or survivors}
        return {client: self.clients[client].unmask(signatures) for client in signatures}

    def sign(self, client, survivors):
        return self.clients[client].sign_survivors(survivors, self.views)

    def total(self, shares):
        return unmasked_sum(self.round, self.openings, self.masked, shares)[0]


def plain_sum(vectors):
    return np.sum(list(vectors.values()), axis=0, dtype=np.uint64).astype(np.uint32)


@for_rows("case", range(200))
def test_the_sum_is_exact_whoever_drops_out(case):
    """Two hundred cohorts, whose clients each agree on keys with all others, take seconds."""
    rng = np.random.default_rng(case)
    n = int(rng.integers(2, 9))
    corrupt = int(rng.integers(0, max(n - 2, 1)))
    threshold = int(rng.integers((n + corrupt) // 2 + 1, n + 1))
    cohort = sorted(rng.permutation(20)[:n].tolist())
    opened = sorted(rng.permutation(cohort)[: rng.integers(threshold, n + 1)].tolist())
    survivors = sorted(rng.permutation(opened)[: rng.integers(threshold, len(opened) + 1)].tolist())
    round = round_of(cohort, threshold, corrupt, int(rng.integers(1, 40)))
    play = Play.of(round, opened, survivors)
    shares = play.shares()
    givers = rng.permutation(survivors)[: rng.integers(threshold, len(survivors) + 1)].tolist()
    np.testing.assert_array_equal(play.total({giver: shares[giver] for giver in givers}), plain_sum(play.vectors))


def test_masked_vectors_are_uniform_and_independent_of_what_they_hide():
    round = round_of(size=40_000)
    play = Play.of(round)
    for client, masked in play.masked.items():
        chi_square = np.bincount(masked >> 24, minlength=256).var() / (40_000 / 256) * 256
        assert 150 < chi_square < 380  # of 255 degrees of freedom; p = 1e-6
        assert abs(np.corrcoef(masked.astype(float), play.vectors[client].astype(float))[0, 1]) < 0.03


def test_a_sum_less_one_share_or_one_mask_is_noise():
    play = Play.of(round_of(), survivors=[1, 3, 4, 7, 9])
    shares = play.shares()
    few = {client: shares[client] for client in list(shares)[:3]}
    with pytest.raises(SecureError, match="at least 4"):
        play.total(few)
    half = np.sum([vector.astype(np.uint64) for vector in play.masked.values()], axis=0).astype(np.uint32)
    assert (half != plain_sum(play.vectors)).mean() > 0.9


@pytest.mark.parametrize("kind", ["seeds", "keys"])
def test_a_client_that_sends_wrong_shares_is_noticed(kind):
    play = Play.of(round_of(), survivors=[1, 3, 4, 7, 9])
    shares = play.shares()
    wrong = dict.fromkeys(getattr(shares[3], kind), (12345).to_bytes(32, "big"))
    with pytest.raises(SecureError, match="shares"):
        play.total({**shares, 3: replace(shares[3], **{kind: wrong})})


@for_rows("share", [b"", bytes(31), b"\xff" * 32, bytes(33)])
def test_malformed_shares_are_refused(share):
    play = Play.of(round_of())
    shares = play.shares()
    with pytest.raises(SecureError):
        play.total({**shares, 1: Shares(dict.fromkeys(shares[1].seeds, share), {})})


def test_a_client_gives_a_seed_or_a_key_never_both():
    play = Play.of(round_of(), survivors=[1, 3, 4, 7, 9])
    for given in play.shares().values():
        assert sorted(given.seeds) == [1, 3, 4, 7, 9]
        assert list(given.keys) == [12]


@for_rows(("t", "c"), [(3, 0), (3, 1), (4, 2), (0, 0), (7, 1), (4, -1), (2, 3)])
def test_thresholds_that_allow_two_lists_of_survivors_are_refused(t, c):
    with pytest.raises(SecureError, match="2t > n"):
        round_of(threshold=t, corrupt=c)


@for_rows("size", [0, -1, 2**23 + 1, 2**62])
def test_vectors_of_an_impossible_size_are_refused_before_they_are_allocated(size):
    with pytest.raises(SecureError, match="from 1 to"):
        round_of(size=size)


@pytest.mark.parametrize("cohort", [(), (1, 1, 2, 3), (3, 2, 1)])
def test_a_cohort_that_is_no_increasing_list_is_refused(cohort):
    with pytest.raises(SecureError):
        round_of(cohort, 2, 0)


def test_clients_outside_the_roster_are_refused():
    with pytest.raises(SecureError, match="box key"):
        client_of(round_of((1, 2, 99), 2, 0), 1)
    with pytest.raises(SecureError, match="this client"):
        client_of(round_of((1, 2, 3), 2, 0), 5)


def hostile_openings(play):
    """What a server may hand out instead of the openings, for client 1."""
    openings = play.openings
    other_key = X25519PrivateKey.generate().public_key().public_bytes_raw()
    boxes = dict(openings[4].boxes)
    yield "another public key", {**openings, 4: replace(openings[4], public=other_key)}
    yield "another commitment", {**openings, 4: replace(openings[4], commitment=bytes(32))}
    yield "no signature", {**openings, 4: replace(openings[4], signature=b"")}
    yield "the opening of another client", {**openings, 4: openings[7]}
    yield "an own opening of its own", {**openings, 1: replace(openings[1], public=other_key)}
    yield "without the client", {client: one for client, one in openings.items() if client != 1}
    yield "too few", {client: openings[client] for client in (1, 3, 4)}
    yield "an unknown client", {**openings, 2: openings[4]}
    yield "no box", {**openings, 4: replace(openings[4], boxes={})}
    yield "a box for another client", {**openings, 4: replace(openings[4], boxes={1: boxes[3]})}
    yield "a changed box", {**openings, 4: replace(openings[4], boxes={1: boxes[1][:-1] + bytes([boxes[1][-1] ^ 1])})}
    again = opened(client_of(replace(play.round, attempt=1), 4))
    yield "an opening of another attempt", {**openings, 4: again}


HOSTILE = [name for name, _ in hostile_openings(Play.of(round_of()))]


@for_rows("name", HOSTILE)
def test_a_hostile_server_s_openings_are_refused_before_a_vector_leaves(name):
    round = round_of()
    clients = {client: client_of(round, client) for client in round.cohort}
    openings = {client: opened(clients[client]) for client in round.cohort}
    play = Play(round, clients, openings, {}, {}, {})
    content = dict(hostile_openings(play))[name]
    with pytest.raises(SecureError):
        clients[1].receive(content, TASK)
    with pytest.raises(SecureError, match="not the next one"):  # and no second chance
        clients[1].receive(openings, TASK)


@for_rows("survivors", [[1, 3, 4], [1, 3, 4, 4], [4, 3, 1, 7], [1, 3, 4, 5], [3, 4, 7, 9], [1, 3, 4, 7, 9, 12, 13], []])
def test_lists_of_survivors_that_are_not_signed(survivors):
    play = Play.of(round_of())
    with pytest.raises(SecureError):
        play.sign(1, survivors)


def test_a_second_list_of_survivors_is_not_signed():
    play = Play.of(round_of())
    play.sign(1, [1, 3, 4, 7])
    with pytest.raises(SecureError, match="not the next one"):
        play.sign(1, [1, 3, 4, 9])


def test_two_lists_never_both_get_enough_signatures():
    """The server splits the cohort, with one corrupt client that signs everything."""
    play = Play.of(round_of())
    first, second = [1, 3, 4, 7, 9], [1, 3, 4, 7, 12]
    signed = {1: [first, second]} | {client: [first] for client in (3, 4, 7, 9)} | {12: [second]}
    signatures = {client: play.sign(client, lists[0]) for client, lists in signed.items()}
    forged = client_of(play.round, 1)
    forged.restore(play.clients[1].to_bytes())
    forged._state.step = 2
    for_second = {1: forged.sign_survivors(second, play.views), 12: signatures[12]}
    assert play.clients[3].unmask(signatures).keys.keys() == {12}
    with pytest.raises(SecureError, match="2 of 4 required"):
        play.clients[12].unmask(for_second)


@pytest.mark.parametrize("few", [0, 1, 3])
def test_shares_need_enough_signatures(few):
    play = Play.of(round_of())
    survivors = sorted(play.masked)
    signatures = {client: play.sign(client, survivors) for client in survivors}
    with pytest.raises(SecureError, match="required clients signed"):
        play.clients[1].unmask({client: signatures[client] for client in survivors[:few]})
    with pytest.raises(SecureError, match="not the next one"):
        play.clients[1].unmask(signatures)


def test_signatures_of_another_round_do_not_count():
    play, other = Play.of(round_of()), Play.of(replace(round_of(), number=6))
    survivors = sorted(play.masked)
    signatures = {client: other.sign(client, survivors) for client in survivors}
    play.sign(1, survivors)
    with pytest.raises(SecureError, match="0 of 4"):
        play.clients[1].unmask(signatures)


def test_secrets_are_forgotten_once_they_are_shared():
    play = Play.of(round_of())
    play.shares()
    for client in play.clients.values():
        assert (client._state.seed, client._state.key_seed, client._state.held) == (b"", b"", {})


def test_secrets_are_not_printed():
    play = Play.of(round_of())
    for client in play.clients.values():
        kept = json.loads(client.to_bytes())
        shown = repr(client) + repr(client._state)
        for secret in (kept["seed"], kept["key_seed"], *kept["held"]["1"]):
            assert len(secret) >= 62
            assert secret not in shown
            assert repr(bytes.fromhex(secret)) not in shown


@pytest.mark.parametrize("dropped", [(), (12,), (9, 12)])
def test_a_client_that_is_restored_before_every_step_gives_the_same_sum(dropped):
    round = round_of()
    clients = {client: client_of(round, client) for client in round.cohort}
    openings = {client: opened(one) for client, one in clients.items()}
    rng = np.random.default_rng(2)
    vectors = {c: rng.integers(0, 2**32, 8, dtype=np.uint32) for c in round.cohort if c not in dropped}

    def restored(client):
        again = client_of(round, client)
        again.restore(clients[client].to_bytes())
        clients[client] = again
        return again

    views, masked = {}, {}
    for client, vector in vectors.items():
        views[client] = restored(client).receive(openings, TASK)
        masked[client] = clients[client].masked(vector)
    signatures = {client: restored(client).sign_survivors(sorted(masked), views) for client in masked}
    shares = {client: restored(client).unmask(signatures) for client in masked}
    np.testing.assert_array_equal(unmasked_sum(round, openings, masked, shares)[0], plain_sum(vectors))


@for_rows(
    "change", [{"round": "00"}, {"client": 3}, {"seed": "x"}, {"held": [1]}, {"step": None}, {"held": {"1": ["00"]}}]
)
def test_a_damaged_state_is_refused(change):
    one = client_of(round_of(), 1)
    opened(one)
    content = json.dumps({**json.loads(one.to_bytes()), **change}).encode()
    with pytest.raises(SecureError, match="state"):
        client_of(round_of(), 1).restore(content)


def test_seeds_and_keys_are_new_at_every_opening_even_of_one_round():
    openings = [opened(client_of(round_of(), 3)) for _ in range(2)]
    assert openings[0].public != openings[1].public
    assert openings[0].commitment != openings[1].commitment


def test_signatures_of_a_round_that_was_opened_twice_do_not_count():
    """A server that restores a client's state from an older copy, or names one round twice, gets two openings."""
    first, second = Play.of(round_of()), Play.of(round_of())
    survivors = sorted(first.masked)
    signatures = {client: second.sign(client, survivors) for client in survivors}
    first.sign(1, survivors)
    with pytest.raises(SecureError, match="0 of 4"):
        first.clients[1].unmask(signatures)


@for_rows("key", [bytes(32), b"\x01" + bytes(31), b"", bytes(31)])
def test_public_keys_of_small_order_or_another_length_are_refused(key):
    round = round_of((1, 2, 3), 2, 0)
    hostile = MaskingClient(round, 1, {**ROSTER, 2: key}, SIGNERS[1].sign, verify)
    with pytest.raises(SecureError, match="small order"):
        opened(hostile)


@for_rows("changed", [{"run": b"2"}, {"number": 6}, {"attempt": 1}, {"plan": b"p"}, {"corrupt": 0}, {"size": 9}])
def test_every_part_of_a_round_is_in_its_digest(changed):
    assert round_of().digest != replace(round_of(), **changed).digest


def test_digests_do_not_confuse_neighbouring_fields():
    one, other = (
        MaskedRound(run, 1, 1, plan, (1, 2), 2, 0, 3, NO_LAYERS) for run, plan in ((b"ab", b"c"), (b"a", b"bc"))
    )
    assert one.digest != other.digest


@pytest.mark.parametrize("vector", [np.zeros(7, np.uint32), np.zeros(8, np.int64), np.zeros((8, 1), np.uint32)])
def test_vectors_of_another_shape_or_type_are_refused(vector):
    play = Play.of(round_of(), survivors=[1, 3, 4, 7])
    play.clients[9].receive(play.openings, TASK)
    with pytest.raises(SecureError, match="8 integers"):
        play.clients[9].masked(vector)


def test_streams_of_different_keys_differ_in_every_part():
    one, other = np.zeros((2, 10_000), np.uint32)
    add_mask(one, bytes(32))
    add_mask(other, b"\x01" + bytes(31))
    assert (one == other).sum() <= 2
    assert len(np.unique(one)) > 9_990
