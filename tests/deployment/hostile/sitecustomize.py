"""A client's machine on which somebody else's code answers: every round another kind of bad reply.

Python imports this at start; it changes what Flower's ClientApp of client 2 replies to a question for an update.
"""

from pathlib import Path

import numpy as np

KINDS = ("shape", "nan", "huge", "label", "large", "replay", "twice")


def spoiled(content, kind, kept):
    from flwr.app import Array, ArrayRecord

    arrays = {name: np.array(array.numpy()) for name, array in content["update"].items()}
    if kind == "shape":
        arrays = {name: values[..., :1] for name, values in arrays.items()}
    elif kind == "nan":
        arrays = {name: np.full_like(values, np.nan) for name, values in arrays.items()}
    elif kind == "huge":
        arrays = {name: np.full_like(values, 1e30) for name, values in arrays.items()}
    elif kind == "label":
        content["reply"]["label"] = 99
    elif kind == "large":
        arrays["more"] = np.zeros(500 * 2**18, np.float32)  # 500 MB
    elif kind == "replay":
        return kept
    content["update"] = ArrayRecord({name: Array(values) for name, values in arrays.items()})
    return content


def install():
    import pickle

    from flwr.clientapp import ClientApp
    from flwr.supernode.runtime import run_clientapp

    honest, push = ClientApp.__call__, run_clientapp.push_message
    first = Path("/state/first.pickle")

    def twice(*given):
        push(*given)
        try:
            push(*given)
            Path("/state/twice").write_text("sent")
        except Exception as error:
            Path("/state/twice").write_text(f"refused: {error}")

    def call(self, message, context):
        reply = honest(self, message, context)
        if message.metadata.message_type != "train":
            return reply
        number = int(message.content["config"]["round"])
        if number == 1:
            first.write_bytes(pickle.dumps(reply.content))
        elif KINDS[number - 2] == "twice":
            run_clientapp.push_message = twice
        else:
            kept = pickle.loads(first.read_bytes())
            reply.content = spoiled(reply.content, KINDS[number - 2], kept)
        return reply

    ClientApp.__call__ = call


if b"fork_server" in Path("/proc/self/cmdline").read_bytes():  # the ClientApps are its forks
    install()
