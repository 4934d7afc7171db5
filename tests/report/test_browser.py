"""Report pages in a browser: accessibility, console, network, width of a phone, print, golden screenshots."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
from kit.browser import BROKEN_WORDS
from kit.tables import for_rows
from PIL import Image
from screenshots import KINDS, TOLERANCE, WIDTHS, difference, golden, make_page, thumbnail

pytestmark = pytest.mark.slow

# Elements that are wider than their place or leave the window; those inside a region that scrolls are reachable.
CLIPPED = """[...document.querySelectorAll('main *')].filter(each => {
    if (each.closest('.scroll') && !each.matches('.scroll')) return false;
    if (each.closest('.spare') || (each.closest('details:not([open])') && !each.closest('summary'))) return false;
    const box = each.getBoundingClientRect(), svg = each.closest('svg');
    if (svg && each !== svg) {
        const own = svg.getBoundingClientRect();
        return each.tagName === 'text' && (box.left < own.left - 1 || box.right > own.right + 1);
    }
    const scrolls = each.matches('.scroll') && each.scrollWidth > each.clientWidth + 1;
    return scrolls || box.right > innerWidth + 0.5 || box.left < -0.5;
}).map(each => each.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def page(kind, tmp_path_factory):
    return make_page(kind, tmp_path_factory.mktemp(kind))


@for_rows("dark", [False, True])
@for_rows("width", WIDTHS)
def test_axe_finds_nothing_and_the_page_is_silent(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    browser.unfold()
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]
    assert browser.violations() == []


def test_what_axe_the_console_and_the_network_would_tell(browser, tmp_path):
    file = tmp_path / "bad.html"
    file.write_text(
        '<html lang="en"><title>bad</title><main><h1>bad</h1><p style="color: #999; background: #fff">pale</p>'
        "<img src='http://127.0.0.1:9/x.png'><script>console.error('wrong'); missing()</script></main>"
    )
    browser.open(file)
    assert any("wrong" in error for error in browser.errors)
    assert any("missing" in error for error in browser.errors)
    assert "http://127.0.0.1:9/x.png" in browser.requests
    assert {"color-contrast", "image-alt"} <= {each[0] for each in browser.violations()}


def test_nothing_is_clipped_on_a_phone_and_a_tablet(browser, page):
    for width in (961, 768, 390):
        browser.open(page, width=width)
        assert browser.evaluate(CLIPPED) == []
    browser.evaluate("document.querySelector('.tile').style.width = '500px'")
    assert browser.evaluate(CLIPPED) != []


LONG_SETTING = """{
    const row = document.querySelector('.flow dl div');
    row.children[0].textContent = 'first-round-noise-ratio';
    row.children[1].textContent = 'examples.networks:convolutional';
}"""

AS_BEFORE = """{
    const row = document.querySelector('.flow dl div');
    row.style.flexWrap = 'nowrap';
    row.children[1].style.overflowWrap = 'anywhere';
}"""


def test_settings_break_no_words_on_a_phone(browser, page):
    browser.open(page, width=390)
    browser.unfold()
    browser.evaluate(LONG_SETTING)
    assert browser.evaluate(f"{BROKEN_WORDS}.filter(word => word.includes('convolutional'))") == []
    browser.evaluate(AS_BEFORE)
    assert browser.evaluate(f"{BROKEN_WORDS}.filter(word => word.includes('convolutional'))") != []


def test_the_first_screen_has_the_answers(browser, page, kind):
    for width, height in ((1280, 720), (390, 844)):
        browser.open(page, width=width, height=height)
        answers = "'.stack tbody tr'" if kind == "compared" else "'.tiles.four'"
        assert browser.evaluate(f"document.querySelector({answers}).getBoundingClientRect().bottom") < height


def headings_from_the_bottom(pdf: bytes) -> list[float]:
    """Return the distance of each heading from the bottom of its printed page, in points."""
    return [float(y) for y in re.findall(rb"/Dest \[\d+ 0 R /XYZ [\d.]+ ([\d.]+) 0\]", pdf)]


def test_no_heading_is_alone_at_the_end_of_a_printed_page(browser, page):
    browser.open(page)
    number = browser.evaluate("document.querySelectorAll('h1, h2, h3, h4').length")

    def lowest() -> Iterator[float]:
        """Of all headings, for papers of many heights."""
        for height in np.arange(7, 12, 0.25).tolist():
            found = headings_from_the_bottom(browser.pdf(height))
            assert len(found) == number
            yield min(found)

    room = 29 + 32  # points: the margin, the heading, and a line of what follows
    assert all(each > room for each in lowest())
    browser.evaluate("document.querySelectorAll('h1, h2, h3, h4').forEach(each => { each.style.breakAfter = 'auto' })")
    assert any(each < room for each in lowest())


@for_rows("dark", [False, True])
@for_rows("width", WIDTHS)
def test_the_page_looks_as_before(browser, page, kind, width, dark):
    browser.open(page, width=width, dark=dark)
    expected = np.asarray(Image.open(golden(kind, width, dark)))
    assert difference(thumbnail(browser), expected) < TOLERANCE, "see tests/screenshots.py"


CHANGES = {
    "records": ["document.querySelector('.card').style.marginTop = '24px'"],
    "private": [
        "document.querySelector('.panel svg').remove()",
        "document.querySelector('figure').style.marginTop = '24px'",
        "document.querySelectorAll('svg path').forEach(each => { each.style.stroke = 'none' })",
    ],
    "": [
        "document.querySelectorAll('.tile')[3].remove()",
        "document.querySelectorAll('.tile')[1].style.transform = 'translateX(24px)'",
        "document.documentElement.style.setProperty('--card', '#808080')",
    ],
}
CHANGES["compared"] = CHANGES["private"]


@for_rows("width", WIDTHS)
def test_a_change_would_be_seen(browser, page, kind, width):
    for change in CHANGES[kind] + CHANGES[""]:
        browser.open(page, width=width)
        browser.evaluate(f"{{ {change} }}")
        assert difference(thumbnail(browser), np.asarray(Image.open(golden(kind, width, False)))) > TOLERANCE
