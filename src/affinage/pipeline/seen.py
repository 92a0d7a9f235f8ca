"""The text that a model was trained on, as far as it is here, and which items of benchmarks stand in it.

Looking through a corpus takes long, so what was found in it is a result like a stage's: addressed by the runs of words
that were looked for and the text, and not made again, for whatever model that was trained on the same text.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from affinage.config.data import DecontaminateSettings
from affinage.pipeline.models import made_from
from affinage.pipeline.store import Request, Store, read_request
from affinage.results import RESULT, read_json

if TYPE_CHECKING:
    from affinage.data.benchmark_items import BenchmarkItem
    from affinage.data.contamination import Contamination, Occurrences
    from affinage.data.overlap import Items
    from affinage.evaluation.run import Seen

_TUNED_ON = ("sft-data", "preference-data")  # stages whose rows a tuning reads
_VERSION = 1  # of the code that looks
_COUNTS = "texts_with_run.npy"
_Looking = Callable[["Items"], "Occurrences"]


def seen_by(training: Path, settings: DecontaminateSettings | None = None) -> "Seen | None":
    """What finds items in the documents and conversations of a training and of those before it; None if there are none.

    `settings` say what is a match; by default it is what decontamination takes for one.
    """
    split, tokenizer = made_from(training, "split"), made_from(training, "train-tokenizer")
    rows = [folder for stage in _TUNED_ON if (folder := made_from(training, stage)) is not None]
    if split is None and not (rows and tokenizer):
        return None

    def seen(items: "Iterable[BenchmarkItem]") -> "Contamination":
        from affinage.data.contamination import contamination, runs_of

        asked = settings or DecontaminateSettings()
        runs = runs_of(items, asked)
        found = []
        if split is not None:
            found.append(_once(runs, [split], partial(look_through_documents, split)))
        if tokenizer is not None:
            found += [_once(runs, [some, tokenizer], partial(look_through_rows, some, tokenizer)) for some in rows]
        return contamination(runs, found, asked)

    return seen


def look_through_documents(split: Path, runs: "Items") -> "Occurrences":
    """How often the runs are in the documents that were trained on."""
    from affinage.data.contamination import look_through, texts_of_documents

    return look_through(texts_of_documents(split / "train"), runs)


def look_through_rows(rows: Path, tokenizer: Path, runs: "Items") -> "Occurrences":
    """How often the runs are in the conversations that were trained on."""
    from affinage.data.contamination import look_through, texts_of_rows
    from affinage.data.tokenizer import Tokenizer

    return look_through(texts_of_rows(rows / "train", Tokenizer.load(tokenizer)), runs)


def _once(runs: "Items", read: list[Path], look: "partial[Occurrences]") -> "Occurrences":
    """What `look` finds in the results `read`, from the store if it is there."""
    from affinage.data.contamination import Occurrences

    request = _request(runs, read)
    if request is None:
        return look(runs)
    store = Store(read[0].resolve().parent)
    with contextlib.suppress(OSError, ValueError, KeyError):
        kept = _kept(store, request)
        if kept is not None and kept.with_run.shape == runs.keys.shape:
            return kept
    started, clock = time.time(), time.monotonic()
    found: Occurrences = look(runs)
    with contextlib.suppress(OSError):  # it is not ours to write to, or somebody else writes the same
        _keep(store, request, found, started, clock)
    return found


def _request(runs: "Items", read: list[Path]) -> Request | None:
    """The address; None for text that is no result of a stage."""
    inputs = {}
    for folder in read:
        told = read_request(folder)
        if told is None:
            return None
        inputs[told[0].step] = told[1]
    words = hashlib.sha256(runs.keys.tobytes() + runs.lengths.tobytes()).hexdigest()
    return Request("looked-for", _VERSION, {"runs": words}, inputs, {})


def _kept(store: Store, request: Request) -> "Occurrences | None":
    import numpy as np

    from affinage.data.contamination import Occurrences

    if not store.is_complete(request):
        return None
    folder = store.path(request)
    return Occurrences(read_json(folder / RESULT)["texts"], np.load(folder / _COUNTS, allow_pickle=False))


def _keep(store: Store, request: Request, found: "Occurrences", started: float, clock: float) -> None:
    from affinage.data.atomic import write_array

    folder = store.begin(request, resume=True)
    write_array(folder / _COUNTS, found.with_run)
    store.finish(request, {"texts": found.texts}, started=started, clock=clock)
