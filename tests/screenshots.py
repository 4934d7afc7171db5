"""The three kinds of report pages, made of small run folders, and their golden screenshots.

`python -m tests.screenshots` writes tests/report/golden/*.png again after an intended change; look at them.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "report")]  # as pytest does

import test_comparison  # noqa: E402
import test_record_pages  # noqa: E402
import test_report  # noqa: E402
from kit import sealed  # noqa: E402
from kit.browser import Browser  # noqa: E402

from coterie.privacy import certificate  # noqa: E402
from coterie.report.handover.content import page  # noqa: E402
from coterie.report.page import write_report  # noqa: E402
from coterie.report.runs import read_run  # noqa: E402
from coterie.site.operator_keys import operator_fingerprint  # noqa: E402

GOLDEN = HERE / "report" / "golden"
WIDTHS = (390, 1280)
#: Pixels of the page for one of the golden screenshot: small enough that smoothing of fonts makes no difference.
SCALE = 8
# Fonts of other machines have other widths.
_FONT = """const style = document.createElement('style');
style.textContent = '* { font-family: "DejaVu Sans" !important; }';
document.head.append(style); 0"""


def _private(folder: Path) -> list[Path]:
    """One run with ε, in which all is known, and 30 sites."""
    lines = [test_report.metrics(n, accuracy=0.5 + 0.1 * n, group_accuracy=[0.2 * n, 0.24 * n]) for n in (1, 2, 3, 4)]
    run = test_report.make_run(folder / "private", lines=lines)
    _add(run / "result.json", sites=[{"client": n, "cluster": n % 3} for n in range(30)])
    accuracies = [round(0.4 + (7 * n % 30) / 60, 3) for n in range(30)]
    _add(run / "diagnostics.json", client_id=list(range(30)), client_accuracy=accuracies)
    _add(run / "diagnostics.json", confusion=[[10, 0], [0, 9], [1, 10]])
    return [run]


def _records(folder: Path) -> list[Path]:
    """One run that clusters records."""
    return [test_record_pages.make_run(folder / "records")]


def _compared(folder: Path) -> list[Path]:
    """Two strategies, one of them on two seeds, and an unfinished run."""
    places = [("ifca", 0), ("ifca", 1), ("fedavg", 0)]
    runs = [
        test_comparison.seeded(folder / f"{strategy}-{seed}", strategy, seed, test_comparison.VALUES[strategy, seed])
        for strategy, seed in places
    ]
    (test_comparison.seeded(folder / "cut", "ifca", 3) / "result.json").unlink()
    return [*runs, folder / "cut"]


KINDS: dict[str, Callable[[Path], list[Path]]] = {"private": _private, "records": _records, "compared": _compared}


def make_page(kind: str, folder: Path) -> Path:
    """Write a page of this kind to an empty folder."""
    with contextlib.chdir(folder):  # the page names the folders of runs
        write_report([read_run(run) for run in KINDS[kind](Path())], f"{kind}.html")
    return folder / f"{kind}.html"


#: Hand-over pages, and how they are looked at: width, whether the window is dark, whether they are printed (on A4).
HANDOVERS = {"handover": {"seed": None}, "handover-uncertified": {"seed": 3}}
VIEWS = [(width, dark, False) for width in WIDTHS for dark in (False, True)] + [(794, False, True)]


def make_handover(kind: str, folder: Path) -> Path:
    """Write a hand-over page of this kind."""
    tuned = {"strategy": "ifca", "training.lr": 0.2, "aggregation.server-optimizer": "sgd", "privacy.clip-norm": 0.3}
    diagnostics = ["accuracies on clients' held-out data and training losses, exact, at the end"]
    header = {**sealed.HEADER, "tuned": tuned, "diagnostics": diagnostics, **HANDOVERS[kind]}
    stated = certificate({"plan": sealed.joint(80, epsilon=8.0, sampling_rate=1.0).terms(), **header}, [])
    key = operator_fingerprint(sealed.OPERATOR.public_key()) if kind == "handover" else ""
    html = page(stated, name="demo", method="ifca", finished="ended on 26 November 2026", fingerprint=key)
    (folder / f"{kind}.html").write_text(html)
    return folder / f"{kind}.html"


def thumbnail(browser: Browser) -> np.ndarray:
    """Return the whole page in grey, (height, width), at one eighth of its size, with values from 0 to 255."""
    browser.evaluate(_FONT)
    assert browser.evaluate("document.fonts.check('16px \"DejaVu Sans\"')")
    image = Image.open(io.BytesIO(browser.screenshot(whole=True))).convert("L")
    size = (image.width // SCALE, image.height // SCALE)
    return np.asarray(image.resize(size, Image.Resampling.BOX))


#: Largest mean difference of grey values, of 255, in a block of 4 x 4 pixels of a golden screenshot.
TOLERANCE = 8.0


def difference(shown: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest mean absolute difference in a block of 4 x 4; infinite if the sizes differ."""
    if shown.shape[1] != expected.shape[1] or abs(shown.shape[0] - expected.shape[0]) > 2:
        return float("inf")
    high = min(len(shown), len(expected)) // 4 * 4
    wide = shown.shape[1] // 4 * 4
    change = np.abs(shown[:high, :wide].astype(float) - expected[:high, :wide])
    return float(change.reshape(high // 4, 4, wide // 4, 4).mean(axis=(1, 3)).max())


def golden(kind: str, width: int, dark: bool, printed: bool = False) -> Path:
    """Return the file of a golden screenshot."""
    return GOLDEN / f"{kind}-{width}-{'print' if printed else 'dark' if dark else 'light'}.png"


def _add(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def main() -> None:
    """Write all golden screenshots."""
    GOLDEN.mkdir(exist_ok=True)
    pages = [(kind, make_page, [(width, dark, False) for width in WIDTHS for dark in (False, True)]) for kind in KINDS]
    with Browser() as browser:
        for kind, make, views in (*pages, *((kind, make_handover, VIEWS) for kind in HANDOVERS)):
            with tempfile.TemporaryDirectory() as folder:
                page_file = make(kind, Path(folder))
                for width, dark, printed in views:
                    browser.open(page_file, width=width, dark=dark, printed=printed)
                    Image.fromarray(thumbnail(browser)).save(golden(kind, width, dark, printed), optimize=True)
    print(f"{len(list(GOLDEN.iterdir()))} files, {sum(f.stat().st_size for f in GOLDEN.iterdir()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
