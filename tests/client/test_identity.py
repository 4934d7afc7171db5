"""A node that registers: what it replies, and what its process imports for it."""

import subprocess
import sys

REGISTER = """
import sys
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
from coterie.client.app import app
node = {"client-id": 3, "state-dir": "/state", "data": "/data", "epsilon": 1.0, "delta": 1e-5, **%r}
message = Message(RecordDict(), dst_node_id=7, message_type="query.identity")
reply = app(message, Context(1, 7, node, RecordDict(), {}))
told = dict(reply.content["reply"])
assert told.pop("versions").startswith("coterie ")
print(told, sorted({"torch", "scipy", "dp_accounting", "opacus"} & set(sys.modules)))
"""


def registered(**node):
    done = subprocess.run([sys.executable, "-c", REGISTER % node], capture_output=True, text=True, timeout=60)
    return done.stdout.strip(), done.stderr


def test_a_node_registers_without_importing_pytorch():
    reply, error = registered(**{"input-shape": "1x4x4", "num-classes": 2})
    assert reply == "{'client-id': 3, 'repeats': True, 'evaluates': False} []", error
    reply, error = registered(**{"input-shape": "1x4x4", "num-classes": 2, "diagnostics": True})
    assert reply == "{'client-id': 3, 'repeats': True, 'evaluates': True} []", error


def test_a_node_whose_configuration_contradicts_itself_does_not_register():
    reply, error = registered()
    assert (reply, "epsilon requires input-shape and num-classes" in error) == ("", True)
