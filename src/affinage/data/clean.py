"""Step `filter`: texts are repaired, and documents that break a rule of the recipe are removed and counted."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.config.data import CleanSettings
from affinage.data import code_rules
from affinage.data.documents import DocumentWriter, clear_documents, document_files, row_groups, text_bytes
from affinage.data.executor import LOCAL, Executor, Progress, clear_completions
from affinage.data.language import known_languages, language_among
from affinage.data.mask import mask
from affinage.data.repair import Repaired, repair
from affinage.data.repetition import GOPHER, broken_rules
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.data.stats import Stats
from affinage.data.thresholds import GRID, Probabilities
from affinage.errors import UserError, did_you_mean

Verdicts = dict[int, tuple[str, str]]  # row: (reason, detail)


@dataclass(frozen=True)
class _Task:
    path: Path
    folder: Path
    settings: CleanSettings
    languages: tuple[str, ...]

    @property
    def identifies(self) -> bool:
        """Whether any document's language is looked at."""
        return self.settings.identifies_languages


@dataclass
class _Result:
    stats: Stats = field(default_factory=Stats)
    probabilities: Probabilities = field(default_factory=Probabilities)
    repaired: int = 0  # texts that the repair changed
    masked: Counter[str] = field(default_factory=Counter)  # addresses by kind
    split: int = 0  # documents that were split into parts
    parts: int = 0

    def merge(self, other: "_Result") -> None:
        self.stats.merge(other.stats)
        self.probabilities.merge(other.probabilities)
        self.masked.update(other.masked)
        self.repaired += other.repaired
        self.split += other.split
        self.parts += other.parts

    def to_json(self) -> dict[str, Any]:
        return self.__dict__ | {"stats": self.stats.to_json(), "probabilities": self.probabilities.to_json()}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "_Result":
        read = {
            "stats": Stats(**value["stats"]),
            "probabilities": Probabilities.from_json(value["probabilities"]),
            "masked": Counter(value["masked"]),
        }
        return _Result(**value | read)


def clean(
    documents_folder: Path,
    folder: Path,
    settings: CleanSettings,
    languages: Sequence[str],
    *,
    executor: Executor = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Repair and filter the documents of one folder into another and return the stage's summary.

    First texts are repaired, addresses masked, and long documents split, if the settings say so. Then the rules, in
    this order: `too short`, `too long` (characters), `not enough letters` (letters and digits among the characters that
    are neither space nor combining mark); those of Gopher and C4, named in `repetition`, if asked for; then by language
    id, where the source does not declare the language: `other language`, or `language unclear` for one of the recipe's
    below the threshold of the document's source. A document is counted for the first rule it breaks. Source code has
    rules of its own instead of those for letters, repetition and language (`code: ...`). The summary also
    counts `repaired` texts, `masked` addresses by kind and `split` documents, and has `thresholds`, what other
    thresholds of language id would keep (see `thresholds.Probabilities`).

    After a kill it goes on with the files that were not finished; the result is the same. Raises UserError for a
    language that lid.176 does not know, a threshold for a source that is not there, and when no document is left.
    """
    start = time.perf_counter()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = document_files(documents_folder)
    tasks = [_Task(path, folder, settings, tuple(languages)) for path in paths]
    _check(tasks, settings, languages)
    stored = sum(path.stat().st_size for path in paths)
    total = _Result()
    for result in executor.map(_clean_file, tasks, folder, bytes=2 * stored, progress=progress):
        total.merge(_Result.from_json(result))
    clear_completions(folder)
    if total.stats.documents_in and not total.stats.documents_out:
        _refuse_nothing_left(total.stats)
    return total.stats.summary(time.perf_counter() - start) | {
        "repaired": total.repaired,
        "masked": dict(sorted(total.masked.items())),
        "split": {"documents": total.split, "parts": total.parts},
        "thresholds": {"grid": GRID, "costs": total.probabilities.costs()},
    }


def _check(tasks: Sequence[_Task], settings: CleanSettings, languages: Sequence[str]) -> None:
    if tasks and tasks[0].identifies and (unknown := set(languages) - known_languages()):
        raise UserError(
            f"language id does not know {', '.join(sorted(unknown))}",
            where="data.languages",
            fix="Use ISO 639-1 codes such as en and fr, or turn it off: data.clean.language_threshold=0.",
        )
    if isinstance(settings.gopher, dict) and (strange := sorted(set(settings.gopher) - set(GOPHER))):
        fix = did_you_mean(strange[0], GOPHER) or f"There are {', '.join(GOPHER)}."
        raise UserError(f"there is no rule `{strange[0]}` of Gopher", where="data.clean.gopher", fix=fix)
    if isinstance(settings.language_threshold, dict):
        batches = (group.read(["source"]) for task in tasks for group in row_groups(task.path))
        sources = {name for batch in batches for name in pc.unique(batch.column("source")).to_pylist()}
        known = sources | set(languages) | {"default"}
        if missing := set(settings.language_threshold) - known:
            raise UserError(
                f"no document is of the source or language {', '.join(sorted(missing))}",
                where="data.clean.language_threshold",
                fix=f"There are {', '.join(sorted(known))}.",
            )


def _clean_file(task: _Task) -> dict[str, Any]:
    stem = task.path.stem
    clear_documents(task.folder, stem)
    result = _Result()
    with DocumentWriter(task.folder, stem, observe=result.stats.leave) as writer:
        for group in row_groups(task.path):
            batch = group.read()
            result.stats.enter(batch.num_rows, text_bytes(batch))
            writer.write(_clean_batch(batch, task, result))
    return result.to_json()


def _clean_batch(batch: pa.RecordBatch, task: _Task, result: _Result) -> pa.RecordBatch:
    settings = task.settings
    repaired = repair(batch.column("text"))
    result.repaired += pc.sum(pc.not_equal(repaired.text, batch.column("text"))).as_py() or 0
    if settings.mask:
        text, changed, counts = mask(repaired.text)
        result.masked.update(counts)
        repaired = repair(text) if changed.size else repaired
    batch = _with(batch, "text", repaired.text)
    if settings.long_documents == "split":
        batch, repaired = _split_long(batch, repaired, settings.max_characters, result)
    code = _is_code(batch)
    verdicts = _cheap_rules(repaired, settings, code)
    for row in np.flatnonzero(code).tolist():
        if row not in verdicts and (broken := code_rules.broken_rule(batch.column("text")[row].as_py())):
            verdicts[row] = broken
    rows = np.setdiff1d(np.flatnonzero(~code), [*verdicts])
    verdicts |= broken_rules(batch.column("text"), rows, settings.gopher, settings.c4)
    batch = _with(batch, "language", pa.array(_languages(batch, task, verdicts, result), pa.string()))
    keep = np.ones(batch.num_rows, bool)
    for row, (reason, detail) in sorted(verdicts.items()):
        keep[row] = False
        id, source, text = (batch.column(name)[row].as_py() for name in ("id", "source", "text"))
        result.stats.remove(reason, id=id, source=source, text=text, detail=detail)
    return batch.filter(pa.array(keep))


def _with(batch: pa.RecordBatch, column: str, values: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(column), column, values)


def _is_code(batch: pa.RecordBatch) -> np.ndarray:
    """The rows that are source code, bool."""
    return pc.equal(batch.column("language"), CODE_LANGUAGE).to_numpy(zero_copy_only=False).astype(bool)


def _cheap_rules(texts: Repaired, settings: CleanSettings, code: np.ndarray) -> Verdicts:
    """Rows that break a rule which needs no model."""
    verdicts: Verdicts = {}
    share = texts.alphanumeric / np.maximum(texts.counted, 1)
    for row in np.flatnonzero(~code & ((share < settings.min_alnum_ratio) | (texts.counted == 0))).tolist():
        verdicts[row] = ("not enough letters", f"{share[row]:.2f} of its characters")
    for row in np.flatnonzero(texts.characters > settings.max_characters).tolist():
        verdicts[row] = ("too long", f"{texts.characters[row]} characters")
    for row in np.flatnonzero(texts.characters < settings.min_characters).tolist():
        verdicts[row] = ("too short", f"{texts.characters[row]} characters")
    return verdicts


def _languages(batch: pa.RecordBatch, task: _Task, verdicts: Verdicts, result: _Result) -> list[str]:
    """The language of every row that is still in; adds the rows in no language of the recipe to the verdicts.

    A recipe without languages keeps all, and asks for none: what a source states is taken.
    """
    languages, sources = batch.column("language").to_pylist(), batch.column("source").to_pylist()
    settings = task.settings
    for row, stated in enumerate(languages):
        if row in verdicts or stated == CODE_LANGUAGE:
            continue
        threshold = settings.threshold_of(sources[row], stated.removesuffix("?"))
        if threshold == 0 or not task.languages:
            languages[row] = stated.removesuffix("?")
        elif not stated or stated.endswith("?"):
            text = batch.column("text")[row].as_py()
            found, probability, detail = language_among(text, task.languages, mixed=settings.mixed_languages)
            languages[row] = found
            threshold = settings.threshold_of(sources[row], found)
            if found not in task.languages:
                verdicts[row] = ("other language", detail)
                continue
            result.probabilities.add(sources[row], found, probability, len(text.encode()))
            if probability < threshold:
                verdicts[row] = ("language unclear", detail)
        if row not in verdicts and languages[row] and task.languages and languages[row] not in task.languages:
            verdicts[row] = ("other language", f"{languages[row]}, as its source says")
    return languages


def _split_long(
    batch: pa.RecordBatch, repaired: Repaired, limit: int, result: _Result
) -> tuple[pa.RecordBatch, Repaired]:
    """Replace documents of more than `limit` characters by parts; which keep its id."""
    long = repaired.characters > limit
    if not long.any():
        return batch, repaired
    rows: list[dict[str, str]] = []
    for row, too_long in zip(batch.to_pylist(), long):
        parts = split_text(row["text"], limit) if too_long else [row["text"]]
        result.split += bool(too_long)
        result.parts += len(parts) if too_long else 0
        rows += [row | {"chunk": k, "text": part} for k, part in enumerate(parts)]
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


def _refuse_nothing_left(stats: Stats) -> None:
    reason, count = stats.removed.most_common(1)[0]
    sample = stats.samples[reason][0]
    example = f"{sample['id']} of {sample['source']}" + (f": {sample['detail']}" if sample["detail"] else "")
    raise UserError(
        f"cleaning left none of {stats.documents_in} documents; {count} are {reason}, such as {example}",
        where="data.clean",
        fix="See data.clean and data.languages; data.clean.long_documents=split keeps long texts in parts.",
    )
