"""Which items of benchmarks are in the text that a model was trained on, as far as that text is here.

A search of a corpus takes long. So its counts are stored, under a hash of the words that were searched and of the text,
and are found again for every model that was trained on the same text.
"""

import contextlib
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affinage.config.data import DecontaminateSettings
from affinage.pipeline.models import made_from
from affinage.pipeline.store import read_request

if TYPE_CHECKING:
    from affinage.data.benchmark_items import BenchmarkItem
    from affinage.data.contamination import Contamination, Occurrences
    from affinage.data.overlap import ItemIndex
    from affinage.evaluation.run import Seen

_VERSION = 1  # of the code that searches


def contamination_search(training: Path, settings: DecontaminateSettings | None = None) -> "Seen | None":
    """What finds items in the documents and conversations of a training and of those before it; None if there are none.

    `settings` decide what is a match; by default they are those of decontamination.
    """
    split, tokenizer = made_from(training, "split"), made_from(training, "train-tokenizer")
    chats = [folder for step in ("sft-data", "preference-data") if (folder := made_from(training, step)) is not None]
    if split is None and not (chats and tokenizer):
        return None

    def search(items: "Iterable[BenchmarkItem]") -> "Contamination":
        from affinage.data.contamination import contamination, texts_of_documents, texts_of_rows
        from affinage.data.overlap import ItemIndex
        from affinage.data.tokenizer import Tokenizer

        def of_chats(chat: Path, tokenizer: Path) -> "Iterable[Any]":
            return texts_of_rows(chat / "train", Tokenizer(tokenizer))

        chosen = settings or DecontaminateSettings()
        index, found = ItemIndex(items, chosen), []
        if split is not None:
            found.append(_counted(index, [split], lambda: texts_of_documents(split / "train")))
        if tokenizer is not None:
            found += [_counted(index, [chat, tokenizer], partial(of_chats, chat, tokenizer)) for chat in chats]
        return contamination(index, found, chosen)

    return search


def _counted(index: "ItemIndex", read: list[Path], texts: Callable[[], Any]) -> "Occurrences":
    """The counts of a search of texts of the results `read`, from the store if they are there."""
    import numpy as np

    from affinage.data.atomic import write_atomically
    from affinage.data.contamination import Occurrences, count_occurrences

    keys = [request[1] for folder in read if (request := read_request(folder)) is not None]
    words = index.keys.tobytes() + index.lengths.tobytes()
    digest = hashlib.sha256(words + " ".join([str(_VERSION), *keys]).encode()).hexdigest()
    file = read[0].resolve().parent / f"contamination-{digest[:12]}.npz"
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(file) as kept:
        if len(keys) == len(read) and kept["with_run"].shape == index.keys.shape:
            return Occurrences(int(kept["texts"]), kept["with_run"])
    found = count_occurrences(texts(), index)
    if len(keys) == len(read):
        content = io.BytesIO()
        np.savez(content, texts=found.texts, with_run=found.with_run)
        with contextlib.suppress(OSError):  # another user's store, or another process writes the same
            write_atomically(file, content.getvalue())
    return found
