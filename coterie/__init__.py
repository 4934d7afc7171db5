"""Coterie: one model per hidden group of clients, under a differential-privacy guarantee that is proved."""

__version__ = "0.2.0"
