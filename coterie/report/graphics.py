"""Graphics of the page: panels as SVG that follows the page's colours, a caption, and the data as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote

import matplotlib
from matplotlib.figure import Figure

from coterie.files import spreadsheet_cell
from coterie.report.plots import AXIS, CLUSTER_COLOURS, FAINT, GRID, GROUP_COLOURS, INK, MUTED

# Rows of a table on the page; the file has all.
_ROWS = 100
_WHITE = "#ffffff"
#: CSS variables of the colours of figures: name, colour on a light page, colour on a dark page.
THEME = (
    *(("ink", INK, "#e8ebf0"), ("muted", MUTED, "#a4aebd"), ("grid", GRID, "#2d3542"), ("axis", AXIS, "#566174")),
    *(("faint", FAINT, "#4d5768"), ("card", _WHITE, "#1b212b")),
    *(
        (f"group-{number}", colour, dark)
        for number, (colour, dark) in enumerate(
            zip(GROUP_COLOURS, ("#4aaee8", "#ff8b47", "#2bc796", "#e3a0c6", "#f0b43a", "#8fd0f5"), strict=True)
        )
    ),
    *(
        (f"cluster-{number}", colour, dark)
        for number, (colour, dark) in enumerate(
            zip(
                CLUSTER_COLOURS,
                (
                    *("#9d93f2", "#e68a98", "#5cc9b8", "#d3bd55", "#d1699f", "#4fb56a", "#a5def3", "#cf79c8"),
                    *("#98a2b0", "#f29a5e"),
                ),
                strict=True,
            )
        )
    ),
)
_VARIABLES = {light.lower(): f"var(--{name})" for name, light, _ in THEME}


@dataclass(frozen=True)
class Data:
    """The data of a figure.

    Attributes:
        name: of the file, without suffix.
        heads: names of the columns.
        rows: values; None is empty.
    """

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @property
    def uri(self) -> str:
        """All rows as CSV in a `data:` URI."""
        content = io.StringIO()
        writer = csv.writer(content, lineterminator="\n")
        writer.writerows(map(spreadsheet_cell, row) for row in (self.heads, *self.rows))
        return "data:text/csv;charset=utf-8," + quote(content.getvalue(), safe=",-._~")

    @property
    def shown(self) -> list[list[str]]:
        """The first rows for the page."""
        return [["–" if value is None else _text(value) for value in row] for row in self.rows[:_ROWS]]

    @property
    def hidden(self) -> int:
        """The number of rows that only the file has."""
        return max(0, len(self.rows) - _ROWS)


@dataclass(frozen=True)
class Graphic:
    """Panels with one caption.

    Attributes:
        title: for screen readers.
        panels: (heading, figure); the heading may be empty.
        caption: what is shown.
        data: what is plotted.
    """

    title: str
    panels: Sequence[tuple[str, Figure]]
    caption: str
    data: Data

    def svgs(self, name: str) -> list[tuple[str, str]]:
        """Return (heading, SVG) of each panel; ``name`` makes ids unique on the page."""
        return [
            (heading, svg(figure, f"{name}-{number}", f"{self.title}: {heading}" if heading else self.title))
            for number, (heading, figure) in enumerate(self.panels)
        ]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def svg(figure: Figure, name: str, description: str) -> str:
    """Render the figure as scalable inline SVG; colours are CSS variables, and `name` makes ids unique on the page."""
    target = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    # Inline SVG needs no metadata or namespace, and a style sheet inside it would reach the whole page.
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'(\bid="|\bhref="#|\burl\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda match: _VARIABLES.get(match[0], match[0]), text)
    view_box = re.search(r'viewBox="[\d. ]+"', text)
    assert view_box is not None, "matplotlib's SVG has a viewBox"
    head = f'<svg {view_box.group()} role="img" aria-label="{escape(description)}">'
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1).strip()
