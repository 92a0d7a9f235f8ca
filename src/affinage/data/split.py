"""Stage `split`: the part of the corpus that is never trained on."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.data.documents import (
    DocumentWriter,
    RowGroup,
    clear_documents,
    document_files,
    row_groups,
    text_bytes,
)
from affinage.data.engine import LOCAL, Engine, Progress
from affinage.data.funnel import Funnel
from affinage.data.order import document_keys
from affinage.errors import UserError
from affinage.recipe.data import SplitSettings

LARGE_GROUP = 20  # documents; a group of so many gives at least one to validation


def split(
    documents_folder: Path,
    folder: Path,
    settings: SplitSettings,
    seed: int,
    *,
    engine: Engine = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Divide documents into `folder/train` and `folder/validation` and return the stage's summary.

    By document: of every source and language the share `settings.validation`, rounded, and at least one of 20, goes to
    validation: the documents whose hashes with the seed are smallest, whatever their order in the files. With
    `settings.group_separator` the hash is of the id up to there, and a group goes whole.
    By tail: of every document the last share of its characters, from the next line (or word) on, becomes a validation
    document; its id ends in `/tail`. In the summary, `documents_out` counts the training documents and `validation`
    has the others by `<source>.<language>`. Raises UserError if a share was asked for and nothing is left to train on.
    """
    start = time.perf_counter()
    folder = Path(folder)
    for part in ("train", "validation"):
        clear_documents(folder / part)
    paths = document_files(documents_folder)
    groups = [group for path in paths for group in row_groups(path)]
    held_out = _held_out(groups, settings, seed) if settings.by == "document" else {}

    def divide(path: Path) -> tuple[Funnel, Funnel]:
        mine = [group for group in groups if group.path == path]
        if settings.by == "tail":
            return _cut_tails(path.stem, mine, folder, settings.validation)
        return _divide(path.stem, mine, folder, held_out)

    train, validation = Funnel(), Funnel()
    for train_part, validation_part in engine.map(divide, paths, releases_gil=True, progress=progress):
        train.merge(train_part)
        validation.merge(validation_part)
    if train.documents_in and not train.documents_out:
        raise UserError(
            "every document went to validation; none is left to train on",
            where=f"data.split.validation={settings.validation}",
            fix="Lower the share, or cut the end of every document off: data.split.by=tail.",
        )
    return train.summary(time.perf_counter() - start) | {
        "validation": validation.by_group(),
        "validation_documents": validation.documents_out,
        "validation_bytes": validation.bytes_out,
    }


def _held_out(groups: list[RowGroup], settings: SplitSettings, seed: int) -> dict[RowGroup, np.ndarray]:
    """For every row group which of its documents are for validation, bool."""
    share, separator = settings.validation, settings.group_separator
    columns = [_with_group_ids(group.read(["id", "source", "language"]), separator) for group in groups]
    if not columns or share == 0:
        return {group: np.zeros(group.rows, bool) for group in groups}
    keys = np.concatenate([document_keys(batch, seed, "validation") for batch in columns])
    names = pa.Table.from_batches(columns).select(["source", "language"])
    joined = pc.binary_join_element_wise(names["source"], names["language"], "\n").combine_chunks()
    group_of = joined.dictionary_encode().indices.to_numpy()
    chosen = np.zeros(keys.size, bool)
    for number in range(group_of.max() + 1):
        members = np.flatnonzero(group_of == number)
        count = max(round(share * members.size), 1 if members.size >= LARGE_GROUP else 0)
        smallest = members[np.argsort(keys[members], kind="stable")[:count]]
        if separator:
            smallest = members[np.isin(keys[members], keys[smallest])]
        chosen[smallest] = True
    ends = np.cumsum([group.rows for group in groups])
    return {group: chosen[end - group.rows : end] for group, end in zip(groups, ends)}


def _with_group_ids(batch: pa.RecordBatch, separator: str) -> pa.RecordBatch:
    """The batch with every id cut at the separator; unchanged without one."""
    if not separator:
        return batch
    ids = [document.split(separator, 1)[0] for document in batch["id"].to_pylist()]
    return batch.set_column(batch.schema.get_field_index("id"), "id", pa.array(ids, pa.string()))


def _divide(
    stem: str, groups: list[RowGroup], folder: Path, held_out: dict[RowGroup, np.ndarray]
) -> tuple[Funnel, Funnel]:
    train, validation = Funnel(), Funnel()
    with (
        DocumentWriter(folder / "train", stem, observe=train.leave) as training,
        DocumentWriter(folder / "validation", stem, observe=validation.leave) as validating,
    ):
        for group in groups:
            batch = group.read()
            train.enter(batch.num_rows, text_bytes(batch))
            training.write(batch.filter(pa.array(~held_out[group])))
            validating.write(batch.filter(pa.array(held_out[group])))
    return train, validation


def _cut_tails(stem: str, groups: list[RowGroup], folder: Path, share: float) -> tuple[Funnel, Funnel]:
    train, validation = Funnel(), Funnel()
    with (
        DocumentWriter(folder / "train", stem, observe=train.leave) as training,
        DocumentWriter(folder / "validation", stem, observe=validation.leave) as validating,
    ):
        for group in groups:
            batch = group.read()
            train.enter(batch.num_rows, text_bytes(batch))
            for document in batch.to_pylist():
                head, tail = cut_tail(document.pop("text"), share)
                training.add(text=head, **document)
                if tail:
                    document["id"] = f"{document['id']}/tail"
                    validating.add(text=tail, **document)
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
