from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest

from coterie.deploy import certificates


@pytest.fixture
def clock(monkeypatch):
    """``with clock(days)``: certificates are made as if it were so many days from now."""

    @contextmanager
    def shifted(days):
        class Then(datetime):
            @classmethod
            def now(cls, zone=None):
                return datetime.now(zone) + timedelta(days=days)

        with monkeypatch.context() as patched:
            patched.setattr(certificates, "datetime", Then)
            yield

    return shifted
