"""Stage `collect`: every source of the recipe becomes documents of one form, with what is known about each."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from affinage.data.documents import DocumentWriter, clear_documents
from affinage.data.engine import LOCAL, Engine, Progress
from affinage.data.funnel import Funnel
from affinage.data.readers import BadRecord, DamagedFile, Record, read_records
from affinage.data.sources import ResolvedSource, SourceFile, resolve, safe_name
from affinage.errors import UserError
from affinage.recipe.data import DataSettings, SourceSettings

TASK_BYTES = 32_000_000  # of files, as stored: small files are read together, a large one is a task of its own
UNKNOWN_KIND = "unknown kind of file"


@dataclass(frozen=True)
class _Task:
    source: int  # its place in the recipe
    name: str
    settings: SourceSettings
    files: tuple[SourceFile, ...]
    stem: str
    folder: Path
    skip_damaged: bool


def collect(
    settings: DataSettings,
    folder: Path,
    world_folder: Path | None = None,
    *,
    engine: Engine = LOCAL,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read all sources into Parquet files of `documents.SCHEMA` in `folder` and return the stage's summary.

    Documents keep the order of the recipe's sources, then of the sorted file names, then of the file. A record that
    cannot be used is counted by reason; a source of which nothing can be used, and a damaged file (unless
    `damaged_files` is `skip`), is a UserError.
    """
    start = time.perf_counter()
    folder = Path(folder)
    clear_documents(folder)
    sources = resolve(settings, world_folder)
    tasks = _tasks(sources, folder, settings.damaged_files == "skip")
    stored = sum(file.bytes for source in sources for file in source.files)
    results = engine.map(_collect_files, tasks, bytes=stored, progress=progress)

    total = Funnel()
    for place, source in enumerate(sources):
        own = Funnel()
        for name in source.unreadable:
            own.enter(1, 0)
            own.remove(UNKNOWN_KIND, id=name, source=source.name, text="")
        for task, funnel in zip(tasks, results):
            if task.source == place:
                own.merge(funnel)
        _refuse_empty(source, own)
        total.merge(own)
    return total.summary(time.perf_counter() - start)


def _tasks(sources: Iterable[ResolvedSource], folder: Path, skip_damaged: bool) -> list[_Task]:
    """Consecutive files of a source, together about `TASK_BYTES`: the same tasks for any number of workers."""
    tasks: list[_Task] = []
    for place, source in enumerate(sources):
        files: list[SourceFile] = []
        bytes = 0
        for position, file in enumerate(source.files, 1):
            files.append(file)
            bytes += file.bytes
            if bytes >= TASK_BYTES or position == len(source.files):
                stem = f"documents-{len(tasks):05d}"
                tasks.append(_Task(place, source.name, source.settings, tuple(files), stem, folder, skip_damaged))
                files, bytes = [], 0
    return tasks


def _collect_files(task: _Task) -> Funnel:
    funnel = Funnel()
    with DocumentWriter(task.folder, task.stem, observe=funnel.leave) as writer:
        for record in _usable(task, funnel):
            funnel.enter(1, len(record.text.encode()))
            settings = task.settings
            writer.add(
                id=record.id,
                source=task.name if settings.name or not record.source else safe_name(record.source),
                language=settings.language or (record.language and f"{record.language}?"),
                url=record.url,
                licence=record.licence or settings.licence,
                text=record.text,
            )
    return funnel


def _usable(task: _Task, funnel: Funnel) -> Iterator[Record]:
    """The usable records of the task's files; the others are counted, with where they are."""

    def skip(id: str, reason: str, detail: str, text: str = "") -> None:
        funnel.enter(1, len(text.encode(errors="replace")))
        funnel.remove(reason, id=id, source=task.name, text=text, detail=detail)

    for file in task.files:
        try:
            for record in read_records(file, task.settings.text_key):
                if isinstance(record, BadRecord):
                    skip(record.id, record.reason, record.detail, record.text)
                else:
                    yield record
        except DamagedFile as damage:
            if not task.skip_damaged:
                raise UserError(
                    str(damage),
                    where=file.url.removeprefix("file://"),
                    fix="Replace the file, or set data.damaged_files=skip to keep what can be read of such files.",
                ) from None
            skip(file.name, "damaged file", str(damage))


def _refuse_empty(source: ResolvedSource, funnel: Funnel) -> None:
    if funnel.documents_out:
        return
    reasons = [reason for reason, _ in funnel.removed.most_common() if reason != UNKNOWN_KIND]
    if not reasons:
        raise UserError("there is no document in it", where=f"{source.where} ({source.settings.path})")
    reason = reasons[0]
    first = funnel.samples[reason][0]
    fixes = {
        "no text key": "Name the key that holds the text: sources: [{path: ..., text_key: ...}].",
        "not UTF-8": "Convert it, for example with: iconv -f latin1 -t utf-8.",
        "not JSON": "A .jsonl file holds one JSON object per line.",
    }
    raise UserError(
        f"none of its {funnel.documents_in} records can be used; {reason}: {first['detail']}",
        where=f"{source.where}, {first['id'].replace('#', ', line ')}",
        fix=fixes.get(reason, ""),
    )
