"""The pictures of the README come from a script that works, and are small."""

import importlib.util
import re
from pathlib import Path

import pytest
from PIL import Image

from affinage.hub.card import CardFacts
from affinage.hub.export import export
from browser import EXECUTABLE
from tiny_models import tiny_llama

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
NAMES = {"report.png", "report-phone.png", "plan.png", "chat.png"}


def test_the_pictures_of_the_docs_are_there_and_small():
    files = {file.name: file.stat().st_size for file in IMAGES.glob("*.png")}
    assert set(files) >= NAMES and sum(files.values()) < 600_000, files
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/([\w-]+\.png)", page.read_text())}
    assert shown == set(files), "each is shown, and none is missing"


@pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_the_script_makes_them(tmp_path):
    loader = importlib.util.spec_from_file_location("screenshots", ROOT / "tools" / "screenshots.py")
    screenshots = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(screenshots)
    synthetic = importlib.util.spec_from_file_location("made_up", ROOT / "tests" / "report" / "synthetic_run.py")
    made_up = importlib.util.module_from_spec(synthetic)
    synthetic.loader.exec_module(made_up)
    export(tiny_llama(), tmp_path / "model", facts=CardFacts("mit"), chat=True)
    sizes = screenshots.main(made_up.build_run(tmp_path, steps=300), tmp_path / "out", str(tmp_path / "model"))
    assert set(sizes) == NAMES
    for name in NAMES:
        picture = Image.open(tmp_path / "out" / name).convert("L")
        dark, light = picture.getextrema()
        assert light - dark > 150 and len(picture.getcolors(256) or ()) > 8, f"{name} is blank"
        assert min(picture.size) >= 380
