"""Step `filter`: texts are normalized, and documents that break a rule of the recipe are removed and counted."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.config.data import FilterSettings
from affinage.config.sources import safe_name
from affinage.data.datatrove_filters import DatatroveFilters
from affinage.data.documents import DocumentWriter, clear_documents, document_files, row_groups, text_bytes
from affinage.data.executor import LOCAL, Executor, Progress, clear_completions
from affinage.data.language import known_languages, language_among
from affinage.data.repair import Repaired, repair
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.data.stats import Stats
from affinage.errors import UserError

GRID = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # thresholds of language id that the report compares
# Rules for source code of StarCoder (Li et al. 2023, arXiv 2305.06161, section 3.1): long lines are data, minified or
# generated code; few letters and digits are data as well.
_CODE_MAX_LINE, _CODE_MAX_MEAN_LINE, _CODE_MIN_ALNUM = 1000, 100, 0.25

Verdict = tuple[str, str]  # the reason for which a document is removed, and details


@dataclass(frozen=True)
class _Task:
    path: Path
    number: int
    folder: Path
    settings: FilterSettings
    languages: tuple[str, ...]


@dataclass
class _Result:
    stats: Stats = field(default_factory=Stats)
    counts: Counter[str] = field(default_factory=Counter)  # texts that were `repaired` or `formatted`, ...
    scores: dict[str, list[list[int]]] = field(default_factory=dict)  # see `add_score`

    def add_score(self, source: str, language: str, score: float, bytes: int) -> None:
        """Count [documents, bytes] of all, then of what each of `GRID` keeps, by "source\\nlanguage"."""
        rows = self.scores.setdefault(f"{source}\n{language}", [[0, 0] for _ in range(1 + len(GRID))])
        for row, threshold in zip(rows, (0.0, *GRID), strict=True):
            if score >= threshold:
                row[0] += 1
                row[1] += bytes

    def merge(self, other: dict[str, Any]) -> None:
        """Add the result of another task, as JSON."""
        self.stats.merge(other["stats"])
        self.counts.update(other["counts"])
        for key, rows in other["scores"].items():
            mine = self.scores.get(key, [[0, 0]] * len(rows))
            self.scores[key] = [[a + c, b + d] for (a, b), (c, d) in zip(mine, rows, strict=True)]

    def thresholds(self) -> dict[str, Any]:
        """What other thresholds of language id would keep, by source and language."""
        costs = []
        for key, ((documents, bytes), *rows) in sorted(self.scores.items()):
            source, language = key.split("\n")
            documents_kept, bytes_kept = (list(column) for column in zip(*rows, strict=True))
            costs.append({"source": source, "language": language, "documents": documents, "bytes": bytes})
            costs[-1] |= {"documents_kept": documents_kept, "bytes_kept": bytes_kept}
        return {"grid": GRID, "costs": costs}


def filter_documents(
    documents_folder: Path,
    folder: Path,
    settings: FilterSettings,
    languages: Sequence[str],
    *,
    executor: Executor = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Normalize and filter documents into `folder/<source>.<language>` and return the step's summary.

    First texts are repaired, formatted, and long documents split, if the settings say so. Then the rules, in this
    order: `too short`, `too long` (characters), `not enough letters` (letters and digits among the characters that are
    neither space nor combining mark); those of datatrove, if any are named; then language id: `other language` than the
    source declares or the recipe has, or `language unclear` for one below the threshold. A document is counted for the
    first rule it breaks. Source code has rules of its own instead of those for letters, of datatrove and for language
    (`code: ...`). The summary also counts `repaired` and `formatted` texts and `split` documents, and has `thresholds`:
    what other thresholds of language id would keep. An interrupted call resumes with the missing files.

    Raises UserError for a language that lid.176 does not know, a threshold for a source that is not there, filters that
    are not installed, and when no document is left.
    """
    start = time.perf_counter()
    folder = Path(folder)
    paths = document_files(documents_folder)
    tasks = [_Task(path, number, folder, settings, tuple(languages)) for number, path in enumerate(paths)]
    _check(paths, settings, languages)
    stored = sum(path.stat().st_size for path in paths)
    total = _Result()
    for result in executor.map(_filter_file, tasks, folder, bytes=2 * stored, progress=progress):
        total.merge(result)
    clear_completions(folder)
    if total.stats.documents_in and not total.stats.documents_out:
        _refuse_nothing_left(total.stats)
    return total.stats.summary(time.perf_counter() - start) | {
        "repaired": total.counts["repaired"],
        "formatted": total.counts["formatted"],
        "split": {"documents": total.counts["split"], "parts": total.counts["chunks"]},
        "thresholds": total.thresholds(),
    }


def _check(paths: Sequence[Path], settings: FilterSettings, languages: Sequence[str]) -> None:
    if settings.identifies_languages and (unknown := set(languages) - known_languages()):
        raise UserError(
            f"language id does not know {', '.join(sorted(unknown))}",
            where="data.languages",
            fix="Use ISO 639-1 codes such as en and fr, or turn it off: data.filters.language_threshold=0.",
        )
    DatatroveFilters(settings.datatrove)
    if isinstance(settings.language_threshold, dict):
        batches = (group.read(["source"]) for path in paths for group in row_groups(path))
        sources = {name for batch in batches for name in pc.unique(batch.column("source")).to_pylist()}
        known = sources | set(languages) | {"default"}
        if missing := set(settings.language_threshold) - known:
            raise UserError(
                f"no document is of the source or language {', '.join(sorted(missing))}",
                where="data.filters.language_threshold",
                fix=f"There are {', '.join(sorted(known))}.",
            )


def _filter_file(task: _Task) -> dict[str, Any]:
    clear_documents(task.folder, f"*-{task.number:05d}")
    result, datatrove = _Result(), DatatroveFilters(task.settings.datatrove)
    writers: dict[str, DocumentWriter] = {}
    with contextlib.ExitStack() as stack:
        for group in row_groups(task.path):
            batch = group.read()
            result.stats.enter(batch.num_rows, text_bytes(batch))
            batch = _filter_batch(batch, task, datatrove, result)
            for language in pc.unique(batch.column("language")).to_pylist():
                name = f"{task.path.parent.name}.{safe_name(language) if language else 'unknown'}"
                if name not in writers:
                    place, stem = task.folder / name, f"{name}-{task.number:05d}"
                    writers[name] = stack.enter_context(DocumentWriter(place, stem, observe=result.stats.leave))
                writers[name].write(batch.filter(pc.equal(batch.column("language"), language)))
    return {"stats": result.stats.to_json(), "counts": result.counts, "scores": result.scores}


def _filter_batch(batch: pa.RecordBatch, task: _Task, datatrove: DatatroveFilters, result: _Result) -> pa.RecordBatch:
    settings = task.settings
    repaired = repair(batch.column("text"))
    result.counts["repaired"] += pc.sum(pc.not_equal(repaired.text, batch.column("text"))).as_py() or 0
    if datatrove.has_formatters:
        formatted = pa.array([datatrove.format(text) for text in repaired.text.to_pylist()], pa.string())
        result.counts["formatted"] += pc.sum(pc.not_equal(formatted, repaired.text)).as_py() or 0
        repaired = repair(formatted)
    batch = _with(batch, "text", repaired.text)
    if settings.long_documents == "split":
        batch, repaired = _split_long(batch, repaired, settings.max_characters, result)
    code = pc.equal(batch.column("language"), CODE_LANGUAGE).to_numpy(zero_copy_only=False).astype(bool)
    verdicts = _cheap_rules(repaired, settings, code)
    languages, scores = batch.column("language").to_pylist(), batch.column("language_score").to_pylist()
    sources, texts = batch.column("source").to_pylist(), batch.column("text")
    for row in range(batch.num_rows):
        if row in verdicts:
            continue
        text, verdict = texts[row].as_py(), None
        if code[row]:
            verdict = _code_rules(text)
        else:
            stated = (languages[row], scores[row])
            languages[row], scores[row], verdict = _identify(text, *stated, sources[row], task, result)
            if verdict is None and settings.datatrove:
                verdict = datatrove.removes(text, languages[row])
        if verdict is not None:
            verdicts[row] = verdict
    batch = _with(batch, "language", pa.array(languages, pa.string()))
    batch = _with(batch, "language_score", pa.array(scores, pa.float32()))
    return result.stats.remove_rows(batch, verdicts)


def _with(batch: pa.RecordBatch, column: str, values: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(column), column, values)


def _cheap_rules(texts: Repaired, settings: FilterSettings, code: np.ndarray) -> dict[int, Verdict]:
    """Rows that break a rule which needs nothing but counts."""
    verdicts: dict[int, Verdict] = {}
    share = texts.alphanumeric / np.maximum(texts.counted, 1)
    for row in np.flatnonzero(~code & ((share < settings.min_alnum_ratio) | (texts.counted == 0))).tolist():
        verdicts[row] = ("not enough letters", f"{share[row]:.2f} of its characters")
    for row in np.flatnonzero(texts.characters > settings.max_characters).tolist():
        verdicts[row] = ("too long", f"{texts.characters[row]} characters")
    for row in np.flatnonzero(texts.characters < settings.min_characters).tolist():
        verdicts[row] = ("too short", f"{texts.characters[row]} characters")
    return verdicts


def _code_rules(text: str) -> Verdict | None:
    """The first rule that a source file breaks; None if it is hand-written code by all of them."""
    lines = text.split("\n")
    longest, mean = max(map(len, lines)), sum(map(len, lines)) / len(lines)
    if longest > _CODE_MAX_LINE:
        return "code: a long line", f"{longest} characters"
    if mean > _CODE_MAX_MEAN_LINE:
        return "code: long lines", f"{mean:.0f} characters on average"
    share = sum(map(str.isalnum, text)) / max(1, len(text))
    if share < _CODE_MIN_ALNUM:
        return "code: not enough letters", f"{share:.2f} of its characters"
    return None


def _identify(
    text: str, stated: str, score: float | None, source: str, task: _Task, result: _Result
) -> tuple[str, float | None, Verdict | None]:
    """The language of a document, its score, and the rule that it breaks, if any.

    A recipe without languages keeps all, and identifies none: what a source states is taken. So is what a trusted
    source declares. What another source declares must be found, what a record claims is not believed.
    """
    settings, ours = task.settings, task.languages
    declared = "" if stated.endswith("?") else stated
    stated = stated.removesuffix("?")
    if declared and ours and declared not in ours:
        return declared, score, ("other language", f"{declared}, as its source says")
    if score is not None or not ours or settings.threshold_of(source, stated) == 0:
        other = bool(stated and ours and stated not in ours)
        return stated, score, ("other language", f"{stated}, as its source says") if other else None
    found, score, detail = language_among(text, ours, mixed=settings.mixed_languages)
    if found and (found not in ours or (declared and found != declared and not settings.mixed_languages)):
        return declared or found, score, ("other language", detail)
    language = declared or found
    if language:
        result.add_score(source, language, score, len(text.encode()))
    if not language or score < settings.threshold_of(source, language):
        return language, score, ("language unclear", detail)
    return language, score, None


def _split_long(
    batch: pa.RecordBatch, repaired: Repaired, limit: int, result: _Result
) -> tuple[pa.RecordBatch, Repaired]:
    """Replace documents of more than `limit` characters by chunks, which keep the document's id and are numbered."""
    long = repaired.characters > limit
    if not long.any():
        return batch, repaired
    rows: list[dict[str, Any]] = []
    for row, too_long in zip(batch.to_pylist(), long):
        chunks = split_text(row["text"], limit) if too_long else [row["text"]]
        result.counts["split"] += bool(too_long)
        result.counts["chunks"] += len(chunks) if too_long else 0
        rows += [row | {"chunk": k, "text": chunk} for k, chunk in enumerate(chunks)]
    batch = pa.RecordBatch.from_pylist(rows, schema=batch.schema)
    return batch, repair(batch.column("text"))


def split_text(text: str, limit: int) -> list[str]:
    """Cut a text into chunks of at most `limit` characters that join to the text.

    A cut is made after the last paragraph, else line, else word that ends in the second half of the chunk.
    """
    chunks = []
    start = 0
    while len(text) - start > limit:
        cut = start + limit
        for mark in ("\n\n", "\n", " "):
            found = text.rfind(mark, start + limit // 2, start + limit)
            if found > 0:
                cut = found + len(mark)
                break
        chunks.append(text[start:cut])
        start = cut
    return [*chunks, text[start:]]


def _refuse_nothing_left(stats: Stats) -> None:
    reason, count = stats.removed.most_common(1)[0]
    sample = stats.samples[reason][0]
    example = f"{sample['id']} of {sample['source']}" + (f": {sample['detail']}" if sample["detail"] else "")
    raise UserError(
        f"filtering left none of {stats.documents_in} documents; {count} are {reason}, such as {example}",
        where="data.filters",
        fix="See data.filters and data.languages; data.filters.long_documents=split keeps long texts in parts.",
    )
