"""Chromium through its DevTools protocol, for tests of pages and for screenshots; standard library only."""

from __future__ import annotations

import base64
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

#: The program; None where it is missing.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe", "--no-first-run"),
    *("--force-device-scale-factor=1", "--font-render-hinting=none", "--disable-background-networking"),
    *("--force-color-profile=srgb", "--disable-lcd-text", "--disable-dev-shm-usage"),
)
_TIMEOUT = 180.0
#: Words, or parts of them between hyphens, that stand in two lines; not those in figures and in regions that scroll.
BROKEN_WORDS = r"""[...document.querySelectorAll('main *')].flatMap(each => [...each.childNodes])
    .filter(node => node.nodeType === 3 && !node.parentElement.closest('svg, .scroll'))
    .flatMap(node => [...node.data.matchAll(/[^\s\-\u2011]+/g)].filter(word => {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        return new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1;
    }).map(word => word[0]))"""

# Resolves when the last change is painted; a busy machine takes a moment.
_PAINTED = """document.fonts.ready.then(() => new Promise(done => {
    requestAnimationFrame(() => requestAnimationFrame(() => done(true)));
}))"""


class Browser:
    """One page of a headless browser; a context manager.

    Attributes:
        errors: messages of the console and of the page that are errors or warnings, since :meth:`open`.
        requests: addresses that the page requested, since :meth:`open`.
    """

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None, "chromium is not installed"
        self._profile = tempfile.TemporaryDirectory()
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        words = [CHROMIUM, *_OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        command = f"exec {shlex.join(words)} 3<&{theirs_in} 4>&{theirs_out}"
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._out)
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        for _ in range(20):  # its children leave a moment later
            shutil.rmtree(self._profile.name, ignore_errors=True)
            if not os.path.exists(self._profile.name):
                break
            time.sleep(0.1)
        self._profile._finalizer.detach()  # type: ignore[attr-defined]

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, printed: bool = False
    ) -> None:
        """Open a file in a window of this size, or as it is printed."""
        self.errors, self.requests = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="print" if printed else "", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self.evaluate("document.readyState + location.href") != "complete" + path.resolve().as_uri():
            time.sleep(0.02)

    def evaluate(self, script: str) -> Any:
        """Return the JSON value of a JavaScript expression, or of its promise."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def unfold(self) -> None:
        """Open everything that is folded."""
        self.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")

    def violations(self) -> list[list[str]]:
        """Return what axe finds inaccessible: its rule, and the elements."""
        import axe_core_python

        self.evaluate((Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8") + "; 0")
        elements = "found.violations.map(each => [each.id, ...each.nodes.map(n => n.html)])"
        return list(self.evaluate(f"axe.run(document).then(found => {elements})"))

    def screenshot(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """Return a PNG of the window, or of the whole page, and write it to ``path``."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        self.evaluate(_PAINTED)
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        content = base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])
        if path is not None:
            path.write_bytes(content)
        return content

    def pdf(self, height: float = 11.69) -> bytes:
        """Print the page on paper as wide as A4, of a height in inches; the outline of the PDF has its headings."""
        options = {
            "paperWidth": 8.27,
            "paperHeight": height,
            "generateTaggedPDF": True,
            "generateDocumentOutline": True,
        }
        return base64.b64decode(self.call("Page.printToPDF", **options)["data"])

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"chromium did not answer for {_TIMEOUT:.0f} s")
            received = os.read(self._in, 1 << 20)
            if not received:
                raise RuntimeError(f"chromium ended with status {self._process.wait()}")
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, about: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
