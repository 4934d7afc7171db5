"""Ids of messages, which Flower sets itself and has no public interface for."""

from __future__ import annotations

from flwr.app import Message


def set_message_id(message: Message, message_id: str) -> None:
    """Set the id of a message."""
    message.metadata.__dict__["_message_id"] = message_id


def set_request(reply: Message, message_id: str) -> None:
    """Set the id of the message that a reply answers."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id
