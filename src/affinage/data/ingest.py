"""Step `ingest`: every source of the recipe becomes documents of one form, with what is known about each.

The work is divided into tasks that do not depend on the number of workers: small files together, a large one in parts
where its kind can be read in parts, a file of a dataset each.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from affinage.config.data import POCKET_WORLD, DataSettings, SourceSettings, safe_name
from affinage.data.documents import DocumentWriter, clear_documents
from affinage.data.executor import LOCAL, POOL_BYTES, Executor, Progress, clear_completions
from affinage.data.files import DamagedFile, SourceFile, compression_of, find, kind_of
from affinage.data.hub_answers import dataset_of
from affinage.data.hub_datasets import DatasetPart, at_commit, parts_of, stream
from affinage.data.order import shuffle_keys
from affinage.data.places import is_folder, is_on_hub, is_remote, location, unique
from affinage.data.readers import BROKEN, BadRecord, Record, as_kind, read_records
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.data.stats import Stats
from affinage.errors import UserError

TASK_BYTES = 32_000_000  # of files, as stored
WAVE, WAVE_BYTES = 64, 100_000  # tasks that share what is left of `max_bytes`, at most; text of each, at least
UNKNOWN_KIND = "unknown kind of file"
Part = SourceFile | DatasetPart
_FIXES = {
    "no text key": "Name the key that holds the text: sources: [{path: ..., text_key: ...}].",
    "not UTF-8": "Convert it, for example with: iconv -f latin1 -t utf-8.",
    "binary": "Have its text extracted first; of a PDF for example by pdftotext.",
    "not JSON": "A .jsonl file holds one JSON object per line.",
}


@dataclass(frozen=True)
class ResolvedSource:
    """A source of the recipe with the files that were found for it, or the parts of the dataset that it is."""

    settings: SourceSettings  # a dataset of the Hub has the commit that it is at as `revision`
    name: str  # unique in the recipe, safe as a part of a file name
    where: str  # the recipe key, for messages
    parts: tuple[Part, ...]
    unreadable: tuple[str, ...] = ()  # names of files in it whose kind is not known
    sample: float = 1.0  # share of the documents in `parts` to take


@dataclass(frozen=True)
class Task:
    """A source with those of its parts that are read together, and how."""

    source: ResolvedSource
    stem: str  # of the files that it writes
    folder: Path
    on_error: str | None
    limit: int | None = None  # bytes of text

    @property
    def stored(self) -> int:
        """Bytes of its files, as stored; parts of a dataset count one each."""
        return sum(map(_stored, self.source.parts))


def ingest(
    settings: DataSettings,
    folder: Path,
    world_folder: Path | None = None,
    *,
    executor: Executor = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read all sources into document files in `folder/<source>` and return the step's summary.

    Documents of a source keep the order of its sorted file names, then of the file. A record that cannot be used is
    counted by reason; a source of which nothing can be used, and a damaged file (unless `on_error` is `skip`), is a
    UserError. The summary also counts `not_sampled` documents and those with `lone_surrogates` that were replaced,
    and has the `commits` at which datasets of the Hub were read. An interrupted call resumes with the missing tasks.
    """
    start = time.perf_counter()
    folder = Path(folder)
    sources = resolve(settings, world_folder)
    tasks = {source.name: divide(source, folder, settings) for source in sources}
    results = _read_all(sources, tasks, settings, executor, progress)
    clear_documents(folder, kept={folder / name for result in results.values() for name in result["files"]})

    total, not_sampled = Stats(), 0
    for source in sources:
        own = Stats()
        for name in source.unreadable:
            own.enter(1, 0)
            own.remove(UNKNOWN_KIND, id=name, source=source.name, text="")
        found = [results[task.stem] for task in tasks[source.name] if task.stem in results]
        for result in found:
            own.merge(result["stats"])
        left_out = sum(result["not_sampled"] for result in found)
        if not left_out and not own.documents_out:
            _refuse_empty(source, own)
        total.merge(own)
        not_sampled += left_out
    if not total.documents_out:
        raise UserError(f"the sample holds none of {not_sampled} documents", where="data.sample", fix="Take more.")
    clear_completions(folder)
    commits = {one.name: one.settings.revision for one in sources if is_on_hub(one.settings, settings.mirror)}
    counts = {"not_sampled": not_sampled, "lone_surrogates": sum(one["replaced"] for one in results.values())}
    return total.summary(time.perf_counter() - start) | counts | ({"commits": commits} if commits else {})


def _refuse_empty(source: ResolvedSource, stats: Stats) -> None:
    reason = next((reason for reason, _ in stats.removed.most_common() if reason != UNKNOWN_KIND), None)
    if reason is None:
        place = source.settings.path or source.settings.dataset
        raise UserError("there is no document in it", where=f"{source.where} ({place})")
    first = stats.samples[reason][0]
    raise UserError(
        f"none of its {stats.documents_in} records can be used; {reason}: {first['detail']}",
        where=f"{source.where}, {_in_file(first['id'])}",
        fix=_FIXES.get(reason, ""),
    )


# ---- sources ----


def resolve(settings: DataSettings, world_folder: Path | None) -> list[ResolvedSource]:
    """Find the files of every source, in the order of the recipe and sorted by name within each.

    Of a sample of a source on another machine, only as many files are read as hold it: the rest of the share is taken
    of their documents. Raises UserError for a source that is not there, holds no readable file, cannot be reached, or
    needs a package that is not installed.
    """
    resolved: list[ResolvedSource] = []
    for position, source in enumerate(settings.sources):
        where, world = f"data.sources[{position}]", Path(world_folder or "") / "documents" / "*.jsonl"
        place = str(world) if source.path == POCKET_WORLD else location(source, settings.root, settings.mirror)
        name, share = unique(source.title, {other.name for other in resolved}), settings.sample
        source, parts, unreadable = _find(source, place, settings, where)
        if share < 1 and is_remote(source) and not settings.mirror:
            count = int(max(1, -(-len(parts) * share // 1)))
            chosen = sorted(_shuffled([f"{name}/{part.name}" for part in parts], "sampled files")[:count])
            parts, share = [parts[k] for k in chosen], min(1.0, share * len(parts) / count)
        resolved.append(ResolvedSource(source, name, where, tuple(parts), tuple(unreadable), share))
    return resolved


def check(source: SourceSettings, settings: DataSettings, where: str = "") -> None:
    """Check that a source is there, without reading it. Raises UserError if it is not."""
    place = location(source, settings.root, settings.mirror)
    if source.path == POCKET_WORLD:
        return
    if dataset := place if is_on_hub(source, settings.mirror) else dataset_of(place):
        at_commit(dataset, source, where)  # a gated one shows its files to everybody
    if not is_on_hub(source, settings.mirror):
        _find(source, place, settings, where)


def _find(
    source: SourceSettings, place: str, settings: DataSettings, where: str
) -> tuple[SourceSettings, Sequence[Part], list[str]]:
    """The settings with the commit of a dataset of the Hub, the parts, and the names of files that are not readable."""
    if is_on_hub(source, settings.mirror):
        source = at_commit(place, source, where)
    elif not source.dataset or not is_folder(source.dataset):
        return source, *find(place, source, where)
    return source, parts_of(place, source, where), []


def _shuffled(names: list[str], purpose: str) -> list[int]:
    """The places of the names in an order that depends on them alone."""
    keys = shuffle_keys(names, 0, purpose).tolist()
    return sorted(range(len(names)), key=keys.__getitem__)


# ---- tasks ----


def divide(source: ResolvedSource, folder: Path, settings: DataSettings) -> list[Task]:
    """Consecutive parts of a source, together about `TASK_BYTES`: the same tasks for any number of workers."""
    groups: list[list[Part]] = []
    for part in _divided(source):
        alone = isinstance(part, DatasetPart) or not groups
        if alone or sum(map(_stored, [*groups[-1], part])) > TASK_BYTES:
            groups.append([])
        groups[-1].append(part)
    parts = [replace(source, parts=tuple(group)) for group in groups]
    stems = [f"{source.name}-{number:05d}" for number in range(len(parts))]
    return [Task(own, stem, folder / source.name, settings.on_error) for own, stem in zip(parts, stems)]


def _divided(source: ResolvedSource) -> Iterator[Part]:
    """The parts of a source; of a large file that can be read side by side, ranges of bytes."""
    for part in source.parts:
        if isinstance(part, SourceFile) and part.bytes > TASK_BYTES and _can_be_divided(part, source.settings):
            for start in range(0, part.bytes, TASK_BYTES):
                yield replace(part, start=start, stop=min(start + TASK_BYTES, part.bytes))
        else:
            yield part


def _can_be_divided(file: SourceFile, settings: SourceSettings) -> bool:
    kind, compression = kind_of(file.name, code=settings.kind == "code"), compression_of(file.name)
    return kind == "table" or (kind == "lines" and not compression) or (kind == "dump" and compression == ".bz2")


def _stored(part: Part) -> int:
    if isinstance(part, DatasetPart):
        return 1
    return (part.bytes if part.stop is None else part.stop) - part.start


def _read_all(
    sources: list[ResolvedSource],
    tasks: dict[str, list[Task]],
    settings: DataSettings,
    executor: Executor,
    progress: Progress | None,
) -> dict[str, dict[str, Any]]:
    """What each task read, by its stem.

    Of a source with `max_bytes`, tasks are read in waves, in shuffled order, each with its share of what is left, until
    the source has given as much. So a little of a corpus is taken from many of its files, and much in whole files.
    """
    results: dict[str, dict[str, Any]] = {}
    remote = any(is_remote(source.settings) for source in sources) and not settings.mirror

    def read(work: list[Task], name: str) -> int:
        """Read some tasks; returns the bytes of text that they gave."""
        bytes = max(sum(task.stored for task in work), POOL_BYTES if remote else 0)
        place = work[0].folder.parent / "completions" / name
        found = executor.map(run, work, place, bytes=bytes, progress=progress)
        results.update(zip([task.stem for task in work], found, strict=True))
        return sum(one["stats"]["bytes_out"] for one in found)

    limits = {one.name: one.settings.max_bytes for one in sources if one.settings.path != POCKET_WORLD}
    whole = [task for name, own in tasks.items() if limits.get(name) is None for task in own]
    if whole:
        read(whole, "whole")
    for name, limit in limits.items():
        own = tasks[name]
        waiting = [own[k] for k in _shuffled([task.stem for task in own], "waves")] if limit else []
        left = total = (limit or 0) * settings.sample
        while waiting and left >= 0.01 * total:
            count = min(WAVE, max(1, int(left // WAVE_BYTES)))
            wave, waiting = waiting[:count], waiting[count:]
            stored = max(1, sum(task.stored for task in wave))
            wave = [replace(task, limit=max(1, round(left * task.stored / stored))) for task in wave]
            left -= read(wave, f"{name}-{len(waiting)}")
    return results


def run(task: Task) -> dict[str, Any]:
    """Read the parts of one task into document files; returns its statistics."""
    clear_documents(task.folder, task.stem)
    stats, taken, counts = Stats(), 0, {"not_sampled": 0, "replaced": 0}
    settings, code = task.source.settings, task.source.settings.kind == "code"
    with DocumentWriter(task.folder, task.stem, observe=stats.leave) as writer:
        for record in _usable(task, stats, counts):
            size = len(record.text.encode())
            if task.limit is not None and taken and taken + size > task.limit:
                break
            taken += size
            counts["replaced"] += record.replaced
            stats.enter(1, size)
            claimed = f"{record.language}?" if record.language not in ("", CODE_LANGUAGE) else ""
            writer.add(
                id=record.id,
                source=task.source.name if settings.name or not record.source else safe_name(record.source),
                language=CODE_LANGUAGE if code else settings.language or claimed,
                language_score=1.0 if settings.trust_language and not code else None,
                url=record.url,
                license=record.license or settings.license,
                text=record.text,
            )
    files = [str(path.relative_to(task.folder.parent)) for path in writer.files]
    return {"stats": stats.to_json(), "files": files, **counts}


def _usable(task: Task, stats: Stats, counts: dict[str, int]) -> Iterator[Record]:
    """The usable records of the task that are in the sample; the others are counted, with where they are."""
    name, sample, settings = task.source.name, task.source.sample, task.source.settings
    for part in task.source.parts:
        try:
            for record in _records(part, settings):
                if isinstance(record, BadRecord):
                    if task.on_error == "raise" and record.reason in BROKEN:
                        fix = "Mend it, or count and skip such records: data.on_error=skip."
                        raise UserError(f"{record.reason}: {record.detail}", where=_in_file(record.id), fix=fix)
                    stats.enter(1, len(record.text.encode(errors="replace")))
                    stats.remove(record.reason, id=record.id, source=name, text=record.text, detail=record.detail)
                elif sample == 1 or int(shuffle_keys([f"{name}/{record.id}"], 0, "sample")[0]) < sample * 2**64:
                    yield record
                else:
                    counts["not_sampled"] += 1
        except DamagedFile as damage:
            if task.on_error != "skip":
                where = part.url.removeprefix("file://") if isinstance(part, SourceFile) else part.name
                fix = "Replace the file, or set data.on_error=skip to keep what can be read of such files."
                raise UserError(str(damage), where=where, fix=fix) from None
            stats.enter(1, 0)
            stats.remove("damaged file", id=part.name, source=name, text="", detail=str(damage))


def _records(part: Part, settings: SourceSettings) -> Iterator[Record | BadRecord]:
    if isinstance(part, SourceFile):
        return read_records(part, settings)
    return as_kind(stream(part, settings), settings)


def _in_file(id: str) -> str:
    """The id of a record without one of its own, as messages have it."""
    return re.sub(r"@(\d+)$", r", byte \1", re.sub(r"#(\d+)$", r", line \1", id))
