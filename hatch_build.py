"""The README of a package index, where relative links lead nowhere.

With ``Repository`` among ``project.urls``, links and pictures lead there, at the tag of this version. Without it,
links become their text, and pictures are left out with their captions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A picture on lines of its own, and its caption in italics; another link.
_PICTURE = re.compile(r"^!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)\n(\n\*[^*]+\*\n)?\n?", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def index_readme(text: str, version: str, repository: str | None) -> str:
    """Return the README for a package index.

    Args:
        text: README.md.
        version: version of the package, whose tag is ``v`` and the version.
        repository: address of the repository, without which there is nothing to link to.
    """
    if repository is None:
        return _LINK.sub(r"\1", _PICTURE.sub("", text))
    home = repository.rstrip("/")
    text = re.sub(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)", rf"![\1]({home}/raw/v{version}/\2)", text)
    return _LINK.sub(rf"[\1]({home}/blob/v{version}/\2)", text)


class ReadmeHook(MetadataHookInterface):
    """Sets the project's ``readme``."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill the dynamic field."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        home = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": index_readme(text, metadata["version"], home)}
