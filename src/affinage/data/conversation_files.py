"""The lines of files and data sets that hold conversations, wherever they are."""

import glob
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from affinage.config.sources import POCKET_WORLD, SourceSettings
from affinage.config.tuning import ConversationSettings, TuningSettings
from affinage.data.conversation_shapes import Conversation, conversation
from affinage.data.files import DamagedFile, SourceFile, find, kind_of, open_plain, open_stored, reports_damage
from affinage.data.foreign_json import of_a_line
from affinage.data.hub_datasets import DatasetPart, at_commit, parts_of, rows_of
from affinage.data.places import is_on_hub, is_remote, location, unique
from affinage.data.readers import rows_of_batch
from affinage.errors import UserError

READABLE = ".jsonl, .ndjson (each also .gz, .zst, .bz2, .xz) and .parquet"

_ONE_OBJECT = "A line is one JSON object, {...}: neither a part of one nor a list of them."

Part = SourceFile | DatasetPart
Line = tuple[str, str, Mapping[str, Any] | UserError]  # where it is, its name, what it says


def read_conversations(source: ConversationSettings, place: str | None = None) -> Iterator[Conversation | UserError]:
    """The conversations of a source in order; a line that is none comes as the error that says so.

    Args:
        source: of the recipe.
        place: where it is, if not where its `path` or `dataset` says.

    Raises:
        UserError: nothing is there, or a file is damaged.
    """
    for where, name, item in read_lines(source, place):
        if isinstance(item, UserError):
            yield item
            continue
        try:
            yield conversation(item, source.format, where=where, name=name)
        except UserError as error:
            yield error


def read_lines(source: ConversationSettings, place: str | None = None) -> Iterator[Line]:
    """Return the JSON objects of a source's lines, or the rows of its tables; see `read_conversations`."""
    settings = source.as_source()
    found = place or source.path or source.dataset
    if is_remote(settings) and found == settings.dataset:
        settings = at_commit(found, settings, "")
    for part in parts(settings, found):
        yield from lines_of(part, settings)


def lines_of(part: Part, settings: SourceSettings, number: int = 0, count: int = 1) -> Iterator[Line]:
    """Return the lines `number`, `number + count`, ... of one part of a source; see `read_lines`."""
    where = part.name if isinstance(part, DatasetPart) else part.url.removeprefix("file://")
    try:
        with reports_damage():
            yield from _lines(part, settings, where, number, count)
    except DamagedFile as error:
        raise UserError(f"the file is damaged: {error}", where=where) from None


def parts(settings: SourceSettings, place: str, where: str = "") -> list[SourceFile] | list[DatasetPart]:
    """The files of a source, or the parts of the data set that it is. Raises UserError where there are none.

    `settings` of one on the Hub are as `at_commit` gives them.
    """
    mirrored = is_remote(settings) and place != settings.dataset
    if settings.dataset and not mirrored:
        return parts_of(place, settings, where, of_text=False)
    if "://" not in place and not Path(place).exists() and not glob.glob(place, recursive=True):
        fix = "Relative paths start from `root` if it is set, else from the working directory."
        raise UserError(f"there is no `{place}`", where=where or place, fix=fix)
    files, _ = find(place, settings, where or place)
    files = [file for file in files if kind_of(file.name) in ("lines", "table")]
    if not files:
        raise UserError("no conversations found", where=place, fix=f"give files, folders or globs of {READABLE}")
    return files


def located(settings: TuningSettings, world_folder: Path | None, file: str) -> Iterator[tuple[str, str, int]]:
    """Where each source is, its name (unique, fit for a file name) and its place in the recipe.

    `file` of the `world_folder` is what the pocket world has for it.
    """
    taken: set[str] = set()
    for index, source in enumerate(settings.sources):
        name = unique(source.title, taken)
        taken.add(name)
        if source.path != POCKET_WORLD:
            yield location(source.as_source(), settings.root, settings.mirror), name, index
        elif world_folder is None:
            raise UserError("the pocket world is not there", where=POCKET_WORLD)
        else:
            yield str(world_folder / file), name, index


def check(settings: TuningSettings, index: int) -> None:
    """See that a source is there, without reading it. Raises UserError if it is not."""
    source = settings.sources[index].as_source()
    place = location(source, settings.root, settings.mirror)
    if place == POCKET_WORLD:
        return
    if is_on_hub(source, settings.mirror):
        source = at_commit(place, source, "")
    if is_on_hub(source, settings.mirror) or "://" not in place:
        parts(source, place)


def _lines(part: Part, settings: SourceSettings, where: str, first: int, count: int) -> Iterator[Line]:
    if isinstance(part, DatasetPart):
        for number, row in enumerate(rows_of(part, settings), 1):
            if (number - 1) % count == first:
                yield f"{where}#{number}", f"{part.name}#{number}", row
    elif kind_of(part.name) == "table":
        with open_stored(part) as raw:
            batches = pq.ParquetFile(raw).iter_batches(batch_size=256)
            for number, found in enumerate((row for batch in batches for row in rows_of_batch(batch)), 1):
                if (number - 1) % count == first:
                    place, name = f"{where}:{number}", f"{part.name}:{number}"
                    yield place, name, _not_utf8(found, place) if isinstance(found, UnicodeDecodeError) else found
    else:
        with open_plain(part) as stream:
            for number, line in enumerate(stream, 1):
                if (number - 1) % count == first and line.strip():
                    place = f"{where}:{number}"
                    yield place, f"{part.name}:{number}", _parsed(line, place)


def _parsed(line: bytes, where: str) -> Mapping[str, Any] | UserError:
    try:
        item = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return _not_utf8(error, where)
    except (ValueError, RecursionError) as error:
        return UserError(f"this line is not JSON: {of_a_line(error)}", where=where, fix=_ONE_OBJECT)
    if not isinstance(item, dict):
        return UserError("this line is not a JSON object", where=where, fix=_ONE_OBJECT)
    return item


def _not_utf8(error: UnicodeDecodeError, where: str) -> UserError:
    return UserError(f"this line is damaged: it is not UTF-8 ({error.reason})", where=where)
