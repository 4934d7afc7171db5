"""Files outside docs/ become pages of the site, links to them lead there, and lists look as on GitHub."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(ROOT.glob("examples/*/README.md"))
#: Page of the site by file of the repository.
PAGES = {
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    **{f"examples/{each.parent.name}/README.md": f"examples/{each.parent.name}.md" for each in EXAMPLES},
}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_ITEM = re.compile(r"(?:[-*]|\d+\.) +")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):(?=<code>)")


def on_config(config):
    """List the examples in the navigation."""
    pages = [{each.parent.name: f"examples/{each.parent.name}.md"} for each in EXAMPLES]
    for section in config.nav:
        if "Extend" in section:
            section["Extend"].insert(1, {"Examples": pages})
    return config


def on_files(files, config):
    """Add the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links between files of the repository to pages of the site; of others, the text stays."""
    source = {where: name for name, where in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(link):
        target = normpath(str(PurePosixPath(source).parent / link[2]))
        inside = (
            PAGES.get(target)
            or PAGES.get(f"{target}/README.md")
            or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        )
        if inside is None:  # a file that is no page
            return link[1]
        return f"[{link[1]}]({relpath(inside, PurePosixPath(page.file.src_uri).parent)}{link[3] or ''})"

    return _LINK.sub(moved, indented(markdown))


def indented(markdown):
    """What belongs to an item of a list, by four spaces, as Python-Markdown requires; GitHub asks for two or three.

    An item after one of several paragraphs is preceded by an empty line.
    """
    levels, fence, apart, lines = [], False, False, []
    for line in markdown.splitlines():
        text = line.lstrip()
        indent = len(line) - len(text)
        while text and levels and indent < levels[-1] and not fence:
            levels.pop()
        inner = indent - (levels[-1] if levels else 0)
        marker = _ITEM.match(text) if inner < 4 and not fence else None
        if marker:
            if apart and lines and lines[-1]:
                lines.append("")
            apart = False
        lines.append(" " * (4 * len(levels) + max(inner, 0)) + text if text else "")
        apart |= not text
        fence ^= text.startswith("```")
        if marker:
            levels.append(indent + len(marker[0]))
    return "\n".join(lines)


def on_page_content(html, page, config, files):
    """Docstrings refer to code by Sphinx' roles, which Markdown does not know."""
    return re.sub(r"<code>~(?:[\w.]+\.)?(\w+)</code>", r"<code>\1</code>", _ROLE.sub("", html))
