"""What a run stores: checkpoints, metrics, and the arrays from which clusters are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.wire.messages import Layout

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run resumes; released values only.

    Attributes:
        round: the last completed round.
        models: (k, d).
        layout: of one model.
        histogram: (k,) running mean of released histograms; None before the first.
        mean: (k, d) mean of the last rounds' models; None while there is none.
        state: arrays of the method between rounds (``ClusteredStrategy.state``).
    """

    round: int
    models: npt.NDArray[np.float32]
    layout: Layout
    histogram: npt.NDArray[np.float64] | None
    mean: npt.NDArray[np.float32] | None = None
    state: Arrays = field(default_factory=dict)


class Recorder:
    """Stores nothing of a run. Subclasses store a part, or all, such as the server's run folder."""

    def checkpoint(self, state: Checkpoint, line: Mapping[str, Any]) -> None:
        """Called after the release of a round was applied; ``line`` holds its metrics so far."""

    def round_finished(self, line: Mapping[str, Any]) -> None:
        """Called at the end of a round with its metrics."""

    def save_artifact(self, name: str, arrays: Arrays) -> None:
        """Store the evidence from which clusters were found, released values only, or heads of clients."""

    def load_artifact(self, name: str) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays last stored under this name in this run, also before a crash; None if there are none."""
        return None

    def report_progress(self, what: str) -> None:
        """Report progress within a long round."""
