"""What was found in a text is a result of its own, made once for all models that were trained on that text."""

from pathlib import Path

from affinage.config.data import DecontaminateSettings
from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.documents import document_files, read_documents
from affinage.pipeline.contamination import contamination_search

SETTINGS = DecontaminateSettings(n_grams=6, min_words=4)
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
    (kept,) = (own_runs / "store").glob("contamination-*")
    assert found(pretrain, items, DecontaminateSettings(n_grams=8, min_words=8)) == set()  # runs of other lengths
    assert len(list((own_runs / "store").glob("contamination-*"))) == 2
    for path in document_files(run / "split/train"):
        path.unlink()
    assert found(pretrain, items) == found(tuned, items) == {"0"}, "no text is read again"
    assert found(pretrain, items[:1]) == set(), "other items are looked for, in what is left"
    kept.write_bytes(b"cut")
    assert found(tuned, items) == set(), "what is damaged is made again"


def test_a_store_that_cannot_be_written_to_costs_only_the_time(own_runs: Path):
    training, items = (own_runs / "tiny/pretrain").resolve(), [in_text(own_runs / "tiny"), UNSEEN]
    assert found(training, items) == {"0"}
    (kept,) = (own_runs / "store").glob("contamination-*")
    kept.unlink()
    kept.mkdir()  # where the file would be
    assert found(training, items) == {"0"}
