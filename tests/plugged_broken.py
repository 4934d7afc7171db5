"""Fails when it is imported."""

x = 1 / 0
