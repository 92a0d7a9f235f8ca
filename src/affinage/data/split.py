"""Step `split`: the part of the corpus that is never trained on."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.cluster.executor import LOCAL, Executor, clear_completions
from affinage.config.data import SplitSettings
from affinage.data.documents import DocumentWriter, Stats, numbered_files, read_documents
from affinage.data.order import document_keys
from affinage.errors import UserError

A_FEW = 4  # a source and language with at least this many documents (or groups of them) gives one to validation


def split(source: Path, folder: Path, settings: SplitSettings, *, executor: Executor = LOCAL) -> dict[str, Any]:
    """Divide documents into `folder/train` and `folder/validation` and return the step's summary.

    By document: of each source and language the share `validation_fraction`, and at least one of 4, goes to validation:
    the documents whose ids have the smallest hashes. With `group_separator` documents whose ids agree up to there stay
    together. By tail: the last share of every document goes, with the same id. An interrupted call resumes.
    Raises UserError if nothing is left to train on.
    """
    by_document = settings.by == "document" and settings.validation_fraction > 0
    held_out = _held_out(source, settings) if by_document else None

    def write(task: tuple[Path, int]) -> list[dict[str, Any]]:
        (path, first), statistics, place = task, (Stats(), Stats()), task[0].parent.relative_to(source)
        with (
            DocumentWriter(folder / "train" / place, path.stem, statistics[0]) as train,
            DocumentWriter(folder / "validation" / place, path.stem, statistics[1]) as validation,
        ):
            for number, batch in statistics[0].entering(path, first):
                own = np.zeros(len(batch), bool) if held_out is None else held_out[number:][: len(batch)]
                parts = [batch.filter(pa.array(~own)), batch.filter(pa.array(own))]
                if settings.by == "tail":
                    cuts = [cut_tail(text, settings.validation_fraction) for text in batch["text"].to_pylist()]
                    column = batch.schema.get_field_index("text")
                    parts = [batch.set_column(column, "text", pa.array(texts, pa.string())) for texts in zip(*cuts)]
                    parts[1] = parts[1].filter(pc.not_equal(parts[1]["text"], ""))
                train.write(parts[0])
                validation.write(parts[1])
        return [vars(stats) for stats in statistics]

    results = executor.map(write, numbered_files(source), folder, threads=True)
    train, validation = (Stats.total(result[part] for result in results) for part in range(2))
    if validation.documents and not train.documents:
        where = f"data.split.validation_fraction={settings.validation_fraction}"
        fix = "Lower the share, or cut the end of every document off: data.split.by=tail."
        raise UserError("every document went to validation; none is left to train on", where=where, fix=fix)
    clear_completions(folder)
    trained, held_out_of = (stats.by(lambda *names: ".".join(names)) for stats in (train, validation))
    return train.summary() | {
        "validation": held_out_of,
        "validation_documents": validation.documents.total(),
        "validation_bytes": validation.bytes.total(),
        "without_validation": sorted(trained.keys() - held_out_of.keys()) if settings.validation_fraction else [],
    }


def _held_out(source: Path, settings: SplitSettings) -> np.ndarray:
    """Which documents are for validation, bool [N]."""
    parts = [pa.table({"key": pa.array([], pa.uint64()), "group": pa.array([], pa.string()).dictionary_encode()})]
    for batch in read_documents(source, ["id", "source", "language"]):
        keys = document_keys(batch, "validation", settings.group_separator)
        group = pc.binary_join_element_wise(batch["source"], batch["language"], "\n").dictionary_encode()
        parts.append(pa.table({"key": keys, "group": group}))  # 12 bytes of a document
    documents = pa.concat_tables(parts).unify_dictionaries()
    chosen = [np.zeros(0, np.uint64)]
    for group in documents.group_by("group").aggregate([("key", "list")])["key_list"]:
        members = np.sort(group.values)
        different = np.unique(members).size
        count = max(round(settings.validation_fraction * members.size), 1 if different >= A_FEW else 0)
        if different > 1 or members.size == 1:  # else all of it would go
            chosen.append(members[:count])
    # What belongs together goes whole, though its languages may differ.
    return np.isin(documents["key"], np.concatenate(chosen))


def cut_tail(text: str, share: float) -> tuple[str, str]:
    """A text in two parts, the second the last `share` of its characters or less: whole lines, else words, else ""."""
    cut = len(text) - int(len(text) * share)
    for mark in ("\n", " "):
        if 0 < (start := text.find(mark, max(0, cut - 1)) + 1) < len(text):
            return text[:start], text[start:]
    return text, ""
