"""Step `filter`: texts are normalized, and documents that break a rule of the recipe are removed and counted."""

import bisect
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

from affinage.config.data import FilterSettings, safe_name
from affinage.data.datatrove_filters import DatatroveFilters
from affinage.data.documents import DocumentWriter, clear_documents, document_files, row_groups, text_bytes
from affinage.data.executor import LOCAL, Executor, Progress, clear_completions
from affinage.data.language import identify_language
from affinage.data.repair import repair
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
    # By "source\nlanguage": [documents, bytes] with a score below the first of GRID, ..., from the last of it on.
    scores: dict[str, list[list[int]]] = field(default_factory=dict)

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
        for key, rows in sorted(self.scores.items()):
            (documents, *documents_kept), (bytes, *bytes_kept) = np.cumsum(rows[::-1], axis=0)[::-1].T.tolist()
            names = dict(zip(("source", "language"), key.split("\n")))
            kept = {"documents_kept": documents_kept, "bytes_kept": bytes_kept}
            costs.append(names | {"documents": documents, "bytes": bytes} | kept)
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
    neither space nor combining mark); language id: `other language` than the source declares or the recipe has, or
    `language unclear` for one below the threshold; then the rules of datatrove, if any are named. A document is counted
    for the first rule it breaks. Source code has rules of its own (`code: ...`) instead of those for letters, language
    and of datatrove. The summary also counts `repaired` and `formatted` texts and `split` documents, and has
    `thresholds`: what other thresholds of language id would keep. An interrupted call resumes with the missing files.

    Raises UserError for a threshold of a source that is not there, filters that are not installed, and when no document
    is left.
    """
    start = time.perf_counter()
    folder = Path(folder)
    paths = document_files(documents_folder)
    tasks = [_Task(path, number, folder, settings, tuple(languages)) for number, path in enumerate(paths)]
    _check_thresholds(paths, settings, languages)
    DatatroveFilters(settings.datatrove)  # a mistake in the arguments is reported before the work
    stored = sum(path.stat().st_size for path in paths)
    total = _Result()
    for result in executor.map(_filter_file, tasks, folder, bytes=2 * stored, progress=progress):
        total.merge(result)
    clear_completions(folder)
    if total.stats.documents_in and not total.stats.documents_out:
        reason, count = total.stats.removed.most_common(1)[0]
        sample = total.stats.samples[reason][0]
        example = f"{sample['id']} of {sample['source']}: {sample['detail']}".removesuffix(": ")
        raise UserError(
            f"filtering left none of {total.stats.documents_in} documents; {count} are {reason}, such as {example}",
            where="data.filters",
            fix="See data.filters and data.languages; data.filters.long_documents=split keeps long texts in parts.",
        )
    return total.stats.summary(time.perf_counter() - start) | {
        "repaired": total.counts["repaired"],
        "formatted": total.counts["formatted"],
        "split": {"documents": total.counts["split"], "parts": total.counts["chunks"]},
        "thresholds": total.thresholds(),
    }


def _check_thresholds(paths: Sequence[Path], settings: FilterSettings, languages: Sequence[str]) -> None:
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
    settings, before = task.settings, batch.column("text")
    repaired = repair(before)
    result.counts["repaired"] += pc.sum(pc.not_equal(repaired.text, before)).as_py() or 0
    if datatrove.has_formatters:
        formatted = pa.array([datatrove.format(text) for text in repaired.text.to_pylist()], pa.string())
        result.counts["formatted"] += pc.sum(pc.not_equal(formatted, repaired.text)).as_py() or 0
        repaired = repair(formatted)
    batch = _with(batch, "text", repaired.text)
    if settings.long_documents == "split" and (repaired.characters > settings.max_characters).any():
        batch = _split_long(batch, settings.max_characters, result)
        repaired = repair(batch.column("text"))
    share = repaired.alphanumeric / np.maximum(repaired.counted, 1)
    rows, verdicts = batch.to_pylist(), {}
    for number, (row, characters) in enumerate(zip(rows, repaired.characters.tolist())):
        code = row["language"] == CODE_LANGUAGE
        verdict: Verdict | None = None
        if characters < settings.min_characters:
            verdict = "too short", f"{characters} characters"
        elif characters > settings.max_characters:
            verdict = "too long", f"{characters} characters"
        elif code:
            verdict = _code_rules(row["text"])
        elif share[number] < settings.min_alnum_ratio or not repaired.counted[number]:
            verdict = "not enough letters", f"{share[number]:.2f} of its characters"
        else:
            row["language"], row["language_score"], verdict = _identify(row, task, result)
            if verdict is None and settings.datatrove:
                verdict = datatrove.removes(row["text"], row["language"])
        if verdict is not None:
            verdicts[number] = verdict
    for column in ("language", "language_score"):
        batch = _with(batch, column, pa.array([row[column] for row in rows], batch.schema.field(column).type))
    return result.stats.remove_rows(batch, verdicts)


def _with(batch: pa.RecordBatch, column: str, values: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(column), column, values)


def _code_rules(text: str) -> Verdict | None:
    """The first rule that a source file breaks; None if it is hand-written code by all of them."""
    lines = text.split("\n")
    longest, mean = max(map(len, lines)), sum(map(len, lines)) / len(lines)
    share = sum(map(str.isalnum, text)) / max(1, len(text))
    if longest > _CODE_MAX_LINE:
        return "code: a long line", f"{longest} characters"
    if mean > _CODE_MAX_MEAN_LINE:
        return "code: long lines", f"{mean:.0f} characters on average"
    return ("code: not enough letters", f"{share:.2f} of its characters") if share < _CODE_MIN_ALNUM else None


def _identify(row: dict[str, Any], task: _Task, result: _Result) -> tuple[str, float | None, Verdict | None]:
    """The language of a document, its score, and the rule that it breaks, if any.

    A recipe without languages keeps all, and identifies none: what a source states is taken. So is what a trusted
    source declares. What another source declares must be found, what a record claims is not believed.
    """
    settings, ours = task.settings, task.languages
    stated, score = row["language"].removesuffix("?"), row["language_score"]
    declared = stated if stated == row["language"] else ""
    taken = score is not None or not ours or settings.threshold_of(row["source"], stated) == 0
    if ours and (stated if taken else declared) and stated not in ours:
        return stated, score, ("other language", f"{stated}, as its source says")
    if taken:
        return stated, score, None
    found, score = identify_language(row["text"])
    detail = f"{found} {score:.2f}" if found else "no words"
    if found and (found not in ours or (declared not in ("", found))):
        return declared or found, score, ("other language", detail)
    language = declared or found
    if language:
        scores = result.scores.setdefault(f"{row['source']}\n{language}", [[0, 0] for _ in range(1 + len(GRID))])
        counts = scores[bisect.bisect_right(GRID, score)]
        counts[0] += 1
        counts[1] += len(row["text"].encode())
    clear = language and score >= settings.threshold_of(row["source"], language)
    return language, score, None if clear else ("language unclear", detail)


def _split_long(batch: pa.RecordBatch, limit: int, result: _Result) -> pa.RecordBatch:
    """Replace documents of more than `limit` characters by chunks, which keep the document's id and are numbered."""
    rows: list[dict[str, Any]] = []
    for row in batch.to_pylist():
        chunks = split_text(row["text"], limit)
        if len(chunks) > 1:
            result.counts.update({"split": 1, "chunks": len(chunks)})
        rows += [row | {"chunk": k, "text": chunk} for k, chunk in enumerate(chunks)]
    return pa.RecordBatch.from_pylist(rows, schema=batch.schema)


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
