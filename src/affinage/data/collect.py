"""Step `ingest`: every source of the recipe becomes documents of one form, with what is known about each.

The work is divided into parts that do not depend on the number of workers; each leaves a note when it is done, so that
a stage that was killed goes on with the parts that are missing.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from affinage.config.data import DataSettings, SourceSettings
from affinage.config.sources import safe_name
from affinage.data.documents import DocumentWriter, clear_documents
from affinage.data.executor import LOCAL, POOL_BYTES, Executor, Progress, clear_completions
from affinage.data.file_kinds import compression_of, kind_of
from affinage.data.funnel import Funnel
from affinage.data.hub_datasets import DatasetPart, stream
from affinage.data.opening import SourceFile
from affinage.data.order import shuffle_keys
from affinage.data.places import is_on_hub, is_remote
from affinage.data.readers import as_kind, read_records
from affinage.data.records import BROKEN, BadRecord, DamagedFile, Record
from affinage.data.sources import ResolvedSource, resolve
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.errors import UserError

TASK_BYTES = 32_000_000  # of files, as stored: small files are read together, a large one is a task of its own
UNKNOWN_KIND = "unknown kind of file"


@dataclass(frozen=True)
class Task:
    """Parts of one source that are read together, and how."""

    source: int  # its place in the recipe
    name: str
    settings: SourceSettings
    parts: tuple[SourceFile | DatasetPart, ...]
    stem: str
    folder: Path
    skip_damaged: bool
    stop_broken: bool
    sample: float
    limit: int | None  # bytes of text


@dataclass
class _Read:
    """What a task has read."""

    funnel: Funnel
    not_sampled: int = 0
    files: list[str] = field(default_factory=list)


def collect(
    settings: DataSettings,
    folder: Path,
    world_folder: Path | None = None,
    *,
    executor: Executor = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read all sources into Parquet files of `documents.SCHEMA` in `folder` and return the stage's summary.

    Documents keep the order of the recipe's sources, then of the sorted file names, then of the file. A record that
    cannot be used is counted by reason; a source of which nothing can be used, and a damaged file (unless
    `on_error` is `skip`), is a UserError. What an interrupted call left in `folder` is kept if it is finished.
    The summary also counts `not_sampled` documents, and has the `commits` at which datasets of the Hub were read.
    """
    start = time.perf_counter()
    folder = Path(folder)
    sources = resolve(settings, world_folder)
    tasks = divide(sources, folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    stored = sum(part.bytes for task in tasks for part in task.parts if isinstance(part, SourceFile))
    if any(is_remote(source.settings) for source in sources) and not settings.mirror:
        stored = max(stored, POOL_BYTES)
    results = [_Read(**each) for each in executor.map(run, tasks, folder, bytes=stored, progress=progress)]
    for each in results:
        each.funnel = Funnel.from_json(each.funnel)  # type: ignore[arg-type]
    clear_documents(folder, kept={name for each in results for name in each.files})

    total, not_sampled = Funnel(), 0
    for place, source in enumerate(sources):
        own, left_out = Funnel(), 0
        for name in source.unreadable:
            own.enter(1, 0)
            own.remove(UNKNOWN_KIND, id=name, source=source.name, text="")
        for task, result in zip(tasks, results):
            if task.source == place:
                own.merge(result.funnel)
                left_out += result.not_sampled
        if not left_out:
            _refuse_empty(source, own)
        total.merge(own)
        not_sampled += left_out
    if not total.documents_out:
        raise UserError(f"the sample holds none of {not_sampled} documents", where="data.sample", fix="Take more.")
    clear_completions(folder)
    commits = {one.name: one.settings.revision for one in sources if is_on_hub(one.settings, settings.mirror)}
    told = {"not_sampled": not_sampled} | ({"commits": commits} if commits else {})
    return total.summary(time.perf_counter() - start) | told


def divide(sources: Iterable[ResolvedSource], folder: Path, settings: DataSettings) -> list[Task]:
    """Consecutive files of a source, together about `TASK_BYTES`: the same tasks for any number of workers."""
    tasks: list[Task] = []
    for place, source in enumerate(sources):
        groups = list(_groups(source))
        limits = _limits(groups, source.settings, settings.sample)
        for group, limit in zip(groups, limits):
            task = Task(
                source=place,
                name=source.name,
                settings=source.settings,
                parts=tuple(group),
                stem=f"documents-{len(tasks):05d}",
                folder=folder,
                skip_damaged=settings.on_error == "skip",
                stop_broken=settings.on_error == "raise",
                sample=source.sample,
                limit=limit,
            )
            tasks.append(task)
    return tasks


def _groups(source: ResolvedSource) -> Iterator[list[SourceFile | DatasetPart]]:
    group: list[SourceFile | DatasetPart] = []
    bytes = 0
    for part in _parts(source):
        if isinstance(part, DatasetPart):
            yield [part]
            continue
        group.append(part)
        bytes += _stored(part)
        if bytes >= TASK_BYTES:
            yield group
            group, bytes = [], 0
    if group:
        yield group


def _parts(source: ResolvedSource) -> Iterator[SourceFile | DatasetPart]:
    """The parts of a source, large dumps that can be read side by side divided."""
    for part in source.parts:
        if (
            isinstance(part, SourceFile)
            and kind_of(part.name) == "dump"
            and compression_of(part.name) == ".bz2"
            and source.settings.kind != "code"
            and part.bytes > TASK_BYTES
        ):
            for start in range(0, part.bytes, TASK_BYTES):
                yield replace(part, start=start, stop=min(start + TASK_BYTES, part.bytes))
        else:
            yield part


def _stored(part: SourceFile | DatasetPart) -> int:
    if isinstance(part, DatasetPart):
        return 1
    return (part.bytes if part.stop is None else part.stop) - part.start


def _limits(groups: list[list[SourceFile | DatasetPart]], settings: SourceSettings, sample: float) -> list[int | None]:
    """The bytes of text that each task may take: the source's limit, divided as its stored bytes are."""
    if settings.max_bytes is None or settings.path == "pocket-world":
        return [None] * len(groups)
    sizes = [sum(map(_stored, group)) for group in groups]
    limit, total = settings.max_bytes * sample, max(1, sum(sizes))
    return [max(1, round(limit * size / total)) for size in sizes]


def run(task: Task) -> dict[str, Any]:
    """Read the parts of one task into document files; returns the statistics."""
    clear_documents(task.folder, task.stem)
    read, taken = _Read(Funnel()), 0
    with DocumentWriter(task.folder, task.stem, observe=read.funnel.leave) as writer:
        for record in _usable(task, read):
            taken += len(record.text.encode())
            if task.limit is not None and taken > task.limit and taken > len(record.text.encode()):
                break
            read.funnel.enter(1, len(record.text.encode()))
            writer.add(
                id=record.id,
                source=task.name if task.settings.name or not record.source else safe_name(record.source),
                language=_language(record, task.settings),
                url=record.url,
                licence=record.licence or task.settings.license,
                text=record.text,
            )
    return {
        "funnel": read.funnel.to_json(),
        "not_sampled": read.not_sampled,
        "files": [path.name for path in writer.files],
    }


def _language(record: Record, settings: SourceSettings) -> str:
    if settings.kind == "code":
        return CODE_LANGUAGE
    claimed = record.language if record.language != CODE_LANGUAGE else ""
    return settings.language or (claimed and f"{claimed}?")


def _usable(task: Task, read: _Read) -> Iterator[Record]:
    """The usable records of the task that are in the sample; the others are counted, with where they are."""

    def skip(id: str, reason: str, detail: str, text: str = "") -> None:
        read.funnel.enter(1, len(text.encode(errors="replace")))
        read.funnel.remove(reason, id=id, source=task.name, text=text, detail=detail)

    for part in task.parts:
        try:
            for record in _records(part, task.settings):
                if isinstance(record, BadRecord):
                    if task.stop_broken and record.reason in BROKEN:
                        raise UserError(
                            f"{record.reason}: {record.detail}",
                            where=record.id.replace("#", ", line "),
                            fix="Mend it, or count and skip such records: data.on_error=skip.",
                        )
                    skip(record.id, record.reason, record.detail, record.text)
                elif _in_sample(task, record):
                    yield record
                else:
                    read.not_sampled += 1
        except DamagedFile as damage:
            if not task.skip_damaged:
                raise UserError(
                    str(damage),
                    where=part.url.removeprefix("file://") if isinstance(part, SourceFile) else part.name,
                    fix="Replace the file, or set data.on_error=skip to keep what can be read of such files.",
                ) from None
            skip(part.name, "damaged file", str(damage))


def _records(part: SourceFile | DatasetPart, settings: SourceSettings) -> Iterator[Record | BadRecord]:
    if isinstance(part, SourceFile):
        return read_records(part, settings)
    return as_kind(stream(part, settings), settings)


def _in_sample(task: Task, record: Record) -> bool:
    if task.sample == 1:
        return True
    return int(shuffle_keys([f"{task.name}/{record.id}"], 0, "sample")[0]) < task.sample * 2**64


def _refuse_empty(source: ResolvedSource, funnel: Funnel) -> None:
    if funnel.documents_out:
        return
    place = source.settings.path or source.settings.dataset
    reasons = [reason for reason, _ in funnel.removed.most_common() if reason != UNKNOWN_KIND]
    if not reasons:
        raise UserError("there is no document in it", where=f"{source.where} ({place})")
    reason = reasons[0]
    first = funnel.samples[reason][0]
    fixes = {
        "no text key": "Name the key that holds the text: sources: [{path: ..., text_key: ...}].",
        "not UTF-8": "Convert it, for example with: iconv -f latin1 -t utf-8.",
        "binary": "Have its text extracted first; of a PDF for example by pdftotext.",
        "not JSON": "A .jsonl file holds one JSON object per line.",
    }
    raise UserError(
        f"none of its {funnel.documents_in} records can be used; {reason}: {first['detail']}",
        where=f"{source.where}, {first['id'].replace('#', ', line ')}",
        fix=fixes.get(reason, ""),
    )
