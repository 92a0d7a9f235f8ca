"""Makes the pictures of the README from a run: `make screenshots`, or

    python tools/screenshots.py runs/quickstart docs/images

Its report on a desk and, dark, on a phone; the chat page of `affinage serve` with an answer of its model; and a plan as
the terminal shows it. Needs Chromium (Debian: apt-get install chromium).
"""

import contextlib
import html
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from affinage.report import write_report
from browser import Browser, browser

QUESTION = "What is the currency of Japan?"
PLAN = ("plan", "julian-600m", "--on", "v4-32")
AFFINAGE = (sys.executable, "-m", "affinage")
COLOURS = 256  # of a picture: enough for text and curves, and half the bytes
_SHORTENED = """
const shown = {data: ['.key', '.funnel'], pretrain: ['figure:first-of-type'], scores: ['figure:first-of-type']};
for (const section of document.querySelectorAll('main > section')) {
  const kept = (shown[section.id] || []).map(part => section.querySelector(part));
  for (const part of [...section.children])
    if (!kept.includes(part) && (part.tagName !== 'H2' || !kept.length)) part.remove();
  if (!kept.length) section.remove();
}
document.querySelector('footer').remove();
"""
_TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #15171b; color: #e9e8e3; }}
pre {{ margin: 0; padding: 22px 26px; font: 13px/1.5 "DejaVu Sans Mono", monospace; display: inline-block;
       max-width: 110ch; white-space: pre-wrap; }}
b {{ color: #e5ac57; font-weight: 500; }}
</style><pre><b>$</b> {command}

{output}</pre>"""


def main(run: Path, folder: Path, model: str = "") -> dict[str, int]:
    """Write all pictures into `folder`; `model` talks (default: the run's own). Returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with browser() as page, tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.html"
        write_report(run, report, "en")
        keep(folder / "report.png", _in_short(page, report))
        keep(folder / "report-phone.png", _seen(page, report, 390, 1100, dark=True))
        keep(folder / "plan.png", _terminal(page, PLAN, Path(scratch)))
        with served(model or run.name, run.parent) as address:
            keep(folder / "chat.png", _conversation(page, address))
    return {file.name: file.stat().st_size for file in sorted(folder.glob("*.png"))}


def keep(file: Path, png: bytes) -> None:
    """Write a picture with few colours."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)


def _in_short(page: Browser, file: Path) -> bytes:
    """The head of a report, its funnel, the loss and the scores; all other parts are taken out."""
    page.open(file, 1280)
    page.evaluate(_SHORTENED)
    return page.screenshot()


def _seen(page: Browser, file: Path, width: int, height: int, *, dark: bool = False) -> bytes:
    page.open(file, width, height, dark=dark, touch=width < 500)
    return page.screenshot(whole=False)


def _terminal(page: Browser, words: Sequence[str], scratch: Path) -> bytes:
    """What a verb prints, as a terminal shows it."""
    told = subprocess.run([*AFFINAGE, *words], capture_output=True, text=True, check=True, env=_quiet(COLUMNS="110"))
    file = scratch / "terminal.html"
    command = html.escape("affinage " + " ".join(words))
    file.write_text(_TERMINAL.format(command=command, output=html.escape(told.stdout.rstrip())), encoding="utf-8")
    page.open(file, 1000, 100)
    size = page.evaluate(
        "(r => [Math.ceil(r.width), Math.ceil(r.height)])(document.querySelector('pre').getBoundingClientRect())"
    )
    page.open(file, *size)
    return page.screenshot(whole=False)


def _conversation(page: Browser, address: str) -> bytes:
    page.open(address, 720, 420)
    page.wait_for("document.title.includes('·')")
    page.evaluate("document.getElementById('message').focus()")
    page.type(QUESTION)
    page.wait_for("document.querySelector('.said.assistant[aria-busy=\"false\"]') !== null")
    return page.screenshot(whole=False)


@contextlib.contextmanager
def served(model: str, runs: Path) -> Iterator[str]:
    """The address of a page that talks with the model."""
    command = [*AFFINAGE, "serve", model, "--runs", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_quiet(AFFINAGE_API_KEY="")) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r"^(http\S+/) is a page", line) for line in process.stdout)), None)
            if found is None:
                raise SystemExit(f"{model} could not be served")
            yield found[1]
        finally:
            process.terminate()


def _quiet(**more: str) -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu", "NO_COLOR": "1"} | more


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    for name, size in main(Path(sys.argv[1]), *map(Path, sys.argv[2:3]), *sys.argv[3:]).items():
        print(f"{name:<20}{size / 1000:8.1f} kB")
