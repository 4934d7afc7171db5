"""Packages and licences of a deployment: ``python -m tests.licences`` writes docs/dependencies.md.

Names and versions are from requirements.lock, licences from the metadata of the installed packages.
"""

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "dependencies.md"
#: Not in the lock files, since its files differ by device.
UNLOCKED = ("torch",)
#: Of packages that this system does not install.
ELSEWHERE = {"colorama": "BSD-3-Clause"}
_HEAD = """# Dependencies

`make licences` writes this table from `requirements.lock` and the metadata of the installed
packages. It lists the packages of a deployment, with the extras `deploy`, `excel`, `images`,
`metrics` and `parquet`.
`torch` is not locked; its GPU builds install Triton (MIT) and NVIDIA's CUDA libraries (`nvidia-*`,
`cuda-*`) under NVIDIA licences.

Coterie is licensed under Apache-2.0. None of these packages is licensed under the GPL; `kmedoids`,
with which tests compare Coterie's own k-medoids, is, and is a development tool only.

`make sbom` writes a bill of materials of all installed packages, development tools included, to
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
