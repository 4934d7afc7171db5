"""Which nodes of a run are one site.

A node is a key, and an owner who installs a node again has another key. What identifies the records is the name that
their owner gives them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

#: Of a site without a name, in reports and ledgers.
UNNAMED = ""
_MAX_NAME = 64

#: A node or a name; a site is represented by one of them.
Site = tuple[str, str]


def is_name(name: object) -> bool:
    """Whether it may be the name of a site: 1 to 64 printable characters, without spaces around."""
    return isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable() and name.strip() == name


class Sites:
    """Sites of a run, by what their nodes report.

    A node has the records of one owner, and so has a name: nodes and names that reports connect are one site. All nodes
    without a name are one site, too, which can only overstate its cost.
    """

    def __init__(self) -> None:
        self._parents: dict[Site, Site] = {}

    def join(self, node: str, name: str) -> tuple[Site, Site]:
        """Take a report of a node under a name; return its site, and what became a part of it, if anything else."""
        site, absorbed = self._root(("name", name)), self._root(("node", node))
        self._parents[absorbed] = site
        return site, absorbed

    def of(self, node: str) -> Site:
        """The site of a node; one that did not report yet is of those without a name."""
        reported = ("node", node) in self._parents
        return self._root(("node", node) if reported else ("name", UNNAMED))

    def _root(self, member: Site) -> Site:
        while (parent := self._parents.setdefault(member, member)) != member:
            member = parent
        return member


def reporter(charge: Mapping[str, Any]) -> tuple[str, str]:
    """Return the node and the name of a charge of a run; ledgers of before sites had names hold the node only."""
    guard = charge["guard"]
    return (str(guard["node"]), str(guard["site"])) if "node" in guard else (str(guard["site"]), UNNAMED)


def charges_by_site(charges: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the charges of a run by site, which is titled by all of its names."""
    charges, sites = list(charges), Sites()
    for charge in charges:
        sites.join(*reporter(charge))
    names, by_site = defaultdict(set), defaultdict(list)
    for charge in charges:
        node, name = reporter(charge)
        names[sites.of(node)].add(name)
        by_site[sites.of(node)].append(charge)
    return {_title(names[site]): site_charges for site, site_charges in by_site.items()}


def _title(names: Iterable[str]) -> str:
    named = sorted(name for name in names if name != UNNAMED)
    return ", ".join([*named, *["nodes without a name"] * (UNNAMED in names)])
