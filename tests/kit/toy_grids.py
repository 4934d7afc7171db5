"""Grids whose replies are worked out by hand or changed on their way, and a recorder that keeps a run in memory."""

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

from coterie.engine.in_process import LocalGrid
from coterie.privacy import Streams
from coterie.rounds.recorder import Recorder
from coterie.wire.messages import TRAIN, pack_reply


def reply_to(message, update, layout):
    """The valid reply of an honest client, with the cluster that the server assigned, or 0."""
    client, config = message.metadata.dst_node_id - 1, message.content["config"]
    label = config.get("cluster", 0)
    fields = {"client_id": client, "round": config["round"], "label": label, "redrawn_label": label}
    return Message(pack_reply(np.asarray(update, np.float32), layout, **fields), reply_to=message)


def quiet(**options):
    """Options of a seeded strategy that waits for nobody and evaluates nothing, beside those given."""
    return {"streams": Streams(0), "evaluate_every": 0, "registration_timeout": 0.0} | options


class Answering(LocalGrid):
    """Clients that say who they are; ``answers(client, message)`` gives the contents of all other replies."""

    def _answers(self, questions):
        for message in questions:
            client = message.metadata.dst_node_id - 1
            introduces = message.metadata.message_type == "query.identity"
            said = RecordDict({"reply": ConfigRecord({"client-id": client})})
            for content in [said] if introduces else self.answers(client, message):
                yield Message(content, reply_to=message)


def changing(grid, change):
    """The grid, with a function that changes its replies on their way."""
    answers = grid._answers

    def changed(questions):
        for reply in answers(questions):
            change(reply)
            yield reply

    grid._answers = changed
    return grid


class Tampered(LocalGrid):
    """Passes the training replies through ``change``, a function of them and of the number of the exchange."""

    def __init__(self, clients, change):
        super().__init__(clients)
        self.change = change
        self.exchanges = 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        if not messages or messages[0].metadata.message_type != TRAIN:
            return replies
        self.exchanges += 1
        return self.change(replies, self.exchanges)


def lying(clients, change):
    """A grid in which ``change`` changes the content of the replies of client 0."""

    def changed(replies, exchange):
        for reply in replies:
            if reply.has_content() and reply.content["reply"]["client-id"] == 0:
                change(reply.content)
        return replies

    return Tampered(clients, changed)


class Simulated(LocalGrid, InMemoryGrid):
    """A grid of Flower's simulations, as far as the ServerApp can tell."""

    get_nodes = Grid.get_nodes


class Kept(Recorder):
    """Keeps checkpoints, lines of metrics and evidence; fails instead of writing the checkpoint of round ``crash``."""

    def __init__(self, crash=0):
        self.crash, self.states, self.lines, self.evidence, self.said = crash, [], [], {}, []

    def checkpoint(self, state, line):
        if self.crash and state.round == self.crash:
            raise OSError("power cut")
        self.states.append(state)

    def round_finished(self, line):
        self.lines.append(line)

    def save_artifact(self, name, arrays):
        self.evidence[name] = dict(arrays)

    def report_progress(self, what):
        self.said.append(what)
