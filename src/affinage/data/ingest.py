"""Step `ingest`: every source of the recipe becomes documents of one form, with what is known about each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from affinage.cluster.executor import LOCAL, POOL_BYTES, Executor, clear_completions
from affinage.config.data import POCKET_WORLD, DataSettings, SourceSettings, safe_name
from affinage.data.documents import DocumentWriter, Stats, document_files
from affinage.data.files import DamagedFile, Part, compression_of, find
from affinage.data.order import shuffle_keys
from affinage.data.places import is_on_hub, is_remote, located, unique
from affinage.data.readers import UNKNOWN_KIND, BadRecord, Record, at_commit, parts_of, read_records
from affinage.data.special_tokens import CODE_LANGUAGE
from affinage.errors import UserError

TASK_BYTES = 32_000_000  # of files, as stored
WAVE, WAVE_BYTES = 64, 100_000  # tasks that share what is left of `max_bytes`, at most; text of each, at least


@dataclass(frozen=True)
class Task:
    """Parts of one source that are read together."""

    name: str  # of the source, unique in the recipe, and safe as a part of a file name
    source: SourceSettings  # a dataset of the Hub has the commit that it is at as `revision`
    parts: tuple[Part, ...]
    stem: str  # of the files that it writes
    stored: int  # bytes of its files, as stored; parts of a dataset count one each
    limit: int | None = None  # bytes of text


def ingest(
    settings: DataSettings, folder: Path, world_folder: Path | None = None, *, executor: Executor = LOCAL
) -> dict[str, Any]:
    """Read all sources into document files in `folder/<source>` and return the step's summary.

    Documents of a source keep the order of its sorted file names, then of the file. A record that cannot be used is
    counted by reason; a source of which nothing can be used, and a damaged file (unless `on_error` is `skip`), is a
    UserError. The summary also has the `commits` of datasets of the Hub. An interrupted call resumes.
    """
    tasks: dict[str, list[Task]] = {}  # by the name of the source
    world = {"path": str(Path(world_folder or "") / "documents" / "*.jsonl"), "max_bytes": None}
    for position, source in enumerate(settings.sources):
        name, is_world = unique(source.title, tasks), source.path == POCKET_WORLD  # of no more than `max_bytes`
        source = source.model_copy(update=world) if is_world else located(source, settings)
        source, parts = find_parts(source, f"data.sources[{position}]")
        tasks[name] = [
            Task(name, source, group, f"{name}-{number:05d}", sum(part.bytes for part in group))
            for number, group in enumerate(divide(parts, TASK_BYTES))
        ]
    results = _read_all(tasks, folder, settings, executor)

    of_sources = [Stats.total(results[task.stem] for task in own if task.stem in results) for own in tasks.values()]
    for position, (source, stats) in enumerate(zip(settings.sources, of_sources)):
        if not stats.documents and not stats.counts["not_sampled"]:
            what = "there is no document in it"
            if reasons := [reason for reason, _ in stats.removed.most_common() if reason != UNKNOWN_KIND]:
                one, count = stats.samples[reasons[0]][0], stats.removed.total()
                what = f"none of its {count} records can be used; {one['id']}: {reasons[0]}: {one['detail']}"
            raise UserError(what, where=f"data.sources[{position}] ({source.place})")
    total = Stats.total(map(vars, of_sources))
    counts = {name: total.counts[name] for name in ("not_sampled", "lone_surrogates")}
    if not total.documents:
        what = f"the sample holds none of {counts['not_sampled']} documents"
        raise UserError(what, where="data.sample", fix="Take more.")
    for path in document_files(folder):
        if path.stem.rpartition("-")[0] not in results:  # of an attempt before, at another commit
            path.unlink()
    clear_completions(folder)
    commits = {name: own[0].source.revision for name, own in tasks.items() if is_on_hub(own[0].source)}
    return total.summary() | counts | ({"commits": commits} if commits else {})


def find_parts(source: SourceSettings, where: str) -> tuple[SourceSettings, Sequence[Part]]:
    """The settings of a located source, with the commit of a dataset of the Hub as its revision, and the parts of it.

    Raises UserError if the source, or its column of text, is not there.
    """
    if source.path:
        return source, find(source.path, source, where)
    source = at_commit(source, where) if is_on_hub(source) else source
    return source, parts_of(source, where)


# ---- tasks ----


def divide(parts: Sequence[Part], most: int) -> list[tuple[Part, ...]]:
    """Consecutive parts of a source, together about `most` bytes: the same for any number of workers."""
    groups: list[list[Part]] = []
    size = 0  # of the last group
    for part in parts:
        pieces, divisible = [part], part.kind in ("lines", "table") and not compression_of(part.name)
        if divisible and part.bytes > most:
            bounds = [*range(0, part.bytes, most), part.bytes]
            pieces = [replace(part, start=a, stop=b, bytes=b - a) for a, b in pairwise(bounds)]
        for piece in pieces:
            size += piece.bytes
            if not groups or size > most or piece.kind == "dataset":
                groups.append([])
                size = piece.bytes
            groups[-1].append(piece)
    return [tuple(group) for group in groups]


def _read_all(
    tasks: dict[str, list[Task]], folder: Path, settings: DataSettings, executor: Executor
) -> dict[str, dict[str, Any]]:
    """The statistics of the tasks that were read, by their stems."""
    results: dict[str, dict[str, Any]] = {}

    def read(work: list[Task], name: str) -> int:
        size = sum(POOL_BYTES if is_remote(task.source) else task.stored for task in work)
        done = executor.map(partial(run, folder, settings), work, folder / "completions" / name, bytes=size)
        results.update(zip([task.stem for task in work], done, strict=True))
        return sum(sum(stats["bytes"].values()) for stats in done)

    read([task for own in tasks.values() for task in own if task.source.max_bytes is None], "whole")
    # Of a source with `max_bytes`, tasks are read in waves, in shuffled order, each with its share of what is left,
    # until the source has given as much. So a little of a corpus is taken from many files, and much in whole files.
    for name, own in tasks.items():
        left = total = (own[0].source.max_bytes or 0) * settings.sample
        order = np.argsort(shuffle_keys([task.stem for task in own], "waves"), kind="stable")
        waiting = [own[position] for position in order]
        while waiting and total and left >= 0.01 * total:
            count = min(WAVE, max(1, int(left // WAVE_BYTES)))
            wave, waiting = waiting[:count], waiting[count:]
            stored = max(1, sum(task.stored for task in wave))
            wave = [replace(task, limit=max(1, round(left * task.stored / stored))) for task in wave]
            left -= read(wave, f"{name}-{len(waiting)}")
    return results


def run(folder: Path, settings: DataSettings, task: Task) -> dict[str, Any]:
    """Read the parts of one task into document files; returns its statistics."""
    stats, taken, source, code = Stats(), 0, task.source, task.source.kind == "code"
    with DocumentWriter(folder / task.name, task.stem, stats) as writer:
        for record in _usable(task, settings, stats):
            size = len(record.text.encode())
            if task.limit is not None and taken and taken + size > task.limit:
                break
            taken += size
            stats.counts.update(documents=1, bytes=size, lone_surrogates=int(record.replaced))
            claimed = f"{record.language}?" if record.language not in ("", CODE_LANGUAGE) else ""
            writer.add(
                id=record.id,
                source=task.name if source.name or not record.source else safe_name(record.source),
                language=CODE_LANGUAGE if code else source.language or claimed,
                language_score=1.0 if source.trust_language and not code else None,
                url=record.url,
                license=record.license or source.license,
                text=record.text,
            )
    return vars(stats)


def _usable(task: Task, settings: DataSettings, stats: Stats) -> Iterator[Record]:
    """The usable records of the task that are in the sample; the others are counted, with where they are."""
    share = settings.sample if task.source.max_bytes is None else 1.0
    for part in task.parts:
        try:
            for record in read_records(part, task.source):
                if isinstance(record, BadRecord):
                    stats.counts.update(documents=1, bytes=len(record.text.encode(errors="replace")))
                    stats.remove(record.reason, id=record.id, source=task.name, text=record.text, detail=record.detail)
                elif share == 1 or shuffle_keys([f"{task.name}/{record.id}"], "sample")[0] < share * 2**64:
                    yield record
                else:
                    stats.counts["not_sampled"] += 1
        except DamagedFile as damage:
            if settings.on_error == "raise":
                where = part.url.removeprefix("file://") or part.name
                fix = "Replace the file, or set data.on_error=skip to keep what can be read of such files."
                raise UserError(str(damage), where=where, fix=fix) from None
            stats.counts["documents"] += 1
            stats.remove("damaged file", id=part.name, source=task.name, text="", detail=str(damage))
