"""Print a workbook as lines of JSON, in a process of its own whose memory is limited.

    python workbook_reader.py LIMIT PATH            # name, visible, is_empty of each sheet
    python workbook_reader.py LIMIT PATH SHEET      # number, from 1, and cells of each row that is not blank

python-calamine holds the rectangle from the first to the last cell of a sheet, so that two cells can need any amount of
memory; without it, the process ends at once. Dates and times are printed as ISO 8601, an empty cell as "", and a cell
that is part of merged cells as the list of the row that has the value.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from python_calamine import CalamineSheet, CalamineWorkbook, SheetTypeEnum, SheetVisibleEnum

# Merged ranges of a sheet: each is compared with each row.
_MAX_MERGED = 1000


def _is_blank(cell: Any) -> bool:
    return isinstance(cell, str) and not cell.strip()


def _print_sheets(book: CalamineWorkbook) -> None:
    for sheet in book.sheets_metadata:
        if sheet.typ == SheetTypeEnum.WorkSheet:
            rows = book.get_sheet_by_name(sheet.name).to_python()
            is_empty = all(_is_blank(cell) for row in rows for cell in row)
            print(json.dumps([sheet.name, sheet.visible == SheetVisibleEnum.Visible, is_empty]))


def _print_rows(sheet: CalamineSheet) -> None:
    merged = sheet.merged_cell_ranges or []
    if len(merged) > _MAX_MERGED:
        raise ValueError(f"sheet {sheet.name!r} has {len(merged):,} ranges of merged cells; unmerge them")
    top, left = sheet.start or (0, 0)
    for i, cells in enumerate(sheet.to_python(), top):
        if all(map(_is_blank, cells)):
            continue
        row: list[Any] = [""] * left + cells
        for (first, low), (last, high) in merged:
            for j in range(low, min(high + 1, len(row))) if first <= i <= last else ():
                row[j] = row[j] if (i, j) == (first, low) else [first + 1]
        print(json.dumps([i + 1, row], default=str))


def main(limit: str, path: str, *name: str) -> None:
    """Print the sheets of a workbook, or the rows of one of them."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = int(limit) if most == resource.RLIM_INFINITY else min(int(limit), most)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, most))
    try:
        with CalamineWorkbook.from_path(path) as book:
            _print_rows(book.get_sheet_by_name(*name)) if name else _print_sheets(book)
    except BrokenPipeError:
        raise
    except Exception as error:  # whatever a broken workbook makes python-calamine say
        sys.exit(str(error) or type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
