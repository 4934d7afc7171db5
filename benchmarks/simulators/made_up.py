"""Images of the shape of Fashion-MNIST where the data are absent: one random pattern per class, with noise."""

import numpy as np

from coterie.datasets import Source


def images() -> Source:
    """60,000 training images and 10,000 test images of ten classes."""
    rng = np.random.default_rng(0)
    patterns = rng.standard_normal((10, 1, 28, 28), np.float32)
    y = rng.integers(10, size=70_000)
    x = 0.3 * patterns[y] + rng.standard_normal((70_000, 1, 28, 28), np.float32)
    x = (x / 6).clip(-1, 1)
    return Source("made-up", x[:60_000], y[:60_000], x[60_000:], y[60_000:], 10)


def pixels() -> Source:
    """2,000 examples of one number, in ten classes."""
    x, y = np.ones((2_000, 1, 1, 1), np.float32), np.arange(2_000) % 10
    return Source("pixels", x, y, x[:10], y[:10], 10)
