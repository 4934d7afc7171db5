"""What a client does with the models that it receives: choose one, train it, evaluate it."""

from coterie.client.memory import ClientError, Memory
from coterie.client.training import Hyper, losses, train
from coterie.client.verbs import VERBS, Client

__all__ = ["VERBS", "Client", "ClientError", "Hyper", "Memory", "losses", "train"]
