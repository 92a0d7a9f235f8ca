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
from typing import TYPE_CHECKING

from affinage.config.data import DecontaminateSettings
from affinage.pipeline.models import made_from
from affinage.pipeline.store import read_request

if TYPE_CHECKING:
    from affinage.data.benchmark_items import BenchmarkItem
    from affinage.data.contamination import Contamination, Occurrences
    from affinage.data.overlap import Items
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
        from affinage.data.contamination import contamination, runs_of

        chosen = settings or DecontaminateSettings()
        runs = runs_of(items, chosen)
        found = []
        if split is not None:
            found.append(_stored(runs, [split], partial(_in_documents, split)))
        if tokenizer is not None:
            found += [_stored(runs, [chat, tokenizer], partial(_in_chats, chat, tokenizer)) for chat in chats]
        return contamination(runs, found, chosen)

    return search


def _in_documents(split: Path, runs: "Items") -> "Occurrences":
    from affinage.data.contamination import look_through, texts_of_documents

    return look_through(texts_of_documents(split / "train"), runs)


def _in_chats(chats: Path, tokenizer: Path, runs: "Items") -> "Occurrences":
    from affinage.data.contamination import look_through, texts_of_rows
    from affinage.data.tokenizer import Tokenizer

    return look_through(texts_of_rows(chats / "train", Tokenizer.load(tokenizer)), runs)


def _stored(runs: "Items", read: list[Path], search: "Callable[[Items], Occurrences]") -> "Occurrences":
    """The counts of a search of the results `read`, from the store if they are there."""
    import numpy as np

    from affinage.data.atomic import write_atomically
    from affinage.data.contamination import Occurrences

    requests = [read_request(folder) for folder in read]
    words = runs.keys.tobytes() + runs.lengths.tobytes()
    key = hashlib.sha256(words + "".join(f"{_VERSION} {request and request[1]}" for request in requests).encode())
    file = read[0].resolve().parent / f"contamination-{key.hexdigest()[:12]}.npz"
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile), np.load(file) as kept:
        if None not in requests and kept["with_run"].shape == runs.keys.shape:
            return Occurrences(int(kept["texts"]), kept["with_run"])
    found = search(runs)
    if None not in requests:
        content = io.BytesIO()
        np.savez(content, texts=found.texts, with_run=found.with_run)
        with contextlib.suppress(OSError):  # another user's store, or another process writes the same
            write_atomically(file, content.getvalue())
    return found
