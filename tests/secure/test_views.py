"""A model checker of masked rounds: no server that shows its clients different views learns a sum over a few of them.

A server chooses for every client a plan, the openings U1, the models, and the survivors U2. The model follows the rules
of a client (secure_aggregation/masking.py), with masks as symbols: a mask is known to the server, shared by two
vectors, or hides a vector for ever. A set of vectors whose sum has no unknown mask is exposed. It must have at least
as many honest clients as the noise that they keep is sized for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from random import Random

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from kit.tables import for_rows
from kit.tiers import mark_slow

from coterie.privacy.secure_aggregation import MaskedRound, MaskingClient, NoiseLayers, SecureError
from coterie.privacy.secure_aggregation.keys import is_signed


@dataclass(frozen=True)
class Rules:
    """Rules of a cohort.

    Attributes:
        clients: n; the last c are corrupt.
        threshold: t.
        corrupt: c.
        reach: Largest distance of two clients with a mask on a ring; None: every two have one.
        same_view: Whether a client signs survivors only if they have its view.
    """

    clients: int
    threshold: int
    corrupt: int
    reach: int | None = None
    same_view: bool = True

    @property
    def honest(self) -> range:
        return range(self.clients - self.corrupt)

    @property
    def needed_shares(self) -> int:
        return self.threshold if self.reach is None else max(self.corrupt + 1, self.reach // 2)

    def are_neighbours(self, i: int, j: int) -> bool:
        distance = abs(i - j)
        return i != j and (self.reach is None or min(distance, self.clients - distance) <= self.reach)

    def are_connected(self, survivors: frozenset[int]) -> bool:
        """Line 2 of the ring of J. Bell et al. (CCS 2020), as earlier versions of this package had it."""
        if self.reach is None:
            return True
        order = sorted(survivors)
        following = [*order, *(place + self.clients for place in order)]
        return all(following[i + self.corrupt + 1] - place <= self.reach for i, place in enumerate(order))


@dataclass(frozen=True)
class View:
    """What a server shows one client.

    Attributes:
        plan: Number of the plan, the keys and the round of step 1.
        opened: U1.
        task: Number of the models and settings of step 2.
        survivors: U2; None: the client is not asked.
    """

    plan: int
    opened: frozenset[int]
    task: int = 0
    survivors: frozenset[int] | None = None

    @property
    def signed(self) -> tuple[object, ...]:
        return self.plan, self.opened, self.task


@dataclass(frozen=True)
class Play:
    """A round in which honest clients answer a server by the rules.

    Attributes:
        rules: Rules of the cohort.
        views: View of every honest client.
    """

    rules: Rules
    views: tuple[View, ...]

    @cached_property
    def senders(self) -> set[int]:
        """Honest clients that send a vector: openings of other plans are not signed for theirs."""
        return {i for i in self.rules.honest if self._sends(i)}

    def _sends(self, i: int) -> bool:
        view = self.views[i]
        same_plan = all(self.views[j].plan == view.plan for j in view.opened if j in self.rules.honest)
        return i in view.opened and len(view.opened) >= self.rules.threshold and same_plan

    @cached_property
    def signers(self) -> set[int]:
        """Honest clients that sign their survivors."""
        return {i for i in self.senders if self._signs(i)}

    def _signs(self, i: int) -> bool:
        view, rules = self.views[i], self.rules
        if view.survivors is None or i not in view.survivors or not view.survivors <= view.opened:
            return False
        if len(view.survivors) < rules.threshold or not rules.are_connected(view.survivors):
            return False
        honest = [j for j in view.survivors if j in rules.honest]
        return not rules.same_view or all(j in self.senders and self.views[j].signed == view.signed for j in honest)

    @cached_property
    def givers(self) -> set[int]:
        """Honest clients that give shares: t clients signed their list; corrupt ones sign everything."""
        return {i for i in self.signers if self._signatures(i) >= self.rules.threshold}

    def _signatures(self, i: int) -> int:
        listed, view = self.views[i].survivors or frozenset(), self.views[i]
        fields = (view.plan, view.opened, view.task if self.rules.same_view else 0, listed)

        def signs_the_same(j: int) -> bool:
            other = self.views[j]
            task = other.task if self.rules.same_view else 0
            return j in self.signers and (other.plan, other.opened, task, other.survivors) == fields

        return sum(j not in self.rules.honest or signs_the_same(j) for j in listed)

    @cached_property
    def known(self) -> tuple[set[int], set[int]]:
        """Clients whose seed b_i, and whose key s_i, the server knows."""
        seeds, keys = set(), set()
        for i in self.rules.honest:
            holders = [j for j in range(self.rules.clients) if j == i or self.rules.are_neighbours(i, j)]
            corrupt = sum(j not in self.rules.honest for j in holders)
            givers = [self.views[j] for j in holders if j in self.givers and i in self.views[j].opened]
            listed = [i in (view.survivors or ()) for view in givers]
            if corrupt + sum(listed) >= self.rules.needed_shares:
                seeds.add(i)
            if corrupt + len(listed) - sum(listed) >= self.rules.needed_shares:
                keys.add(i)
        return seeds, keys

    def exposed(self) -> list[set[int]]:
        """Return the sets of honest clients over which the server learns a sum."""
        seeds, keys = self.known
        unknown = {
            i: {j for j in self.views[i].opened if j in self.rules.honest and self.rules.are_neighbours(i, j)} - keys
            for i in self.senders
        }
        for i in keys & unknown.keys():
            unknown[i] = set()
        sets, rest = [], set(self.senders)
        while rest:
            component, hidden, frontier = set(), False, {rest.pop()}
            while frontier:
                i = frontier.pop()
                component.add(i)
                partners = {j for j in unknown[i] if j in unknown and i in unknown[j]}
                hidden |= i not in seeds or partners != unknown[i]
                frontier |= partners - component
            rest -= component
            if not hidden:
                sets.append(component)
        return sets

    def breaks(self) -> bool:
        """Return whether a sum has less noise than that of the guarantee."""
        for exposed in self.exposed():
            lists = [len(self.views[i].survivors or ()) for i in exposed & self.givers]
            if len(exposed) < max(lists, default=self.rules.threshold) - self.rules.corrupt:
                return True
        return False


# ---- servers ---------------------------------------------------------------------------------------------------------


def cohort_of(rng: Random, reach: int | None = None, same_view: bool = True) -> Rules:
    n, corrupt = rng.randrange(4, 10), rng.randrange(3)
    return Rules(n, rng.randrange((n + corrupt) // 2 + 1, n + 1), corrupt, reach, same_view)


def random_server(rng: Random, rules: Rules) -> Play:
    """A server that shows most clients one view, and some of them another one: of its choice, or at random."""
    n, t = rules.clients, rules.threshold
    everybody = frozenset(range(n))

    def subset(of: frozenset[int], least: int) -> frozenset[int]:
        return frozenset(rng.sample(sorted(of), rng.randint(min(least, len(of)), len(of))))

    changes = (
        lambda i, view: {"plan": rng.randrange(2)},
        lambda i, view: {"opened": subset(everybody, t) | {i}},
        lambda i, view: {"opened": frozenset(j for j in everybody if not rules.are_neighbours(i, j))},
        lambda i, view: {"task": rng.randrange(2)},
        lambda i, view: {"survivors": subset(view.opened, t) | {i}},
        lambda i, view: {"survivors": None},
    )
    opened = everybody if rng.random() < 0.6 else subset(everybody, t)
    survivors = opened if rng.random() < 0.5 else subset(opened, t)
    views = []
    for i in rules.honest:
        view = View(0, opened, 0, survivors)
        while rng.random() < 0.4:
            view = replace(view, **rng.choice(changes)(i, view))
        views.append(view)
    return Play(rules, tuple(views))


def every_server(rules: Rules) -> Iterator[Play]:
    """All servers for one plan, but for the names of honest clients.

    Shares leave a group of at least t - c honest clients with one view and one list, so the others are fewer than t;
    which honest clients form the group does not matter.
    """
    clients, t, honest = range(rules.clients), rules.threshold, len(rules.honest)

    def sets(of: frozenset[int]) -> list[frozenset[int]]:
        return [frozenset(some) for size in range(t, len(of) + 1) for some in combinations(sorted(of), size)]

    views = [View(0, opened, 0, survivors) for opened in sets(frozenset(clients)) for survivors in sets(opened)]
    for size in range(max(t - rules.corrupt, 1), honest + 1):
        group = frozenset(range(size))
        of_others = [
            [View(0, frozenset())]
            + [view for view in views if i in view.survivors]
            + [View(0, opened) for opened in sets(frozenset(clients)) if i in opened]
            for i in range(size, honest)
        ]
        for view in views:
            if group <= view.survivors:
                for others in product(*of_others):
                    yield Play(rules, (view,) * size + others)


LONG = {(100_000, True)}


@pytest.mark.parametrize(("servers", "same_view"), mark_slow([(2000, True), (2000, False), (100_000, True)], LONG))
def test_no_server_of_a_complete_graph_learns_a_small_sum(servers, same_view):
    rng, honest = Random(1), 0
    for _ in range(servers):
        play = random_server(rng, cohort_of(rng, same_view=same_view))
        assert not play.breaks(), play
        honest += bool(play.exposed())
    assert honest > servers // 20  # the sums of honest rounds


def test_servers_of_a_ring_learn_small_sums_unless_shares_require_the_same_view():
    broken = {}
    for same_view in (False, True):
        rng = Random(2)
        plays = [random_server(rng, cohort_of(rng, reach=1, same_view=same_view)) for _ in range(2000)]
        broken[same_view] = sum(play.breaks() for play in plays)
    assert broken[True] == 0 < broken[False]


SMALL = [Rules(n, t, c) for n in range(3, 7) for c in range(2) for t in range(2, n + 1) if 2 * t > n + c and c < t]


@pytest.mark.parametrize("rules", mark_slow(SMALL, {rules for rules in SMALL if rules.clients == 6}))
def test_no_server_of_a_small_complete_graph_learns_a_small_sum(rules):
    for same_view in (True, False):
        for play in every_server(replace(rules, same_view=same_view)):
            assert not play.breaks(), play


def test_a_server_of_a_small_ring_learns_the_vector_of_one_client():
    """It hides both neighbours of client 0 from it, and shows all openings to the others."""
    rules = Rules(6, 4, 0, reach=1, same_view=False)
    everybody = frozenset(range(6))
    others = (View(0, everybody, 0, everybody),) * 5
    victim = View(0, everybody - {1, 5})
    assert Play(rules, (victim, *others)).exposed() == [{0}]
    assert Play(replace(rules, same_view=True), (victim, *others)).exposed() == []
    assert Play(replace(rules, reach=None), (victim, *others)).exposed() == []


# ---- the model and the code ------------------------------------------------------------------------------------------


def real_round(play: Play) -> tuple[set[int], set[int], dict[int, tuple[set[int], set[int]]]]:
    """Play a round with :class:`MaskingClient`; return who sends, who signs, and the shares that clients give."""
    rules, cohort = play.rules, tuple(range(play.rules.clients))
    signers = {i: Ed25519PrivateKey.generate() for i in cohort}
    boxes = {i: X25519PrivateKey.generate() for i in cohort}
    publics = {i: key.public_key().public_bytes_raw() for i, key in boxes.items()}

    def verify(client, content, signature):
        return is_signed(signers[client].public_key().public_bytes_raw(), content, signature)

    def client_of(i, plan):
        facts = (b"run", 1, 0, b"plan %d" % plan, cohort, rules.threshold, rules.corrupt, 1)
        return MaskingClient(MaskedRound(*facts, NoiseLayers((9,), ())), i, publics, signers[i].sign, verify)

    plans = {i: play.views[i].plan for i in rules.honest}
    clients = {i: client_of(i, plan) for i, plan in plans.items()}
    openings = {i: client.open(boxes[i]) for i, client in clients.items()}
    corrupt = {(i, plan): client_of(i, plan) for i in cohort if i not in rules.honest for plan in range(2)}
    corrupt_openings = {key: client.open(boxes[key[0]]) for key, client in corrupt.items()}
    sends, signs, shares, views, lists = set(), set(), {}, {}, {}
    for i, client in clients.items():
        view = play.views[i]
        shown = {j: openings[j] if j in openings else corrupt_openings[j, view.plan] for j in view.opened}
        try:
            views[i] = client.receive(shown, b"task %d" % view.task)
            client.masked(np.zeros(1, np.uint32))
            sends.add(i)
        except SecureError:
            continue
    for i in sends & {i for i in clients if play.views[i].survivors is not None}:
        view, client = play.views[i], clients[i]
        of_corrupt = {j: signers[j].sign(client.round.view_content(j, client._state.view)) for j, _ in corrupt}
        try:
            lists[i] = client.sign_survivors(sorted(view.survivors), {**views, **of_corrupt})
            signs.add(i)
        except SecureError:
            continue
    for i in signs:
        client = clients[i]
        content = client.round.survivors_content(client._state.view, client._state.signed)
        of_corrupt = {j: signers[j].sign(content) for j, _ in corrupt}
        try:
            given = client.unmask({**lists, **of_corrupt})
            shares[i] = set(given.seeds), set(given.keys)
        except SecureError:
            continue
    return sends, signs, shares


@for_rows("case", range(60))
def test_the_model_follows_the_rules_of_the_code(case):
    rng = Random(case)
    play = random_server(rng, cohort_of(rng))
    givers = {i: play.views[i] for i in play.givers}
    shares = {i: (set(view.survivors), set(view.opened - view.survivors)) for i, view in givers.items()}
    assert real_round(play) == (play.senders, play.signers, shares)
