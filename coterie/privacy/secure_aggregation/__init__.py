"""Secure aggregation: sums of noisy vectors, of which the server sees no single one.

The parts that need no network: keys, shares, masks and the integer grid, from the primitives of `cryptography`.
"""

from coterie.privacy.secure_aggregation.errors import SecureError
from coterie.privacy.secure_aggregation.integers import discrete_gaussian, from_grid, to_grid, to_modulus
from coterie.privacy.secure_aggregation.masking import MaskedRound, MaskingClient, Opening, Shares, unmasked_sum
from coterie.privacy.secure_aggregation.noise_layers import NoiseLayers, Surplus

__all__ = [
    "MaskedRound",
    "MaskingClient",
    "NoiseLayers",
    "Opening",
    "SecureError",
    "Shares",
    "Surplus",
    "discrete_gaussian",
    "from_grid",
    "to_grid",
    "to_modulus",
    "unmasked_sum",
]
