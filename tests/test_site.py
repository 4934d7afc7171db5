"""The documentation: the site builds without warnings and loads nothing from elsewhere; links are right on GitHub."""

import importlib
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser

import odds
import pytest
from kit.browser import BROKEN_WORDS
from kit.documented import ROOT, hook
from kit.tables import for_rows

from coterie.strategies.registry import STRATEGIES

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; every warning fails."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Resources(HTMLParser):
    """What a browser loads for a page by itself."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.found += [values[name] for name in ("src", "srcset", "poster", "data") if values.get(name)]
        if tag == "link" and values.get("href"):
            self.found.append(values["href"])


def test_resources_are_found():
    text = '<link href="https://a/b.css"><script src="//c/d.js"></script><img src="e.png"><a href="https://f">'
    assert Resources(text).found == ["https://a/b.css", "//c/d.js", "e.png"]


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    outside = re.compile(r"(?:https?:)?//")
    for page in pages:
        assert [each for each in Resources(page.read_text()).found if outside.match(each)] == [], page
    styles = list(site.rglob("*.css"))
    assert styles
    for style in styles:
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style


@pytest.mark.slow
@for_rows("page", ["index.html", "strategies/ifca.html", "reference/coterie.privacy.html"])
def test_pages_opened_as_files_are_silent_and_searchable(browser, site, page):
    first = "document.querySelector('.md-search-result__item a')?.textContent ?? ''"
    browser.open(site / page)
    assert browser.errors == []
    browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    browser.call("Input.insertText", text="multi-krum")
    deadline = time.monotonic() + 30
    while "krum" not in browser.evaluate(first).lower() and time.monotonic() < deadline:
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="m")  # the page searches when a key is released
        time.sleep(0.1)
    assert "krum" in browser.evaluate(first).lower()
    assert browser.errors == []
    assert [each for each in browser.requests if not each.startswith(("file:", "data:", "about:", "blob:"))] == []


@pytest.mark.slow
def test_settings_are_whole_words_on_a_phone(browser, site):
    browser.open(site / "settings.html", width=390)
    broken = f"{BROKEN_WORDS}.filter(word => /^[a-z]+$/.test(word))"
    assert browser.evaluate(broken) == []
    browser.evaluate("document.querySelectorAll('td code').forEach(each => { each.style.wordBreak = 'break-all' })")
    assert "clusters" in browser.evaluate(broken)


@pytest.mark.slow
def test_commands_in_lists_are_code(site):
    text = (site / "deployment.html").read_text()
    assert "docker compose build\ndocker compose up --detach --wait\n" in text
    assert not re.search(r"^\d\. ", text, re.MULTILINE), "a list ended early"


def test_lists_are_indented_for_the_site():
    source = "1. a\n   b\n\n       code\n\n   c\n2. d\n   - e\n     f\n3. g\n\nh\n\n    - code\n"
    wanted = "1. a\n    b\n\n        code\n\n    c\n\n2. d\n    - e\n        f\n3. g\n\nh\n\n    - code"
    assert hook("links").indented(source) == wanted


@pytest.mark.slow
def test_every_method_has_a_page(site):
    for name, method in STRATEGIES.items():
        text = (site / "strategies" / f"{name}.html").read_text()
        assert re.search(r"(?:>|^) *\d{1,2}  \w", text, re.MULTILINE), f"{name}: no pseudo-code"
        for setting in method.settings_class.declared().values():
            assert f"<code>{setting.name}</code>" in text
    shown = (site / "strategies" / "ifca.html").read_text()
    table = (ROOT / "docs" / "results.md").read_text().partition("<!-- rr-table1 -->")[2]
    (row,) = re.findall(r"^\| IFCA \+ re-seeding, certified \| ([^|]+) \|", table.partition("<!-- end -->")[0], re.M)
    assert row in shown  # Table 1, balanced, epsilon = 2
    assert "DP-FedAvg" not in shown


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    reference = hook("reference")
    assert {"coterie", "coterie.inference", "coterie.privacy", "coterie.strategies"} < set(reference.packages())
    for package in reference.packages():
        text = (site / "reference" / f"{package}.html").read_text()
        for name in reference.exports(importlib.import_module(package)):
            assert re.search(rf"\b{name}\b", text), f"{package}.{name}"


@pytest.mark.slow
def test_the_odds_are_computed():
    assert odds.page() == odds.PAGE.read_text(), "make settings"


def test_an_attack_is_bounded_by_the_definition():
    """Randomised response at ε: of 1/(1 + e^ε) innocent accused, e^ε/(1 + e^ε) are found, and no more."""
    innocent = 1 / (1 + odds.math.exp(2))
    assert odds.most_found([(2, 0)], innocent) == pytest.approx(1 - innocent)
    assert odds.most_found([(2, 0)], 0.01) == pytest.approx(0.01 * odds.math.exp(2))
    assert odds.most_found([(2, 0)], 0.5) == pytest.approx(1 - 0.5 * odds.math.exp(-2))
    assert odds.most_found([(0, 0)], 0.3) == pytest.approx(0.3)
    assert odds.most_found([(0, 0.1)], 0.3) == pytest.approx(0.4)
    assert odds.most_found([(8, 1e-5), (0, 0.1)], 0.3) == pytest.approx(0.4)


# ---- links on GitHub ------------------------------------------------------------------------------------------


def anchors(path):
    """Of the headings of a page, as GitHub names them."""
    text = re.sub(r"^( {4}|```).*$", "", path.read_text(), flags=re.MULTILINE)
    heads = [re.sub(r"[`*]|\]\(.*?\)|\[", "", head) for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@for_rows("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_are_right(page):
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
