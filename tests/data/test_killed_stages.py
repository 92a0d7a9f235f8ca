"""Data stages killed with SIGKILL at random moments go on, and end with the same bytes."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from planted_copies import lexicon, random_text, written

from affinage.data.documents import DocumentWriter

PROGRAM = """
import json, sys
from pathlib import Path
from affinage.data.benchmark_items import read_items
from affinage.data.clean import clean
from affinage.data.decontaminate import decontaminate
from affinage.recipe.cleaning import CleanSettings, DecontaminateSettings
stage, documents, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
print("begins", flush=True)
tell = lambda share: print(share, flush=True)
if stage == "clean":
    settings = CleanSettings(min_language_probability=0.1, mixed_languages=True, gopher={}, mask={})
    summary = clean(documents, folder, settings, ("en", "fr"), progress=tell)
else:
    items = read_items(str(documents / "items.txt"))
    summary = decontaminate(documents, folder, DecontaminateSettings(action="cut"), items, progress=tell)
(folder / "summary.json").write_text(json.dumps(summary | {"seconds": 0}))
"""


def start(stage: str, documents: Path, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, stage, str(documents), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(*arguments) -> dict[str, str]:
    process = start(*arguments)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    folder = arguments[-1]
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


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


@pytest.mark.parametrize("stage", ["clean", "decontaminate"])
def test_kills_change_nothing(stage, documents, tmp_path):
    undisturbed = finish(stage, documents, tmp_path / "undisturbed")
    draw = random.Random(1)
    for kill in range(2):
        process = start(stage, documents, tmp_path / "killed")
        for _ in range(2 + 5 * kill):  # so many lines of progress, and a moment more
            process.stdout.readline()
        time.sleep(draw.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert finish(stage, documents, tmp_path / "killed") == undisturbed
    summary = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert summary["documents_in"] == 12 * 40 and summary["documents_out"] > 0
