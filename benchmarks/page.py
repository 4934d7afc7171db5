"""Fill docs/results.md with the tables in benchmarks/results: `python benchmarks/page.py`.

Between `<!-- NAME -->` and `<!-- end -->` goes what results/NAME.json holds; everything else on the page is prose.
"""

import json
import re
from pathlib import Path

from coterie.bench.outcome import markdown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"


def filled(text: str) -> str:
    """The page with every table as its file has it now."""

    def table(match: re.Match[str]) -> str:
        document = json.loads((HERE / "results" / f"{match[1]}.json").read_text())
        machine = document["machine"]
        seeds, torch = ", ".join(map(str, document["seeds"])), document["versions"]["torch"]
        made = f"`{document['command']}`, seeds {seeds}; commit {machine['git-commit']}, "
        made += f"{machine['device']}, {machine['cores']} cores, torch {torch}."
        later = [f"{row['name']}: commit {row['git-commit']}" for row in document["rows"] if "git-commit" in row]
        made += f" Rows run later: {'; '.join(later)}." if later else ""
        return f"<!-- {match[1]} -->\n{made}\n\n{markdown(document)}<!-- end -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
