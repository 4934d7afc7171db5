import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def identity(monkeypatch):
    """The process creates messages as a ServerApp does."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
