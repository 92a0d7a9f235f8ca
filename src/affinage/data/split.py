"""Stage `split`: the part of the corpus that is never trained on."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.config.data import SplitSettings
from affinage.data.copies import NearCopies, ShingleSets, joined, shingle_sets
from affinage.data.documents import (
    DocumentWriter,
    RowGroup,
    clear_documents,
    document_files,
    row_groups,
    text_bytes,
)
from affinage.data.executor import LOCAL, Executor, Progress
from affinage.data.order import document_keys
from affinage.data.stats import Stats
from affinage.errors import UserError

A_FEW = 4  # a source and language with at least this many documents (or groups of them) gives one to validation
NEAR_COPY = "near copy of a validation document"  # the reason in the stats
Divided = tuple[pa.RecordBatch, pa.RecordBatch]  # documents to train on, and to validate on
Divide = Callable[[RowGroup, pa.RecordBatch, Stats], Divided]  # counts what is in neither in the stats


def split(
    documents_folder: Path,
    folder: Path,
    settings: SplitSettings,
    seed: int,
    *,
    executor: Executor = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Divide documents into `folder/train` and `folder/validation` and return the stage's summary.

    By document: of every source and language the share `settings.validation`, rounded, and at least one of 4, goes to
    validation: the documents whose hashes with the seed are smallest, whatever their order in the files. The
    parts of a document that was cut up stay together, and with `settings.group_separator` so do documents whose ids
    agree up to there: the hash is of what they share. A training document with a Jaccard similarity of
    `settings.max_similarity` or more to any validation document is in neither part, and counts as `near copy of a
    validation document`. So no near copy of a validation document is trained on, whatever was deduplicated before.
    This is exact, and needs memory for the validation documents: about twice their text.
    By tail: of every document the last share of its characters, from the next line (or word) on, becomes a validation
    document, with the same id. Near copies are not looked for.
    In the summary, `documents_out` counts the training documents and `validation` has the others by
    `<source>.<language>`. Raises UserError if a share was asked for and nothing is left to train on.
    """
    start = time.perf_counter()
    folder = Path(folder)
    for part in ("train", "validation"):
        clear_documents(folder / part)
    groups_of = {path: row_groups(path) for path in document_files(documents_folder)}
    groups = [group for own in groups_of.values() for group in own]
    if settings.by == "tail":
        divide: Divide = partial(_by_tail, settings.validation_fraction)
    else:
        held_out = _held_out(groups, settings, seed)
        divide = partial(_by_document, held_out, _known_copies(held_out, settings.max_similarity, executor))

    def write(path: Path) -> tuple[Stats, Stats]:
        partition = path.parent.relative_to(documents_folder)
        return _write(
            path.stem, groups_of[path], folder / "train" / partition, folder / "validation" / partition, divide
        )

    train, validation = Stats(), Stats()
    for train_part, validation_part in executor.map(write, list(groups_of), threads=True, progress=progress):
        train.merge(train_part)
        validation.merge(validation_part)
    if train.documents_in and not train.documents_out:
        raise UserError(
            "every document went to validation; none is left to train on",
            where=f"data.split.validation_fraction={settings.validation_fraction}",
            fix="Lower the share, or cut the end of every document off: data.split.by=tail.",
        )
    return train.summary(time.perf_counter() - start) | {
        "validation": validation.by_group(),
        "validation_documents": validation.documents_out,
        "validation_bytes": validation.bytes_out,
        "without_validation": sorted(train.by_both.keys() - validation.by_both.keys())
        if settings.validation_fraction
        else [],
    }


def _held_out(groups: list[RowGroup], settings: SplitSettings, seed: int) -> dict[RowGroup, np.ndarray]:
    """For every row group which of its documents are for validation, bool."""
    share, separator = settings.validation_fraction, settings.group_separator
    if not groups or share == 0:
        return {group: np.zeros(group.rows, bool) for group in groups}
    keys_of, number_of = [], []  # of every document 12 bytes; its id may be as long as an address
    numbers: dict[str, int] = {}  # of every source and language
    for group in groups:
        batch = _with_group_ids(group.read(["id", "source", "language"]), separator)
        keys_of.append(document_keys(batch, seed, "validation"))
        both = pc.binary_join_element_wise(batch["source"], batch["language"], "\n").dictionary_encode()
        names = [numbers.setdefault(name, len(numbers)) for name in both.dictionary.to_pylist()]
        number_of.append(np.array(names, np.int32)[both.indices.to_numpy()])
    keys, group_of = np.concatenate(keys_of), np.concatenate(number_of)
    chosen = np.zeros(keys.size, bool)
    for number in range(len(numbers)):
        members = np.flatnonzero(group_of == number)
        different = np.unique(keys[members]).size
        count = max(round(share * members.size), 1 if different >= A_FEW else 0)
        if different == 1 < members.size:
            count = 0  # or all of it would go
        chosen[members[np.argsort(keys[members], kind="stable")[:count]]] = True
    chosen = np.isin(keys, keys[chosen])  # what belongs together goes whole, though its languages may differ
    ends = np.cumsum([group.rows for group in groups])
    return {group: chosen[end - group.rows : end] for group, end in zip(groups, ends)}


def _with_group_ids(batch: pa.RecordBatch, separator: str) -> pa.RecordBatch:
    """The batch with the id of every document cut to what it shares with those that stay with it."""
    if not separator:
        return batch
    ids = [document.split(separator, 1)[0] for document in batch["id"].to_pylist()]
    return batch.set_column(batch.schema.get_field_index("id"), "id", pa.array(ids, pa.string()))


@dataclass(frozen=True)
class _Copies:
    """The validation documents, to tell near copies of them by."""

    near: NearCopies
    names: pa.Table  # their ids and sources


def _known_copies(held_out: dict[RowGroup, np.ndarray], threshold: float, executor: Executor) -> _Copies | None:
    chosen = [(group, rows) for group, rows in held_out.items() if rows.any()]
    if threshold == 0 or not chosen:
        return None

    def read(task: tuple[RowGroup, np.ndarray]) -> tuple[ShingleSets, pa.RecordBatch]:
        batch = task[0].read(["id", "source", "text"]).filter(pa.array(task[1]))
        return shingle_sets(batch.column("text")), batch.select(["id", "source"])

    sets, names = zip(*executor.map(read, chosen, threads=True))
    return _Copies(NearCopies(joined(list(sets)), threshold), pa.Table.from_batches(names))


def _by_document(
    held_out: dict[RowGroup, np.ndarray], copies: _Copies | None, group: RowGroup, batch: pa.RecordBatch, train: Stats
) -> Divided:
    validating = held_out[group]
    training = ~validating
    if copies is not None:
        rows = np.flatnonzero(training)
        nearest, similarity = copies.near.find(batch.column("text").take(pa.array(rows)))
        for row, other, near in zip(rows[nearest >= 0].tolist(), nearest[nearest >= 0], similarity[nearest >= 0]):
            training[row] = False
            id, source, text = (batch.column(name)[row].as_py() for name in ("id", "source", "text"))
            detail = f"Jaccard {near:.3f} to {copies.names['id'][int(other)]} of {copies.names['source'][int(other)]}"
            train.remove(NEAR_COPY, id=id, source=source, text=text, detail=detail)
    return batch.filter(pa.array(training)), batch.filter(pa.array(validating))


def _by_tail(share: float, group: RowGroup, batch: pa.RecordBatch, train: Stats) -> Divided:
    heads, tails = [], []
    for document in batch.to_pylist():
        head, tail = cut_tail(document["text"], share)
        heads.append(document | {"text": head})
        if tail:
            tails.append(document | {"text": tail})
    return pa.RecordBatch.from_pylist(heads, batch.schema), pa.RecordBatch.from_pylist(tails, batch.schema)


def _write(
    stem: str, groups: list[RowGroup], train_folder: Path, validation_folder: Path, divide: Divide
) -> tuple[Stats, Stats]:
    train, validation = Stats(), Stats()
    with (
        DocumentWriter(train_folder, stem, observe=train.leave) as training,
        DocumentWriter(validation_folder, stem, observe=validation.leave) as validating,
    ):
        for group in groups:
            batch = group.read()
            train.enter(batch.num_rows, text_bytes(batch))
            for writer, part in zip((training, validating), divide(group, batch, train)):
                writer.write(part)
    return train, validation


def cut_tail(text: str, share: float) -> tuple[str, str]:
    """A text in two parts, the second at most `share` of its characters, from the start of a line or else of a word on.

    The parts join to the text; the second is empty where neither line nor word starts in it.
    """
    cut = len(text) - int(len(text) * share)
    for mark in ("\n", " "):
        found = text.find(mark, max(0, cut - 1))
        if 0 <= found < len(text) - 1:
            return text[: found + 1], text[found + 1 :]
    return text, ""
