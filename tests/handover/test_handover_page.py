"""The hand-over page in a browser: accessibility, console, network, width of a phone, paper, golden screenshots."""

import re

import numpy as np
import pytest
from kit.browser import BROKEN_WORDS
from PIL import Image
from screenshots import HANDOVERS, TOLERANCE, VIEWS, difference, golden, make_handover, thumbnail

pytestmark = pytest.mark.slow

# What leaves the window.
RIGHT = "each.getBoundingClientRect().right"
OUTSIDE = f"[...document.querySelectorAll('main *')].filter(each => {RIGHT} > innerWidth + 0.5).length"


@pytest.fixture(scope="module", params=HANDOVERS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def page(kind, tmp_path_factory):
    return make_handover(kind, tmp_path_factory.mktemp(kind))


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_and_the_page_is_silent(browser, page, view):
    width, dark, printed = view
    browser.open(page, width=width, dark=dark, printed=printed)
    browser.unfold()
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]
    assert browser.violations() == []


def test_no_word_is_broken_and_nothing_is_clipped_on_a_phone(browser, page):
    for width in (961, 768, 390):
        browser.open(page, width=width)
        browser.unfold()
        assert (browser.evaluate(BROKEN_WORDS), browser.evaluate(OUTSIDE)) == ([], 0)
    browser.evaluate("document.querySelector('h1').textContent = 'a'.repeat(80); 0")
    assert browser.evaluate(BROKEN_WORDS) != []


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_looks_as_before(browser, page, kind, view):
    width, dark, printed = view
    browser.open(page, width=width, dark=dark, printed=printed)
    expected = np.asarray(Image.open(golden(kind, *view)))
    assert difference(thumbnail(browser), expected) < TOLERANCE, "see tests/screenshots.py"
    browser.open(page, width=width, dark=dark, printed=printed)
    browser.evaluate("document.querySelectorAll('.head')[0].style.marginTop = '90px'; 0")
    assert difference(thumbnail(browser), expected) > TOLERANCE


def test_the_printed_page_has_few_sheets_and_all_that_is_folded(browser, page, kind):
    browser.open(page)
    printed = browser.pdf()
    assert printed.startswith(b"%PDF-")
    assert 1 <= len(re.findall(rb"/Type /Page\b", printed)) <= (3 if kind == "handover" else 1)
    browser.open(page, width=794, printed=True)
    if kind == "handover":
        assert browser.evaluate("document.querySelector('details li').getBoundingClientRect().height") > 0
