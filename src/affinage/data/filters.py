"""Step `filter`: texts are normalized, and documents that break a rule of the recipe are removed and counted."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from affinage.config.data import FilterSettings, safe_name
from affinage.data.code_points import count_characters
from affinage.data.datatrove_filters import DatatroveFilters
from affinage.data.documents import DocumentWriter, clear_documents, document_files, row_groups, text_bytes
from affinage.data.executor import LOCAL, Executor, Progress, clear_completions
from affinage.data.language import language_among
from affinage.data.repair import repair
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.data.stats import Stats
from affinage.errors import UserError

# Rules for source code of StarCoder (Li et al. 2023, arXiv 2305.06161, section 3.1): long lines are data, minified or
# generated code; few letters and digits are data as well.
_CODE_MAX_LINE, _CODE_MAX_MEAN_LINE, _CODE_MIN_ALNUM = 1000, 100, 0.25

Verdict = tuple[str, str]  # the reason for which a document is removed, and details


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

    First texts are repaired, and formatted if the settings say so. Then the rules, in this order: `too short`,
    `too long` (characters), `not enough letters` (letters and digits among the characters that are neither space nor
    combining mark); language id: `other language` than the source declares or the recipe has, or `language unclear` for
    one below the threshold; then the rules of datatrove, if any are named. A document is counted for the first rule it
    breaks. Source code has rules of its own (`code: ...`) instead of those for letters, language and of datatrove. The
    summary also counts `repaired` and `formatted` texts. An interrupted call resumes with the missing files.

    Raises UserError for filters that are not installed, and when no document is left.
    """
    start, folder = time.perf_counter(), Path(folder)
    paths = document_files(documents_folder)
    DatatroveFilters(settings.datatrove)  # a mistake in the arguments is reported before the work
    stored = sum(path.stat().st_size for path in paths)
    total, counts = Stats(), Counter[str]()
    filter_file, tasks = partial(_filter_file, folder, settings, tuple(languages)), list(enumerate(paths))
    for stats, own_counts in executor.map(filter_file, tasks, folder, bytes=2 * stored, progress=progress):
        total.merge(stats)
        counts.update(own_counts)
    clear_completions(folder)
    if total.documents_in and not total.documents_out:
        reason, count = total.removed.most_common(1)[0]
        sample = total.samples[reason][0]
        example = f"{sample['id']} of {sample['source']}: {sample['detail']}".removesuffix(": ")
        raise UserError(
            f"filtering left none of {total.documents_in} documents; {count} are {reason}, such as {example}",
            where="data.filters",
            fix="See data.filters and data.languages; data.filters.max_characters keeps longer texts.",
        )
    changed = {"repaired": counts["repaired"], "formatted": counts["formatted"]}
    return total.summary(time.perf_counter() - start) | changed


def _filter_file(
    folder: Path, settings: FilterSettings, languages: Sequence[str], task: tuple[int, Path]
) -> tuple[dict[str, Any], Counter[str]]:
    number, path = task
    clear_documents(folder, f"*-{number:05d}")
    stats, counts, datatrove = Stats(), Counter[str](), DatatroveFilters(settings.datatrove)
    writers: dict[str, DocumentWriter] = {}
    with contextlib.ExitStack() as stack:
        for group in row_groups(path):
            batch = group.read()
            stats.enter(batch.num_rows, text_bytes(batch))
            batch, verdicts = _judge(_normalize(batch, datatrove, counts), settings, languages, datatrove)
            batch = stats.remove_rows(batch, verdicts)
            for language in pc.unique(batch.column("language")).to_pylist():
                name = f"{path.parent.name}.{safe_name(language) if language else 'unknown'}"
                if name not in writers:
                    place, stem = folder / name, f"{name}-{number:05d}"
                    writers[name] = stack.enter_context(DocumentWriter(place, stem, observe=stats.leave))
                writers[name].write(batch.filter(pc.equal(batch.column("language"), language)))
    return stats.to_json(), counts


def _normalize(batch: pa.RecordBatch, datatrove: DatatroveFilters, counts: Counter[str]) -> pa.RecordBatch:
    """Repair the texts of a batch, and format them by datatrove's formatters."""
    before = batch.column("text")
    text = repair(before)
    counts["repaired"] += pc.sum(pc.not_equal(text, before)).as_py() or 0
    if datatrove.has_formatters:
        formatted = pa.array([datatrove.format(each) for each in text.to_pylist()], pa.string())
        counts["formatted"] += pc.sum(pc.not_equal(formatted, text)).as_py() or 0
        text = repair(formatted)
    return _with(batch, "text", text)


def _judge(
    batch: pa.RecordBatch, settings: FilterSettings, languages: Sequence[str], datatrove: DatatroveFilters
) -> tuple[pa.RecordBatch, dict[int, Verdict]]:
    """The batch with the languages that were found, and the rule that each document breaks, if any."""
    rows, verdicts = batch.to_pylist(), {}
    characters, counted, alphanumeric = count_characters(batch.column("text"))
    shares = alphanumeric / np.maximum(counted, 1)
    for number, row in enumerate(rows):
        verdict: Verdict | None = None
        if characters[number] < settings.min_characters:
            verdict = "too short", f"{characters[number]} characters"
        elif characters[number] > settings.max_characters:
            verdict = "too long", f"{characters[number]} characters"
        elif row["language"] == CODE_LANGUAGE:
            verdict = _code_rules(row["text"])
        elif shares[number] < settings.min_alnum_ratio or not counted[number]:
            verdict = "not enough letters", f"{shares[number]:.2f} of its characters"
        else:
            row["language"], row["language_score"], verdict = _identify(row, settings, languages)
            if verdict is None and settings.datatrove:
                verdict = datatrove.removes(row["text"], row["language"])
        if verdict is not None:
            verdicts[number] = verdict
    for column in ("language", "language_score"):
        batch = _with(batch, column, pa.array([row[column] for row in rows], batch.schema.field(column).type))
    return batch, verdicts


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


def _identify(
    row: dict[str, Any], settings: FilterSettings, languages: Sequence[str]
) -> tuple[str, float | None, Verdict | None]:
    """The language of a document, its score, and the rule that it breaks, if any.

    A recipe without languages keeps all, and identifies none: what a source states is taken. So is what a trusted
    source declares. What another source declares must be found, what a record claims is not believed.
    """
    stated, score = row["language"].removesuffix("?"), row["language_score"]
    declared = stated if stated == row["language"] else ""
    taken = score is not None or not languages or settings.language_threshold == 0
    if languages and (stated if taken else declared) and stated not in languages:
        return stated, score, ("other language", f"{stated}, as its source says")
    if taken:
        return stated, score, None
    found, score, detail = language_among(row["text"], languages, mixed=settings.mixed_languages)
    if found and (found not in languages or (declared not in ("", found) and not settings.mixed_languages)):
        return declared or found, score, ("other language", detail)
    clear = found and score >= settings.language_threshold
    return declared or found, score, None if clear else ("language unclear", detail)
