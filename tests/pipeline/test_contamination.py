"""What was found in a text is a result of its own, made once for all models that were trained on that text."""

from pathlib import Path

from affinage.config.data import DecontaminateSettings
from affinage.data.documents import document_files, read_documents
from affinage.data.overlap import BenchmarkItem
from affinage.pipeline.eval_results import contamination_search

SETTINGS = DecontaminateSettings(n_grams=6)
UNSEEN = BenchmarkItem("quiz", "1", ("Who counted forty two grey gulls today?",))


def found(training: Path, items: list[BenchmarkItem], settings: DecontaminateSettings = SETTINGS) -> set[str]:
    seen = contamination_search(training, settings)
    assert seen is not None
    return {item for _, item in seen(items).found}


def in_text(run: Path) -> BenchmarkItem:
    text = next(row["text"] for batch in read_documents(run / "split/train") for row in batch.to_pylist())
    return BenchmarkItem("quiz", "0", (" ".join(text.split()[:7]),))


def test_a_text_is_looked_through_once_for_the_same_items(own_runs: Path):
    run = own_runs / "tiny"
    items = [in_text(run), UNSEEN]
    pretrain, tuned = ((run / training).resolve() for training in ("pretrain", "sft"))
    assert found(pretrain, items) == {"0"}
    assert len(list((own_runs / "store").glob("contamination-*"))) == 1
    assert found(pretrain, items, DecontaminateSettings(n_grams=8)) == set()  # runs of other lengths
    assert len(list((own_runs / "store").glob("contamination-*"))) == 2
    for path in document_files(run / "split/train"):
        path.unlink()
    assert found(pretrain, items) == found(tuned, items) == {"0"}, "no text is read again"
    assert found(pretrain, items[:1]) == set(), "other items are looked for, in what is left"
