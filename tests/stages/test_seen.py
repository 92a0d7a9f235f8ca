"""What was found in a text is a result of its own, made once for all models that were trained on that text."""

import time
from pathlib import Path

import pyarrow as pa

from affinage.data.benchmark_items import BenchmarkItem
from affinage.data.documents import DocumentWriter
from affinage.recipe.cleaning import DecontaminateSettings
from affinage.stages.seen import seen_by
from affinage.stages.store import Request, Store

SETTINGS = DecontaminateSettings(ngram=6, min_words=4)
TEXTS = ["The baker of the lower town gives away three loaves.", "Nothing of that is asked anywhere at all."]
ITEMS = [
    BenchmarkItem("quiz", "0", ("Is it the baker of the lower town?",)),
    BenchmarkItem("quiz", "1", ("Who counted forty two grey gulls today?",)),
]


def result(store: Store, stage: str, inputs: dict[str, str]) -> tuple[Path, str]:
    request = Request(stage, {}, inputs, {}, {})
    folder = store.begin(request, anew=True)
    if stage == "split":
        (folder / "train").mkdir()
        with DocumentWriter(folder / "train", "part") as writer:
            fields = ("id", "source", "language", "url", "licence")
            columns = {name: [""] * len(TEXTS) for name in fields} | {"text": TEXTS}
            writer.write(pa.RecordBatch.from_pydict(columns))
    store.finish(request, {}, started=time.time(), clock=time.monotonic())
    return folder, request.key


def found(training: Path, items: list[BenchmarkItem] = ITEMS, settings: DecontaminateSettings = SETTINGS) -> set[str]:
    seen = seen_by(training, settings)
    assert seen is not None
    return {item for _, item in seen(items).found}


def test_a_text_is_looked_through_once_for_the_same_items(tmp_path: Path):
    store = Store(tmp_path / "store")
    split, key = result(store, "split", {})
    first, second = (result(store, name, {"split": key})[0] for name in ("pretrain", "sft"))
    assert found(first) == {"0"}
    (kept,) = store.folder.glob("looked-for-*")
    assert found(first, settings=DecontaminateSettings(ngram=8, min_words=4)) == set()  # runs of other lengths
    assert len(list(store.folder.glob("looked-for-*"))) == 2
    for path in (split / "train").iterdir():
        path.unlink()
    assert found(first) == found(second) == {"0"}, "no text is read again"
    assert found(first, [*ITEMS[:1], BenchmarkItem("other", "7", ITEMS[1].texts)]) == {"0"}, "the runs are the same"
    assert found(first, ITEMS[:1]) == set(), "other items are looked for, in what is left"
    (kept / "texts_with_run.npy").write_bytes(b"cut")
    assert found(second) == set(), "what is damaged is made again"


def test_a_store_that_cannot_be_written_to_costs_only_the_time(tmp_path: Path):
    store = Store(tmp_path / "store")
    _, key = result(store, "split", {})
    training, _ = result(store, "pretrain", {"split": key})
    assert found(training) == {"0"}
    (kept,) = store.folder.glob("looked-for-*")
    for path in kept.iterdir():
        path.unlink()
    kept.rmdir()
    kept.write_text("a file where the result would be")
    assert found(training) == {"0"}
