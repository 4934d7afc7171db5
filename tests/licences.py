"""Every package that Coterie needs, and its licence: ``python -m tests.licences`` writes docs/dependencies.md.

Names and versions are those of requirements.lock, licences those that the installed packages state themselves.
"""

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "dependencies.md"
#: Not in the lock files, since their files differ by device.
UNLOCKED = ("torch", "torchvision")
#: Of packages that this system does not install.
ELSEWHERE = {"colorama": "BSD-3-Clause"}
_HEAD = """# Dependencies

`make licences` writes this table from `requirements.lock` and from what the installed packages state. It lists what
a deployed Coterie needs, with the extras `metrics` and `parquet`. `torch` and `torchvision` are not locked; their
builds for GPUs bring Triton (MIT) and NVIDIA's CUDA libraries (`nvidia-*`, `cuda-*`), which have licences of
NVIDIA's own.

Coterie itself is under Apache-2.0. `kmedoids` is under the GPL, version 3 or later: whoever distributes an image or a
package that contains it follows the GPL's terms for the whole.

`make sbom` writes a bill of materials of everything that is installed, development tools included, to
`build/sbom.cdx.json` (CycloneDX).

| Package | Version | Licence |
|---|---|---|
"""


def locked(path):
    """The requirements of a lock file: name==version, with a marker where Python versions or systems differ."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    return [Requirement(line.split(" --hash=")[0]) for line in lines if line and not line.startswith("#")]


def licence(name):
    """As an installed package states it: an SPDX expression, else the names of its classifiers, else one line."""
    try:
        about = metadata(name)
    except PackageNotFoundError:
        return ELSEWHERE[name]
    classifiers = [each.split(" :: ") for each in about.get_all("Classifier", ())]
    named = [parts[-1] for parts in classifiers if parts[0] == "License" and len(parts) > 2]
    text = re.sub(r"\s+", " ", about.get("License") or "")
    return about.get("License-Expression") or ", ".join(named) or text[:80]


def table():
    """The whole page."""
    versions = {name: ["not locked"] for name in UNLOCKED}
    for each in locked(ROOT / "requirements.lock"):
        versions.setdefault(each.name, []).append(str(each.specifier).removeprefix("=="))
    rows = [f"| {name} | {', '.join(versions[name])} | {licence(name)} |\n" for name in sorted(versions)]
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    TABLE.write_text(table())
