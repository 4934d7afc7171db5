"""Whether federation pays: accuracies of a run's models beside those of models that clients train alone."""

from __future__ import annotations

from coterie.report import formats
from coterie.results import Diagnostics


def federation_pays(scores: Diagnostics) -> tuple[bool, str] | None:
    """Return whether the better of released and personalised models beats those of clients alone, and a sentence.

    None: it is not known.
    """
    released, alone = scores.accuracy, scores.alone_accuracy
    if released is None or alone is None:
        return None
    own = scores.personal_accuracy
    best = released if own is None else max(released, own)
    pays = best > alone
    shown = f"{formats.percent(released)}" + ("" if own is None else f", personalised {formats.percent(own)},")
    text = (
        f"{'yes' if pays else 'no'}: {shown} against {formats.percent(alone)} for a model that a client trains alone, "
        f"without noise (mean of {scores.alone_clients} clients, {formats.duration(scores.alone_seconds)})"
    )
    if not pays:
        text += "; share nothing (strategy local), or try more clients, a larger ε, clusters, or personalize"
    return pays, text
