"""Data stages killed with SIGKILL at any moment go on, and end with the same bytes."""

import hashlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from planted_copies import lexicon, random_text, written

from affinage.data.benchmark_items import read_items
from affinage.data.clean import clean
from affinage.data.decontaminate import decontaminate
from affinage.data.documents import DocumentWriter
from affinage.recipe.cleaning import CleanSettings, DecontaminateSettings

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_killed_stages import run
run(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), progress=lambda share: print(share, flush=True))
"""


def run(stage: str, documents: Path, folder: Path, progress=None) -> dict:
    """A stage over the documents; its summary."""
    if stage == "clean":
        settings = CleanSettings(min_language_probability=0.1, mixed_languages=True, gopher={}, mask={})
        return clean(documents, folder, settings, ("en", "fr"), progress=progress)
    settings, items = DecontaminateSettings(action="cut"), read_items(str(documents / "items.txt"))
    return decontaminate(documents, folder, settings, items, progress=progress)


def finished(stage: str, documents: Path, folder: Path) -> tuple[dict, dict[str, str]]:
    """The summary of a stage that is run to its end, and what is in its files."""
    summary = run(stage, documents, folder) | {"seconds": 0}
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return summary, {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    rng = random.Random(0)
    words = lexicon(500, rng)
    items = [written(random_text(words, 15, rng)) for _ in range(30)]
    (folder / "items.txt").write_text("\n".join(items))
    for part in range(12):
        with DocumentWriter(folder, f"documents-{part:05d}") as writer:
            for k in range(40):
                text = written(random_text(words, rng.randint(10, 200), rng))
                text += " " + items[k % 30] if k % 5 == 0 else ""
                writer.add(id=f"{part}.{k}", source="s", text=text + " me@here.org")
    return folder


MORE = [("clean", (2, 7)), ("decontaminate", (2, 7)), ("decontaminate", (1, 12))]
CASES = [("clean", (3,)), *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]


@pytest.mark.parametrize(("stage", "kills"), CASES)
def test_kills_change_nothing(stage, kills, documents, tmp_path):
    undisturbed = finished(stage, documents, tmp_path / "undisturbed")
    draw = random.Random(1)
    for lines in kills:  # of progress, and a moment more
        command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), stage, documents, tmp_path / "killed"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(lines):
                assert process.stdout.readline()
            time.sleep(draw.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
    assert finished(stage, documents, tmp_path / "killed") == undisturbed
    assert undisturbed[0]["documents_in"] == 12 * 40 and undisturbed[0]["documents_out"] > 0
