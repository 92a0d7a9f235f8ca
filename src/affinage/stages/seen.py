"""The text that a model was trained on, as far as it is here, and which items of benchmarks stand in it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from affinage.recipe.cleaning import DecontaminateSettings
from affinage.stages.models import made_from

if TYPE_CHECKING:
    import pyarrow as pa

    from affinage.data.benchmark_items import BenchmarkItem
    from affinage.data.contamination import Contamination
    from affinage.evaluation.run import Seen

_TUNED_ON = ("conversations", "preferences")  # stages whose rows a tuning reads


def seen_by(training: Path, settings: DecontaminateSettings | None = None) -> "Seen | None":
    """What finds items in the documents and conversations of a training and of those before it; None if there are none.

    `settings` say what is a match; by default it is what decontamination takes for one.
    """
    split, tokenizer = made_from(training, "split"), made_from(training, "tokenizer")
    rows = [folder for stage in _TUNED_ON if (folder := made_from(training, stage)) is not None]
    if split is None and not (rows and tokenizer):
        return None

    def texts() -> "Iterator[pa.Array]":
        from affinage.data.contamination import texts_of_documents, texts_of_rows
        from affinage.data.tokenizer import Tokenizer

        if split is not None:
            yield from texts_of_documents(split / "train")
        if tokenizer is not None:
            for folder in rows:
                yield from texts_of_rows(folder / "train", Tokenizer.load(tokenizer))

    def seen(items: "Iterable[BenchmarkItem]") -> "Contamination":
        from affinage.data.contamination import find_contamination

        return find_contamination(items, texts(), settings or DecontaminateSettings())

    return seen
