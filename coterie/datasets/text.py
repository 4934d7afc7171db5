"""Next-character prediction on windows of text; each speaker of the plays is a client."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from coterie.datasets.sources import DataError, DatasetInfo, Source

Tokens = npt.NDArray[np.int64]

#: Token i is character i; all other characters map to token len(ALPHABET). Independent of the data.
ALPHABET = "\n !$&',-.3:;?" + string.ascii_uppercase + string.ascii_lowercase

#: Window length and stride, in characters.
_WINDOW, _STRIDE = 24, 3
#: Minimum number of characters per speaker, and the training share.
_LEAST, _TRAINED = 200, 0.8

_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_MD5 = "6fb458f1232090904fb40fe944165e91"

_TOKENS = np.full(128, len(ALPHABET), np.int64)
_TOKENS[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))


def _speeches(text: str) -> dict[str, str]:
    """Return the lines of each speaker, in order of first appearance; a block is a line `NAME:`, then text."""
    said: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        heading, _, speech = block.strip("\n").partition("\n")
        if heading.endswith(":") and speech:
            said.setdefault(heading[:-1], []).append(speech)
    return {speaker: "\n".join(speeches) for speaker, speeches in said.items()}


def _cut(speech: str) -> int:
    """Return the position that separates training and test text."""
    return int(len(speech) * _TRAINED)


def _examples(texts: Sequence[str]) -> tuple[Tokens, Tokens, Tokens]:
    """Return windows (n, 24), next characters (n,), and the index of the text of each window (n,)."""
    parts = []
    for text in texts:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        tokens = np.where(codes < len(_TOKENS), _TOKENS[np.minimum(codes, len(_TOKENS) - 1)], len(ALPHABET))
        parts.append(sliding_window_view(tokens, _WINDOW + 1)[::_STRIDE])
    windows = np.concatenate(parts)
    return windows[:, :-1].copy(), windows[:, -1].copy(), np.repeat(np.arange(len(parts)), [len(p) for p in parts])


def _read_shakespeare(info: DatasetInfo, root: Path) -> Source:
    """Create one client per speaker with enough text: the first part for training, the rest, disjoint, for testing."""
    path = root / info.files[0]
    try:
        speeches = [s for s in _speeches(path.read_text("utf-8")).values() if len(s) >= _LEAST]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"dataset '{info.name}': cannot read {path} ({error}); to get it: {info.obtain}") from error
    if not speeches:
        raise DataError(
            f"dataset '{info.name}': {path} has no speaker with {_LEAST} characters; expected blocks separated by "
            f"blank lines, each a line `NAME:`, then text; to get it: {info.obtain}"
        )
    train_x, train_y, train_owner = _examples([speech[: _cut(speech)] for speech in speeches])
    test_x, test_y, test_owner = _examples([speech[_cut(speech) :] for speech in speeches])
    return Source(
        info.name, train_x, train_y, test_x, test_y, info.num_classes, train_owner=train_owner, test_owner=test_owner
    )


def _fetch_shakespeare(name: str, root: Path) -> Path:
    try:
        from torchvision.datasets.utils import download_url
    except (ImportError, OSError, RuntimeError) as error:
        raise DataError(
            f"downloading dataset '{name}' requires torchvision, which cannot be imported ({error}); "
            "install it with `pip install 'coterie[vision]'`, from the index that your torch is from"
        ) from error
    folder = root / "shakespeare"
    download_url(_URL, folder, "tinyshakespeare.txt", _MD5)
    return folder


#: Built-in text data sets.
TEXTS: tuple[DatasetInfo, ...] = (
    DatasetInfo(
        "shakespeare",
        "Shakespeare's plays: the next character after 24, a speaker per client (227 of them)",
        (_WINDOW,),
        len(ALPHABET) + 1,
        270_810,
        66_435,
        "public domain",
        "coterie datasets --download shakespeare --data-dir DIR",
        _read_shakespeare,
        ("shakespeare/tinyshakespeare.txt",),
        _fetch_shakespeare,
        "tokens",
    ),
)
