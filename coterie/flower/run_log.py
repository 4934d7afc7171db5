"""The progress of a run in its log, which :mod:`coterie.deploy.progress` reads.

After each round the ServerApp logs a message for people and one in JSON, ``progress {...}``. ``coterie status`` reads
the latter from the log that a SuperLink keeps of a run. A client cannot forge one: text of clients never begins a
message, and :func:`coterie.logs.printable` escapes its line breaks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from coterie.fields import finite

if TYPE_CHECKING:
    from coterie.results import RoundRecord


def round_line(record: RoundRecord, rounds: int) -> tuple[str, dict[str, Any]]:
    """The message of a finished round, and the ``extra`` that belongs to it.

    Args:
        record: the round, with ``replies`` only where participation is no secret.
        rounds: number of rounds of the run.
    """
    text = f"round {record.round}/{rounds}: epsilon {record.epsilon:.3f}"
    extra: dict[str, Any] = {"rounds": rounds, "round": record.round, "epsilon": record.epsilon}
    if (accuracy := record.mean_accuracy) is not None:
        text += f", accuracy {100 * accuracy:.1f} %"
        extra["accuracy"] = accuracy
    if (replies := record.replies) is not None:
        text += f", {replies['accepted']} of {replies['asked']} replies, {record.dropped} dropped"
        extra["replies"] = replies
    return f"{text} ({record.seconds or 0:.2f} s)", extra


def progress_message(record: RoundRecord, rounds: int, submitter: str | None = None) -> str:
    """The message that ``coterie status`` reads: round, rounds, epsilon (null: infinite), accuracy, dropped replies.

    Args:
        record: as for :func:`round_line`.
        rounds: number of rounds of the run.
        submitter: who has started it; None: that is not known.
    """
    values = {"round": record.round, "rounds": rounds, "epsilon": finite(record.epsilon)}
    more = {"accuracy": finite(record.mean_accuracy), "dropped": record.dropped, "submitter": submitter}
    return f"progress {json.dumps(values | {name: value for name, value in more.items() if value is not None})}"
