"""Flower apps with the name and the modules of Coterie."""

import warnings

# The ClientApp leaves a trace as soon as its code runs.
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "coterie"
version = "0.1.0"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "coterie"
[tool.flwr.app.components]
serverapp = "server:app"
clientapp = "coterie.client.app:app"
[tool.flwr.app.config]
out = ""
"""
SERVER = """
import json, time
from pathlib import Path
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < 3:
        time.sleep(0.2)
    questions = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.QUERY) for node in nodes]
    replies = {r.metadata.src_node_id: r for r in grid.send_and_receive(questions, timeout=60)}
    told = {str(n): r.error.reason if r.has_error() else r.content["who"]["client"] for n, r in replies.items()}
    Path(context.run_config["out"]).write_text(json.dumps(told))
"""
CLIENT = """
import sys
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def answer(message, context):
    command = Path("/proc/self/cmdline").read_text()
    Path(context.node_config["trace"]).write_text(f"{sys.modules['coterie'].__file__} {command}")
    who = ConfigRecord({"client": context.node_config["client-id"]})
    return Message(RecordDict({"who": who}), reply_to=message)
"""


def app_folder(path, more=""):
    (path / "coterie" / "client").mkdir(parents=True)
    files = {"pyproject.toml": PYPROJECT, "server.py": SERVER, "coterie/client/app.py": CLIENT + more}
    files |= {"coterie/__init__.py": "", "coterie/client/__init__.py": ""}
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def fab_of(folder):
    from flwr.cli.build import build_fab_from_disk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return build_fab_from_disk(folder)
