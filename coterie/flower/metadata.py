"""Ids of messages, which Flower sets itself and has no public interface for."""

from __future__ import annotations

from flwr.app import Message, Metadata

from coterie.flower import SUPPORTED
from coterie.site.errors import DeployError


def set_message_id(message: Message, message_id: str) -> None:
    """Set the id of a message."""
    _set(message.metadata, "message_id", message_id)


def set_request(reply: Message, message_id: str) -> None:
    """Set the id of the message that a reply answers."""
    _set(reply.metadata, "reply_to_message_id", message_id)


def _set(metadata: Metadata, name: str, value: str) -> None:
    metadata.__dict__[f"_{name}"] = value
    if getattr(metadata, name) != value:
        raise DeployError(f"this version of flwr does not let {name} of a message be set: install flwr{SUPPORTED}")
