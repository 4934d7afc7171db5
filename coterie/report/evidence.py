"""Clustering evidence: pairwise client distances or similarities, and the tree of splits."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.files import FileError, open_regular

#: Errors raised by reading an incomplete file.
READ_ERRORS = (FileError, OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Pairs:
    """A file of `evidence/`.

    Attributes:
        matrix: (n, n) distances or similarities; NaN for clients that were not compared.
        clients: (n,) client ids.
        labels: (n,) cluster of each client when the matrix was computed.
    """

    matrix: np.ndarray
    clients: np.ndarray
    labels: np.ndarray

    def ordered(self, order: Sequence[int] = ()) -> Pairs:
        """Reorder by the clients in `order`, others last; by cluster if `order` is empty.

        The diagonal becomes NaN, because the distance of a client to itself is trivial.
        """
        positions = {client: index for index, client in enumerate(order)}
        key = np.array([positions.get(int(client), len(positions)) for client in self.clients], np.int64)
        taken = np.lexsort((self.clients, self.labels, key))
        matrix = self.matrix[np.ix_(taken, taken)].astype(np.float64)
        np.fill_diagonal(matrix, np.nan)
        return Pairs(matrix, self.clients[taken], self.labels[taken])

    @property
    def borders(self) -> np.ndarray:
        """Positions of the borders between clusters, between 0 and n."""
        return np.flatnonzero(np.diff(self.labels)) + 1


@dataclass(frozen=True)
class Node:
    """A cluster in a tree of splits.

    Attributes:
        number: its number; `parent` is the number of the cluster it was split from, None for the first.
        born, ended: rounds; `ended` is None while it trains.
        end_reason: reason for its end, `split` or `stationary`; None while it trains.
        clients: ids of its clients.
        cluster: index of its model, None after it was split.
        similarity: maximum similarity between its two halves at the split.
    """

    number: int
    parent: int | None
    born: int
    ended: int | None
    end_reason: str | None
    clients: tuple[int, ...]
    cluster: int | None
    similarity: float | None


def read_pairs(path: str | Path) -> Pairs | None:
    """Read a file of `evidence/`; None if it is missing or incomplete."""
    try:
        with os.fdopen(open_regular(Path(path)), "rb") as opened, np.load(opened, allow_pickle=False) as file:
            pairs = Pairs(file["matrix"], file["clients"], file["labels"])
    except READ_ERRORS:
        return None
    n = pairs.clients.size
    whole = n and pairs.matrix.shape == (n, n) and pairs.clients.shape == pairs.labels.shape == (n,)
    return pairs if whole else None


def numbered_files(folder: str | Path, name: str) -> dict[int, Path]:
    """Return the files ``evidence/NAME-*.npz`` of a run folder by round or client, in order."""
    named = ((re.fullmatch(rf"{name}-(\d+)\.npz", path.name), path) for path in Path(folder).glob("evidence/*.npz"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def read_tree(notes: Mapping[str, Any]) -> tuple[Node, ...]:
    """Read the tree recorded by a method, in order of birth; empty if it is missing or invalid."""
    tree: dict[int, Node] = {}
    try:
        for node in notes.get("tree") or ():
            if node["parent"] not in (tree or (None,)):
                return ()
            tree[int(node["node"])] = Node(
                number=int(node["node"]),
                parent=node["parent"],
                born=int(node["born"]),
                ended=None if node["ended"] is None else int(node["ended"]),
                end_reason=node["why"],
                clients=tuple(map(int, node["clients"])),
                cluster=None if node["cluster"] is None else int(node["cluster"]),
                similarity=None if node["similarity"] is None else float(node["similarity"]),
            )
    except READ_ERRORS:
        return ()
    return tuple(tree.values())


def leaves(tree: Sequence[Node]) -> list[Node]:
    """Return the nodes that were not split, with siblings next to each other."""
    children: dict[int | None, list[Node]] = {}
    for node in tree:
        children.setdefault(node.parent, []).append(node)

    def under(node: Node) -> list[Node]:
        return [leaf for child in children[node.number] for leaf in under(child)] if node.number in children else [node]

    return [leaf for root in children.get(None, ()) for leaf in under(root)]


def split_rounds(tree: Sequence[Node]) -> list[int]:
    """Return the rounds in which a cluster was split."""
    return sorted({node.ended for node in tree if node.end_reason == "split" and node.ended is not None})
