"""Pages of Shakespeare's speakers, in two styles of writing, and a small transformer that completes them.

The context of a page is in small letters. Sites of one half write the next character as a small letter, those of the
other as a capital one: no context tells which, so that one model for all is wrong at every second site.
"""

import os
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor, nn

from coterie.datasets import Source

SMALL, CAPITAL = " abcdefghijklmnopqrstuvwxyz'\n", " ABCDEFGHIJKLMNOPQRSTUVWXYZ'\n"
CHARACTERS = sorted({*SMALL, *CAPITAL})
#: Characters of a context and of a page, steps between contexts, and sites under privacy of records.
LENGTH, PAGE, STRIDE, LARGE_SITES = 16, 600, 5, 10
#: Shares of the speakers: their text is public, of validation sites, of sites.
SHARES = {"public": (0.0, 0.4), "validation": (0.4, 0.7), "private": (0.7, 1.0)}


def speeches() -> list[str]:
    """Return the text of each speaker with a page or more, in small letters."""
    text = (Path(os.environ["COTERIE_DATA"]) / "shakespeare" / "tinyshakespeare.txt").read_text()
    said: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        speaker, _, speech = block.strip("\n").partition("\n")
        said.setdefault(speaker, []).append(speech.lower())
    texts = ["\n".join(parts) for parts in said.values()]
    return ["".join(c for c in text if c in SMALL) for text in texts if len(text) >= 2 * PAGE]


def pages(part: str) -> list[str]:
    """Return the pages of the speakers of a part; a speaker belongs to one part."""
    texts = speeches()
    first, last = (round(share * len(texts)) for share in SHARES[part])
    chosen = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))[first:last]]
    return [text[i : i + PAGE] for text in chosen for i in range(0, len(text) - PAGE + 1, PAGE)]


def windows(page: str, style: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, 16) contexts in small letters and the (n,) next characters in a style."""
    tokens, targets = (np.array([CHARACTERS.index(s[SMALL.index(c)]) for c in page]) for s in (SMALL, style))
    return sliding_window_view(tokens, LENGTH)[:-1:STRIDE].copy(), targets[LENGTH::STRIDE]


def source(part: str, sites: int | None = None) -> Source:
    """Return sites with several pages each, or one; the last fifth of a page is for tests."""
    found = pages(part)
    sites = sites or len(found)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("x", "y", "owner", "test_x", "test_y", "test_owner")}
    for number, page in enumerate(found):
        site = number * sites // len(found)
        x, y = windows(page, CAPITAL if site % 2 else SMALL)
        cut = len(y) * 4 // 5
        for name, rows in (("", slice(0, cut)), ("test_", slice(cut + LENGTH // STRIDE + 1, None))):
            parts[f"{name}x"].append(x[rows])
            parts[f"{name}y"].append(y[rows])
            parts[f"{name}owner"].append(np.full(len(y[rows]), site))
    x, y, owner, test_x, test_y, test_owner = (np.concatenate(arrays) for arrays in parts.values())
    return Source(part, x, y, test_x, test_y, len(CHARACTERS), train_owner=owner, test_owner=test_owner)


def private() -> Source:
    """Return the sites of the results, a page each."""
    return source("private")


def validation() -> Source:
    """Return the sites on which settings were chosen, a page each."""
    return source("validation")


def large_private() -> Source:
    """Return ten sites with the pages of the results, for privacy of records."""
    return source("private", LARGE_SITES)


def large_validation() -> Source:
    """Return ten sites on which settings were chosen."""
    return source("validation", LARGE_SITES)


class Block(nn.Module):
    """Causal attention of the last positions to all, and two linear layers, each beside its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, last: int) -> Tensor:
        """(n, L, width) to (n, last, width)."""
        length, y = x.shape[1], self.norm1(x)
        query, key, value = self.query(y[:, -last:]), self.key(y), self.value(y)
        later = torch.ones(last, length).triu(length - last + 1).bool()
        scores = query @ key.transpose(1, 2) / y.shape[2] ** 0.5
        x = x[:, -last:] + self.mix(scores.masked_fill(later, -1e9).softmax(2) @ value)
        return x + self.narrow(self.wide(self.norm2(x)).relu())


class Transformer(nn.Module):
    """Characters to logits of the next one."""

    def __init__(self, length: int, characters: int, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.first, self.second = Block(width), Block(width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def logits(self, tokens: Tensor, last: int) -> Tensor:
        """(n, L) tokens to the (n, last, characters) logits of what follows each of the last ones."""
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden = self.first(self.embedding(tokens) + self.place(places), tokens.shape[1])
        return self.head(self.norm(self.second(hidden, last)))

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, L) tokens to (n, characters) logits of what follows the last."""
        return self.logits(tokens, 1)[:, 0]


def network(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the model of the example, as ``model = plays:network``."""
    return Transformer(input_shape[0], num_classes)


def pretrain(path: Path, steps: int) -> None:
    """Train on the public part, in both styles, without privacy, and save the parameters."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model, rng = Transformer(LENGTH, len(CHARACTERS)), np.random.default_rng(0)
    text = "".join(pages("public"))
    small, capital = (np.array([CHARACTERS.index(s[SMALL.index(c)]) for c in text]) for s in (SMALL, CAPITAL))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        rows = rng.integers(len(text) - LENGTH - 1, size=(128, 1)) + np.arange(LENGTH)
        targets = np.where(rng.integers(2, size=(128, 1)), small[rows + 1], capital[rows + 1])
        logits = model.logits(torch.as_tensor(small[rows]), LENGTH)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(targets).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    save_file(model.state_dict(), path)
