"""Coterie: one model per hidden group of clients, under a differential-privacy guarantee that is proved."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from coterie.inference import TrainedModels

__version__ = "0.3.0"
__all__ = ["load"]


def load(run: str | Path, *, site: int | None = None, trust_code: bool = False) -> TrainedModels:
    """Load the models of a run folder as PyTorch modules; see :func:`coterie.inference.load`.

    Examples:
        >>> models = load("runs/ifca")
        >>> len(models), models.card.strategy
        (2, 'ifca')
    """
    from coterie import inference  # imports PyTorch

    return inference.load(run, site=site, trust_code=trust_code)
