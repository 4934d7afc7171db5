"""One-shot clustering of records, one file per paper."""

from coterie.one_shot.base import OneShot
from coterie.one_shot.ffcm import FFCM
from coterie.one_shot.kfed import KFED
from coterie.one_shot.ppfc_gan import PPFCGAN

__all__ = ["FFCM", "KFED", "PPFCGAN", "OneShot"]
