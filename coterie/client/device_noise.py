"""Gaussian noise that a GPU makes itself, from a cryptographic stream: ChaCha20 (RFC 8439) in PyTorch's integers.

PyTorch's own generator on a GPU (Philox) is not cryptographic: who sees enough of its numbers can compute the others.
Here each client's noise comes from the key stream of ChaCha20, under a key of 256 bits that its own secret generator
draws anew in every round. Pairs of 64-bit numbers become normal numbers by the method of Box and Muller in float64,
which reaches 9.5 standard deviations: the chance of one beyond is 2e-21. As in :func:`coterie.privacy.gaussian`, noise
is half the sum of four draws; the two numbers of a pair go to different coordinates.

Runs with a seed draw their noise on the CPU: their models are those of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from randomgen import AESCounter
from torch import Tensor

_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4").view(np.int32)
# The quarter rounds of two rounds: columns, then diagonals.
_QUARTERS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)
_DOUBLE_ROUNDS = 10
# Words of a block, and numbers that are drawn at a time.
_WORDS, _AT_ONCE = 16, 1 << 22


def is_secret(rng: np.random.Generator) -> bool:
    """Whether a generator is one of :class:`coterie.privacy.Streams` without a seed."""
    return isinstance(rng.bit_generator, AESCounter)


class DeviceNoise:
    """Streams of noise on a device, which are computed together.

    Args:
        keys: n keys of 32 secret bytes, each of one stream alone.
        device: of the noise; it must support float64.
    """

    def __init__(self, keys: Sequence[bytes], device: str) -> None:
        words = [np.concatenate([_CONSTANTS, np.frombuffer(key, "<i4")]) for key in keys]
        self._head = torch.as_tensor(np.stack(words, axis=1)[..., None], device=device)
        self._streams, self._block, self._device = len(keys), 0, device

    def gaussian(self, stds: Tensor, size: int) -> Tensor:
        """Return (n, size) float64 noise of (n,) standard deviations."""
        many = max(1, _AT_ONCE // self._streams)
        parts = [self._normal(min(many, size - begin)) for begin in range(0, size, many)]
        noise = torch.cat([torch.zeros(self._streams, 0, dtype=torch.float64, device=self._device), *parts], dim=1)
        return stds[:, None] * noise

    def _normal(self, size: int) -> Tensor:
        """Return (n, size) standard normal numbers, each half the sum of four."""
        first, second = self._uniform(4 * size).reshape(self._streams, 2, 2, size).unbind(1)
        lengths, angles = (-2 * first.log()).sqrt(), 2 * math.pi * second
        cosines, sines = lengths * angles.cos(), lengths * angles.sin()
        total: Tensor = cosines.sum(1) + sines[:, 0].roll(1, 1) + sines[:, 1].roll(2, 1)
        return total / 2

    def _uniform(self, count: int) -> Tensor:
        """Return (n, count) float64 numbers in (0, 1], from 64 bits each: the smallest is 2**-65."""
        low, high = self._words(2 * count).reshape(self._streams, 2, count).unbind(1)
        return ((_unsigned(high) * 2.0**32 + _unsigned(low)) + 0.5) / 2.0**64

    def _words(self, count: int) -> Tensor:
        """Return the next (n, count) words of the streams; those left of a block are not used again."""
        blocks = -(-count // _WORDS)
        numbers = torch.arange(self._block, self._block + blocks, device=self._device)
        self._block += blocks
        counter = torch.stack([_word(numbers), _word(numbers >> 32)])
        tail = torch.cat([counter, torch.zeros_like(counter)])
        words = key_stream(self._head, tail[:, None])  # (16, n, blocks)
        return words.permute(1, 2, 0).flatten(1)[:, :count]


def key_stream(head: Tensor, tail: Tensor) -> Tensor:
    """Return (16, ...) int32 words of blocks of ChaCha20.

    Args:
        head: (12, ...) int32, constants and key.
        tail: (4, ...) int32, counter and nonce of each block, of a shape that fits the head's.
    """
    shape = np.broadcast_shapes(head.shape[1:], tail.shape[1:])
    start = torch.cat([head.expand(-1, *shape), tail.expand(-1, *shape)])
    state = [word.clone() for word in start]
    for a, b, c, d in _QUARTERS * _DOUBLE_ROUNDS:
        for left, right, other, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[left] += state[right]  # modulo 2**32
            word = state[other] ^ state[left]
            state[other] = (word << bits) | ((word >> (32 - bits)) & ((1 << bits) - 1))  # rotated to the left
    return torch.stack(state) + start


def _word(numbers: Tensor) -> Tensor:
    """Return the low 32 bits of int64 numbers as int32."""
    low = numbers & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _unsigned(words: Tensor) -> Tensor:
    """Return int32 words as float64 numbers from 0 to 2**32 - 1."""
    return (words.long() & 0xFFFFFFFF).double()
