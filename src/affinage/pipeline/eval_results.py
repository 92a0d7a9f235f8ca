"""The search of a model's training text for the items of benchmarks."""

import contextlib
import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from affinage.config.data import DecontaminateSettings
from affinage.data.decontaminate import Contamination, contamination, count_occurrences, texts_of_rows
from affinage.data.documents import read_documents
from affinage.data.json_files import write_atomically
from affinage.data.overlap import BenchmarkItem, ItemIndex
from affinage.data.tokenizer import Tokenizer
from affinage.evaluation.results import Search
from affinage.pipeline import models
from affinage.pipeline.store import read_request

_VERSION = 1  # of the code that searches the training text


def contamination_search(training: Path, settings: DecontaminateSettings | None = None) -> Search | None:
    """What finds items in the documents and conversations of a training and of those before it; None if there are none.

    `settings` decide what is a match; by default they are those of decontamination. A search of a corpus takes long, so
    its counts are stored for every other model that was trained on the same text.
    """
    split, tokenizer = models.made_from(training, "split"), models.made_from(training, "train-tokenizer")
    chats = [models.made_from(training, step) for step in ("sft-data", "preference-data")]
    sources = [[split]] if split is not None else []
    sources += [[chat, tokenizer] for chat in chats if chat is not None and tokenizer is not None]

    def count(index: ItemIndex, source: list[Path]) -> tuple[int, np.ndarray]:
        keys = [request.key for folder in source if (request := read_request(folder)) is not None]
        words = index.keys.tobytes() + index.lengths.tobytes()
        digest = hashlib.sha256(words + " ".join([str(_VERSION), *keys]).encode()).hexdigest()
        file = source[0].resolve().parent / f"contamination-{digest[:12]}.npz"
        if file.is_file():
            with np.load(file) as stored:
                return int(stored["texts"]), stored["with_run"]
        train = source[0] / "train"
        texts: Iterable[pa.Array]
        if len(source) == 1:
            texts = (batch.column("text") for batch in read_documents(train, ["text"]))
        else:
            texts = texts_of_rows(train, Tokenizer(source[1]))
        (texts_read, with_run), content = count_occurrences(texts, index), io.BytesIO()
        np.savez(content, texts=texts_read, with_run=with_run)
        with contextlib.suppress(OSError):  # the store may be another user's
            write_atomically(file, content.getvalue())
        return texts_read, with_run

    def search(items: Iterable[BenchmarkItem]) -> Contamination:
        index = ItemIndex(items, (settings or DecontaminateSettings()).n_grams)
        return contamination(index, [count(index, source) for source in sources])

    return search if sources else None
