"""Data stages that are interrupted go on with what is missing, and end with the same bytes."""

import random
from pathlib import Path

import pytest
from planted_copies import lexicon, random_text, written

from affinage.config.data import DecontaminateSettings, FilterSettings
from affinage.data.benchmark_items import read_items
from affinage.data.decontaminate import decontaminate
from affinage.data.executor import Executor
from affinage.data.filters import filter_documents
from source_forms import write_documents


def run(stage: str, documents: Path, folder: Path, progress=None) -> tuple[dict, dict[str, bytes]]:
    """The summary of a stage over the documents, and what is in its files."""
    told = {"progress": progress, "executor": Executor(1)}
    if stage == "filter":
        settings = FilterSettings(language_threshold=0.1, mixed_languages=True)
        summary = filter_documents(documents, folder, settings, ("en", "fr"), **told)
    else:
        items = read_items(str(documents / "items.txt"))
        summary = decontaminate(documents, folder, DecontaminateSettings(action="cut"), items, **told)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return summary | {"seconds": 0}, {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize("stage", ["filter", "decontaminate"])
def test_interruptions_change_nothing_and_finished_work_is_kept(stage: str, tmp_path: Path):
    rng = random.Random(0)
    words = lexicon(500, rng)
    texts = [written(random_text(words, rng.randint(10, 200), rng)) + " me@here.org" for _ in range(60)]
    items = [written(random_text(words, 15, rng)) for _ in range(5)]
    texts[::5] = [f"{text} {items[k % 5]}" for k, text in enumerate(texts[::5])]
    folder = write_documents(tmp_path / "documents", [{"text": text} for text in texts], files=6)
    (folder / "items.txt").write_text("\n".join(items))
    undisturbed = run(stage, folder, tmp_path / "undisturbed")
    seen = []

    def dying(share: float) -> None:
        seen.append(share)
        if len(seen) in (2, 6):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(stage, folder, tmp_path / "out", dying)
        assert len(list((tmp_path / "out").glob("completions/*.json"))) > 1
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.parquet")}
    assert run(stage, folder, tmp_path / "out") == undisturbed and undisturbed[0]["documents_out"] > 0
    assert stage != "filter" or (before and all(path.stat().st_mtime_ns == time for path, time in before.items()))
