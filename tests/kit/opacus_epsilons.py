"""Epsilon by the accountants of Opacus: Poisson sampling only."""

import warnings
from collections import Counter

import numpy as np
from opacus.accountants import create_accountant


def opacus_epsilon(events, delta, accountant):
    """Epsilon of events by "rdp", or by "prv" with an error of 0.01 (arXiv:2106.02848)."""
    composed = create_accountant(accountant)
    composed.history = [(e.noise_multiplier, e.sampling_rate, count) for e, count in Counter(events).items()]
    with np.errstate(divide="ignore"), warnings.catch_warnings():  # its PRV takes log(1 - q), also at q = 1
        warnings.filterwarnings("ignore", "Optimal order is the")
        return float(composed.get_epsilon(delta))
