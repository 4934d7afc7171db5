"""Which requests a deployed client answers: :data:`ANSWERS`, one table of message types and guarantees.

The owner of the data declares one guarantee in the node configuration:

``masked-sums``     the server learns noisy sums of masked vectors only (docs/privacy.md, Theorem 9)
``record-level``    replies are noisy, and the client's own budget of epsilon and delta pays for them (Theorem 3)
``trusted-server``  the server sees exact values, and the owner trusts it to keep them
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from coterie.fields import GUARANTEES, MASKED_SUMS, RECORD_LEVEL
from coterie.wire.messages import (
    CENTROIDS,
    EVALUATE,
    GAN,
    IDENTITY,
    LABEL,
    LOSSES,
    MASKED,
    MASKED_SCORES,
    OPEN,
    SURVIVORS,
    TRAIN,
    UNMASK,
)


class Answer(Enum):
    """Which requests of one message type a client answers."""

    ALWAYS = "all"
    NEVER = "none"
    PRICED = "those with record-level plans, which its budget pays for"
    EXACT = "all if its owner allows exact values by diagnostics; otherwise none"
    PRICED_OR_EXACT = "those with record-level plans; the others only if its owner allows exact values by diagnostics"
    COUNTLESS = "all; the reply has exact counts only if its owner allows them by diagnostics, else nothing of the data"

    def includes(self, *, priced: bool, diagnostics: bool) -> bool:
        """Return whether a request is answered.

        Args:
            priced: Whether the request has record-level plans.
            diagnostics: Whether the owner allows exact values.
        """
        by_plan = priced and self in (Answer.PRICED, Answer.PRICED_OR_EXACT)
        by_owner = diagnostics and self in (Answer.EXACT, Answer.PRICED_OR_EXACT)
        return by_plan or by_owner or self in (Answer.ALWAYS, Answer.COUNTLESS)


_ALWAYS, _NEVER, _PRICED = Answer.ALWAYS, Answer.NEVER, Answer.PRICED

#: What a client answers, by message type. The columns are those of :data:`~coterie.fields.GUARANTEES`.
ANSWERS: Mapping[str, tuple[Answer, Answer, Answer]] = {
    #              masked-sums   record-level            trusted-server
    IDENTITY:      (_ALWAYS,      _ALWAYS,                _ALWAYS),
    TRAIN:         (_NEVER,       _PRICED,                _ALWAYS),
    LOSSES:        (_NEVER,       _PRICED,                _ALWAYS),
    GAN:           (_NEVER,       _PRICED,                _ALWAYS),
    CENTROIDS:     (_NEVER,       _NEVER,                 _ALWAYS),
    LABEL:         (_NEVER,       Answer.COUNTLESS,       _ALWAYS),
    EVALUATE:      (Answer.EXACT, Answer.PRICED_OR_EXACT, _ALWAYS),
    OPEN:          (_ALWAYS,      _NEVER,                 _ALWAYS),
    MASKED:        (_ALWAYS,      _NEVER,                 _ALWAYS),
    MASKED_SCORES: (_ALWAYS,      _NEVER,                 _ALWAYS),
    SURVIVORS:     (_ALWAYS,      _NEVER,                 _ALWAYS),
    UNMASK:        (_ALWAYS,      _NEVER,                 _ALWAYS),
}  # fmt: skip

_REASONS = {
    MASKED_SUMS: "refuses {}: use mechanism = secure, or set guarantee = trusted-server, or record-level with budget,",
    RECORD_LEVEL: "refuses {}: use privacy-unit = record, or set guarantee = trusted-server, without a budget,",
}
_EVALUATION = "does not cover evaluation: use evaluate = off, or set diagnostics = true"
_UNDECLARED = "no guarantee is declared: set guarantee = masked-sums, record-level or trusted-server"
_WHERE = "in the node configuration"


def refusal(guarantee: str | None, message_type: str, *, priced: bool, diagnostics: bool) -> str:
    """Return why a client refuses a request, and what to set; empty if it answers.

    Args:
        guarantee: One of :data:`~coterie.fields.GUARANTEES`. None if the owner has declared none.
        message_type: A key of :data:`ANSWERS`.
        priced: Whether the request has record-level plans.
        diagnostics: Whether the owner allows exact values.

    Examples:
        >>> refusal("record-level", "train", priced=True, diagnostics=False)
        ''
        >>> refusal("masked-sums", "evaluate", priced=False, diagnostics=False)[:50]
        'guarantee = masked-sums does not cover evaluation:'
    """
    if guarantee is None:
        return "" if message_type == IDENTITY else f"{_UNDECLARED} {_WHERE}"
    answer = ANSWERS[message_type][GUARANTEES.index(guarantee)]
    if answer.includes(priced=priced, diagnostics=diagnostics):
        return ""
    reason = _EVALUATION if message_type == EVALUATE else _REASONS[guarantee].format(message_type)
    return f"guarantee = {guarantee} {reason} {_WHERE}"
