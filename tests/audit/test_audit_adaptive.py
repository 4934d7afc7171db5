"""The audit of adaptive servers holds for the shipped ledger, and finds a ledger without a filter."""

import pytest

from coterie.audit.adaptive import FIRST_REQUESTS, Budget, audit_adaptive_servers, worst_strategy
from coterie.privacy import Streams
from coterie.privacy.accounting import epsilon
from coterie.privacy.filter import Filter


@pytest.mark.slow
def test_what_is_shipped_holds_and_the_control_is_broken():
    findings = audit_adaptive_servers(Streams(0), 2)
    assert [(f.violated, f.control) for f in findings] == [(False, False), (False, False), (True, True)]
    assert not any(f.failed for f in findings)


@pytest.mark.slow
def test_a_ledger_that_sums_losses_is_found(monkeypatch):
    monkeypatch.setattr(Filter, "accepts", lambda self, events: epsilon(events, self.delta) <= self.epsilon)
    assert worst_strategy(Budget(2.0, 1e-5), [FIRST_REQUESTS[1]]) > 1.5e-5
