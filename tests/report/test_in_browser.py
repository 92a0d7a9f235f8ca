"""The page as a browser shows it."""

from pathlib import Path

import pytest

from affinage.report import write_report
from browser import EXECUTABLE, Browser

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]

OVERFLOWING = """[...document.querySelectorAll('main *, header *')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !e.closest('.scroll') && !e.closest('pre');
}).map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def report(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("report") / "report.html"
    write_report(made, page, "fr")
    return page


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_shown_without_trouble_at_every_width(chromium: Browser, report: Path, width: int, dark: bool):
    chromium.open(report, width, dark=dark, touch=width < 500)
    chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert chromium.evaluate("document.documentElement.scrollWidth") == width, "the page scrolls sideways"
    assert chromium.evaluate(OVERFLOWING) == []
    assert chromium.evaluate("document.title") == "synthetic · affinage", "a document's script ran"
    assert chromium.troubles == []
    assert set(chromium.requests) == {report.resolve().as_uri()}


def test_pointing_at_a_curve_shows_its_values(chromium: Browser, report: Path):
    chromium.open(report, 1280)
    pointed = """(() => {
      const svg = document.querySelector('#pretrain figure svg.chart'), box = svg.getBoundingClientRect();
      const at = {clientX: box.left + box.width / 2, clientY: box.top + 50, bubbles: true};
      svg.dispatchEvent(new PointerEvent('pointermove', at));
      const tip = svg.closest('figure').querySelector('.tip'), shown = tip.hidden ? '' : tip.innerText;
      svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
      return [shown, tip.innerText];
    })()"""
    first, second = chromium.evaluate(pointed)
    assert first.startswith("pas ") and "entraînement" in first
    assert second.startswith("pas ") and second != first
