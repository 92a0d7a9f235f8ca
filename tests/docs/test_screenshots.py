"""The pictures of the README come from a script that works."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from browser import EXECUTABLE

TESTS = Path(__file__).parents[1]


def module(path: Path) -> ModuleType:
    loader = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(found)
    return found


@pytest.mark.full
@pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_the_script_makes_them(tiny_runs: Path, tmp_path: Path):
    run = module(TESTS / "report" / "synthetic_run.py").build_run(tmp_path)
    model = str(tiny_runs / "tiny" / "export" / "model")
    made = module(TESTS.parent / "tools" / "screenshots.py").main(run, tmp_path / "out", model)
    assert set(made) == {"report.png", "report-phone.png", "plan.png", "chat.png"}
    for name in made:
        dark, light = Image.open(tmp_path / "out" / name).convert("L").getextrema()
        assert light - dark > 150, f"{name} is blank"
