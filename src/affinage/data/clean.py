"""Stage `clean`: texts are repaired, and documents that break a rule of the recipe are removed and counted."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.data.documents import DocumentWriter, clear_documents, document_files, row_groups, text_bytes
from affinage.data.engine import LOCAL, Engine, Progress
from affinage.data.funnel import Funnel
from affinage.data.language import identify_language, known_languages
from affinage.data.repair import Repaired, repair
from affinage.errors import UserError
from affinage.recipe.data import CleanSettings

Verdicts = dict[int, tuple[str, str]]  # row: (reason, detail)


@dataclass(frozen=True)
class _Task:
    path: Path
    folder: Path
    settings: CleanSettings
    languages: tuple[str, ...]


@dataclass
class _Result:
    funnel: Funnel = field(default_factory=Funnel)
    repaired: int = 0  # texts that the repair changed
    split: int = 0  # documents that were split into parts
    parts: int = 0


def clean(
    documents_folder: Path,
    folder: Path,
    settings: CleanSettings,
    languages: Sequence[str],
    *,
    engine: Engine = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Repair and filter the documents of one folder into another and return the stage's summary.

    The rules, in this order: `too short`, `too long` (characters), `not enough letters` (letters and digits among
    the characters that are neither space nor combining mark), then by language id, where the source does not declare
    the language: `other language`, or `language unclear` for one of the recipe's below the threshold. The summary
    also counts `repaired` texts and `split` documents. Raises UserError for a language that lid.176 does not know,
    and when no document is left.
    """
    start = time.perf_counter()
    folder = Path(folder)
    clear_documents(folder)
    if settings.min_language_probability > 0 and (unknown := set(languages) - known_languages()):
        raise UserError(
            f"language id does not know {', '.join(sorted(unknown))}",
            where="data.languages",
            fix="Use ISO 639-1 codes such as en and fr, or turn it off: data.clean.min_language_probability=0.",
        )
    paths = document_files(documents_folder)
    tasks = [_Task(path, folder, settings, tuple(languages)) for path in paths]
    stored = sum(path.stat().st_size for path in paths)
    results = engine.map(_clean_file, tasks, bytes=2 * stored, progress=progress)
    total = Funnel()
    for result in results:
        total.merge(result.funnel)
    if total.documents_in and not total.documents_out:
        _refuse_nothing_left(total)
    return total.summary(time.perf_counter() - start) | {
        "repaired": sum(result.repaired for result in results),
        "split": {
            "documents": sum(result.split for result in results),
            "parts": sum(result.parts for result in results),
        },
    }


def _clean_file(task: _Task) -> _Result:
    result = _Result()
    stem = task.path.stem
    with DocumentWriter(task.folder, stem, observe=result.funnel.leave) as writer:
        for group in row_groups(task.path):
            batch = group.read()
            result.funnel.enter(batch.num_rows, text_bytes(batch))
            writer.write(_clean_batch(batch, task, result))
    return result


def _clean_batch(batch: pa.RecordBatch, task: _Task, result: _Result) -> pa.RecordBatch:
    repaired = repair(batch.column("text"))
    result.repaired += pc.sum(pc.not_equal(repaired.text, batch.column("text"))).as_py() or 0
    batch = _with(batch, "text", repaired.text)
    if task.settings.long_documents == "split":
        batch, repaired = _split_long(batch, repaired, task.settings.max_characters, result)
    verdicts = _cheap_rules(repaired, task.settings)
    batch = _with(batch, "language", pa.array(_languages(batch, task, verdicts), pa.string()))
    keep = np.ones(batch.num_rows, bool)
    for row, (reason, detail) in sorted(verdicts.items()):
        keep[row] = False
        id, source, text = (batch.column(name)[row].as_py() for name in ("id", "source", "text"))
        result.funnel.remove(reason, id=id, source=source, text=text, detail=detail)
    return batch.filter(pa.array(keep))


def _with(batch: pa.RecordBatch, column: str, values: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(column), column, values)


def _cheap_rules(texts: Repaired, settings: CleanSettings) -> Verdicts:
    """Rows that break a rule which needs no model."""
    verdicts: Verdicts = {}
    share = texts.alphanumeric / np.maximum(texts.counted, 1)
    for row in np.flatnonzero((share < settings.min_alphanumeric) | (texts.counted == 0)).tolist():
        verdicts[row] = ("not enough letters", f"{share[row]:.2f} of its characters")
    for row in np.flatnonzero(texts.characters > settings.max_characters).tolist():
        verdicts[row] = ("too long", f"{texts.characters[row]} characters")
    for row in np.flatnonzero(texts.characters < settings.min_characters).tolist():
        verdicts[row] = ("too short", f"{texts.characters[row]} characters")
    return verdicts


def _languages(batch: pa.RecordBatch, task: _Task, verdicts: Verdicts) -> list[str]:
    """The language of every row that is still in; adds the rows in no language of the recipe to the verdicts."""
    languages = batch.column("language").to_pylist()
    threshold = task.settings.min_language_probability
    for row, stated in enumerate(languages):
        if row in verdicts:
            continue
        if threshold == 0:
            languages[row] = stated.removesuffix("?")
        elif not stated or stated.endswith("?"):
            languages[row], probability = identify_language(batch.column("text")[row].as_py())
            detail = f"{languages[row]} {probability:.2f}"
            if languages[row] not in task.languages:
                verdicts[row] = ("other language", detail)
            elif probability < threshold:
                verdicts[row] = ("language unclear", detail)
        if row not in verdicts and languages[row] and languages[row] not in task.languages:
            verdicts[row] = ("other language", f"{languages[row]}, as its source says")
    return languages


def _split_long(
    batch: pa.RecordBatch, repaired: Repaired, limit: int, result: _Result
) -> tuple[pa.RecordBatch, Repaired]:
    """Replace documents of more than `limit` characters by parts; part k of document `d` has the id `d/k`."""
    long = repaired.characters > limit
    if not long.any():
        return batch, repaired
    rows: list[dict[str, str]] = []
    for row, too_long in zip(batch.to_pylist(), long):
        parts = split_text(row["text"], limit) if too_long else [row["text"]]
        result.split += bool(too_long)
        result.parts += len(parts) if too_long else 0
        rows += [
            row | {"id": f"{row['id']}/{k}" if too_long else row["id"], "text": part} for k, part in enumerate(parts)
        ]
    batch = pa.RecordBatch.from_pylist(rows, schema=batch.schema)
    return batch, repair(batch.column("text"))


def split_text(text: str, limit: int) -> list[str]:
    """Cut a text into parts of at most `limit` characters that join to the text.

    A cut is made after the last paragraph, else line, else word that ends in the second half of the part.
    """
    parts = []
    start = 0
    while len(text) - start > limit:
        cut = start + limit
        for mark in ("\n\n", "\n", " "):
            found = text.rfind(mark, start + limit // 2, start + limit)
            if found > 0:
                cut = found + len(mark)
                break
        parts.append(text[start:cut])
        start = cut
    return [*parts, text[start:]]


def _refuse_nothing_left(funnel: Funnel) -> None:
    reason, count = funnel.removed.most_common(1)[0]
    sample = funnel.samples[reason][0]
    raise UserError(
        f"cleaning left none of {funnel.documents_in} documents; {count} are {reason} ({sample['detail']})",
        where=f"document {sample['id']} of {sample['source']}",
        fix="See data.clean and data.languages; data.clean.long_documents=split keeps long texts in parts.",
    )
