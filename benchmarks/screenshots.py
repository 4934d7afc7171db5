"""Pictures of the report page for README and docs: `python benchmarks/screenshots.py`, in about a minute.

Writes docs/demo.png (the demo, half light and half dark) and docs/comparison.png (two strategies on three seeds).
Needs chromium. The demo is not seeded, so its figures differ a little each time.
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tests"))

from kit.browser import Browser  # noqa: E402  (tests is no package)

WIDTH = 1080
SWEEP = ("strategy=ifca,fedavg", "rounds=30", "evaluate-every=3")


def coterie(*words: object) -> None:
    """Run the command in this Python."""
    subprocess.run([sys.executable, "-m", "coterie.cli", *map(str, words)], check=True)


def picture(browser: Browser, page: Path, name: str, height: int, *, split: bool = False) -> None:
    """Write docs/`name`: the upper part of a page, light; with `split`, the right half is dark."""
    shown = None
    for dark in (False, True)[: 1 + split]:
        browser.open(page, width=WIDTH, height=height, dark=dark)
        part = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
        if shown is None:
            shown = part
        else:
            shown.paste(part.crop((WIDTH // 2, 0, WIDTH, height)), (WIDTH // 2, 0))
    assert shown is not None
    shown.save(DOCS / name, optimize=True)
    print(f"{DOCS / name}: {(DOCS / name).stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Run what the pictures show, and draw it."""
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        runs = Path(folder)
        coterie("run", "--out", runs / "demo")
        picture(browser, runs / "demo" / "report.html", "demo.png", 1020, split=True)
        settings = [word for each in SWEEP for word in ("--set", each)]
        coterie("sweep", *settings, "--out", runs / "sweep")
        coterie("report", *sorted((runs / "sweep" / "runs").iterdir()), "--out", runs / "comparison.html")
        picture(browser, runs / "comparison.html", "comparison.png", 1060)


if __name__ == "__main__":
    main()
