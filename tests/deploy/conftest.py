from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest


@pytest.fixture
def clock(monkeypatch):
    """``with clock(days)``: certificates are made, or what else a module does, as if it were so long from now."""

    @contextmanager
    def shifted(days=0, module="coterie.deploy.certificates", **later):
        class Then(datetime):
            @classmethod
            def now(cls, zone=None):
                return datetime.now(zone) + timedelta(days, **later)

        with monkeypatch.context() as patched:
            patched.setattr(f"{module}.datetime", Then)
            yield

    return shifted
