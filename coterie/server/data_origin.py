"""Where the data of a simulation are, and their fingerprints: ``local.json`` in the run folder.

The file is for the user of this machine alone: it has mode 0600, and no report, model or message contains it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.datasets import OWN_DATA, DataError, load
from coterie.datasets.client_data import fingerprints
from coterie.datasets.sources import source_fingerprint
from coterie.files import read_object
from coterie.server.config import RunConfig

#: Name of the file.
LOCAL = "local.json"
_LISTED = 5


@dataclass(frozen=True)
class DataOrigin:
    """The data of a simulation.

    Attributes:
        folder: absolute path of the folder of the data; empty: the data set needs none.
        directory: the current directory, where the folder was named relative to it; empty otherwise.
        digests: fingerprint of every client's own data, by the name of its file or folder, or of the data set.
    """

    folder: str
    directory: str
    digests: Mapping[str, str]

    @classmethod
    def of(cls, config: RunConfig) -> DataOrigin:
        """Return the data that a configuration names, relative to the current directory.

        Raises:
            DataError: the data of a client cannot be read.
        """
        named = config.data.data_dir or os.environ.get("COTERIE_DATA") or ""
        path = Path(named).expanduser()
        folder = str(path.absolute()) if named else ""
        directory = "" if path.is_absolute() or not named else str(Path.cwd())
        dataset = config.data.dataset
        if dataset == OWN_DATA:
            return cls(folder, directory, fingerprints(folder, config.data.clients))
        return cls(folder, directory, {dataset: source_fingerprint(load(dataset, folder or None))})

    @classmethod
    def read(cls, path: Path) -> DataOrigin | None:
        """Return the data of a run from its ``local.json``; None without the file, as in a deployment.

        Raises:
            FileError: the file is damaged.
        """
        if not path.exists():
            return None
        document = read_object(path)
        folder, directory = (str(document.get(name, "")) for name in ("data-dir", "directory"))
        return cls(folder, directory, dict(document.get("fingerprints", {})))

    def to_json(self) -> dict[str, object]:
        """Return the content of ``local.json``."""
        return {"data-dir": self.folder, "directory": self.directory, "fingerprints": dict(self.digests)}

    def require_directory(self) -> None:
        """Check that a relative folder is named from where the run began: modules there may be others elsewhere.

        Raises:
            DataError: the current directory is another one.
        """
        if self.directory and Path(self.directory).resolve() != Path.cwd().resolve():
            raise DataError(
                f"the run began in {self.directory}, with its data in a folder relative to it; resume it there, or add "
                f"--data-dir {self.folder}"
            )

    def require_same(self, earlier: DataOrigin) -> None:
        """Check that these are the data with which a run began; their folder may have moved.

        Raises:
            DataError: a file of a client was changed, added or removed.
        """
        before, now = earlier.digests, self.digests
        kinds = {
            "changed": sorted(name for name in before.keys() & now.keys() if before[name] != now[name]),
            "missing": sorted(before.keys() - now.keys()),
            "new": sorted(now.keys() - before.keys()),
        }
        differences = []
        for kind, names in kinds.items():
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            differences += [f"{', '.join(names[:_LISTED])}{more} {kind}"] if names else []
        if differences:
            where = f"in {self.folder} " if self.folder else ""
            raise DataError(f"the data {where}are not those with which the run began: {'; '.join(differences)}")


def require_data(config: RunConfig) -> None:
    """Check before a round is charged that the clients' own data are still there.

    Raises:
        DataError: it is not.
    """
    folder = config.data.data_dir
    if config.data.dataset == OWN_DATA and folder and not Path(folder).expanduser().exists():
        raise DataError(
            f"the data of the clients, {folder}, are missing; nothing was charged for this round, and completed "
            "rounds are saved: restore them, then continue with --resume"
        )
