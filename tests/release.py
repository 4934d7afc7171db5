"""Checks what ``make release-check`` built: contents, metadata, and the demo from the wheel in a fresh environment.

The environment is outside the repository. By default it sees the installed packages of this one; with ``--full``, pip
installs everything that the wheel requires. ``--torch`` is what pip installs before, for example the CPU wheel.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

from coterie import __version__

_LINK = re.compile(r"\]\((?!https?:|#)")


def check_contents(dist):
    """Check both archives; return the wheel."""
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        about = message_from_bytes(file.read(f"coterie-{__version__}.dist-info/METADATA"))
    assert {name.partition("/")[0] for name in names} == {"coterie", f"coterie-{__version__}.dist-info"}, names
    assert {"coterie/bench/tables/rr-table1.toml", "coterie/py.typed"} <= set(names)
    assert (about["Name"], about["Version"]) == ("coterie", __version__)
    assert not _LINK.search(about.get_payload()), "a relative link in the description"
    with tarfile.open(archive) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    assert {"README.md", "LICENSE", "SECURITY.md", "hatch_build.py", "tests/release.py", "mkdocs.yml"} <= inside
    assert not [name for name in inside if name.startswith(("build/", "runs/", ".venv/"))]
    return wheel


def environment(folder, wheel, full, torch):
    """Create an environment with the wheel; return its folder of programs."""
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    if torch:
        subprocess.run([*pip, *shlex.split(torch)], check=True)
    if not full:  # added to the path only: what is installed there as editable is not seen
        (inside,) = folder.glob("lib/python3*/site-packages")
        (inside / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([*pip, *([] if full else ["--no-deps"]), wheel.resolve()], check=True)
    return folder / "bin"


def run_demo(programs, folder):
    """Run the demo in ``folder``, without this repository on the path; return its accuracy."""
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COTERIE_DATA")}

    def output(*words):
        done = subprocess.run(
            [programs / words[0], *words[1:]], env=settings, cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert output("coterie", "--version") == f"coterie {__version__}\n"
    assert programs.parent in Path(output("python", "-c", "import coterie; print(coterie.__file__)")).parents
    result = json.loads(output("coterie", "run", "--json", "--out", "run"))
    assert (folder / "run" / "report.html").exists()
    assert "certificate" in output("coterie", "privacy", "check", "run")
    return result["diagnostics"]["accuracy"]


def main():
    """Check, and say what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dist", type=Path)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--torch", default="")
    asked = parser.parse_args()
    wheel, begin = check_contents(asked.dist), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        programs = environment(Path(place, "fresh"), wheel, asked.full, asked.torch)
        installed = time.monotonic()
        size = subprocess.run(
            ["du", "-sm", programs.parent], check=True, capture_output=True, text=True
        ).stdout.split()[0]
        (folder := Path(place, "elsewhere")).mkdir()
        accuracy = run_demo(programs, folder)
        assert accuracy > 0.85, accuracy  # 20 runs: mean 0.956, deviation 0.004, so 28 deviations below the mean
    print(
        f"{wheel.name}: installed in {installed - begin:.0f} s ({size} MB), "
        f"demo {accuracy:.1%} in {time.monotonic() - installed:.0f} s"
    )


if __name__ == "__main__":
    main()
