"""The audit of views finds clients that give shares for another view, and masks that do not hide a vector."""

import numpy as np
import pytest

from coterie.audit import views
from coterie.audit.views import SERVERS, Play, audit_views, hides, is_in_the_middle, shows_any_views
from coterie.privacy import Streams
from coterie.privacy.secure_aggregation import MaskingClient, Shares

ONE = (hides, is_in_the_middle)


def test_directed_servers_are_broken_with_the_control_alone():
    findings = audit_views(Streams(0), 20)
    assert [f.bound for f in findings if not f.control] == [0.0] * 6
    assert [f.bound for f in findings if f.control][1:] == [1.0, 1.0]


@pytest.mark.slow
def test_every_claim_holds_and_every_control_is_broken():
    """Of 120 random servers, about seven break the control: none does with a probability below 0.1 %."""
    findings = audit_views(Streams(0), 120)
    assert [f.failed for f in findings] == [False] * 9
    assert [f.control for f in findings] == [False, False, True] * len(SERVERS)
    assert [f.bound for f in findings if f.control][1:] == [6.0, 6.0]  # a directed server always breaks it


def play(server, seed=0, clients=6, threshold=4, corrupt=1, checks=views._ALL):
    return server(Play(clients, threshold, corrupt, np.random.default_rng(seed), checks))


def test_clients_that_give_both_secrets_of_a_client_are_found(monkeypatch):
    """Shares of all seeds and of all keys: the vectors of single clients come out."""

    def unmask(client, signatures):
        held = client._state.held
        return Shares({j: pair[0] for j, pair in held.items()}, {j: pair[1] for j, pair in held.items()})

    assert not any(play(shows_any_views, seed) for seed in range(10))
    monkeypatch.setattr(MaskingClient, "unmask", unmask)
    assert any(play(shows_any_views, seed) for seed in range(10))


@pytest.mark.parametrize("server", ONE)
def test_the_others_protect_a_client_that_checks_nothing(server):
    """They sign no list with it, because it has not signed their view."""
    assert play(server) == []
    assert play(server, checks=views._VIEWS_ALONE) == []
    assert play(server, checks=views._NONE) == [(0,)]
