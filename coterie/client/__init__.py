"""What a client does with the models that it receives: choose one, train it, evaluate it."""

from coterie.client.memory import ClientError, Memory
from coterie.client.progress import heard, tell_to
from coterie.client.task import Client, federation, torch_device
from coterie.client.training import Hyper, losses, train
from coterie.client.verbs import VERBS, Answer

__all__ = [
    "VERBS",
    "Answer",
    "Client",
    "ClientError",
    "Hyper",
    "Memory",
    "federation",
    "heard",
    "losses",
    "tell_to",
    "torch_device",
    "train",
]
