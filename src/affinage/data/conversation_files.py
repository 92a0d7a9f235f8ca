"""Conversations from JSON Lines, in the shapes that published data sets have."""

import glob
import gzip
import io
import json
import unicodedata
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import zstandard

from affinage.data.chat import Message, check_messages
from affinage.errors import UserError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_SHAPES = (
    '"messages" (a list of {"role", "content"}), "conversations" (a list of {"from", "value"}), '
    '"prompt" with "completion", or "instruction" with "output" and perhaps "input"'
)
_ROLE_NAMES = {"human": "user", "gpt": "assistant"}  # as ShareGPT calls them


@dataclass(frozen=True)
class Conversation:
    """Messages, and the name by which their line can be found again."""

    id: str
    messages: list[Message]


def read_conversations(path: str) -> Iterator[Conversation]:
    """Conversations of a JSON Lines file (plain, .gz, .zst), or of all such files in a folder or a glob, in order.

    Text is put into Unicode's NFC and newlines into \\n, as documents are. Raises UserError, naming file and line,
    where there is no file or a line is no conversation.
    """
    for file in _files(path):
        with _open(file) as lines:
            try:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _conversation(line, f"{file}:{number}", f"{file.name}:{number}")
            except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, UnicodeDecodeError) as error:
                raise UserError(f"the file is damaged: {error}", where=str(file)) from error


def _files(path: str) -> list[Path]:
    here = Path(path).expanduser()
    if here.is_dir():
        files = sorted(file for file in here.iterdir() if file.name.endswith(_SUFFIXES))
    else:
        files = [here] if here.is_file() else sorted(map(Path, glob.glob(str(here), recursive=True)))
    if not files:
        raise UserError(
            "no conversations found", where=path, fix=f"give a file, folder or glob of {', '.join(_SUFFIXES)}"
        )
    return files


def _open(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    if file.suffix == ".zst":
        return io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file.open("rb")), encoding="utf-8")
    return file.open(encoding="utf-8")


def _conversation(line: str, where: str, name: str) -> Conversation:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise UserError(f"this line is not JSON: {error}", where=where) from error
    if not isinstance(item, dict):
        raise UserError(
            "this line is not a JSON object", where=where, fix=f"a conversation is an object with {_SHAPES}"
        )
    messages = [_message(message, where) for message in _messages(item, where)]
    check_messages(messages, where=where)
    return Conversation(str(item.get("id", name)), messages)


def _messages(item: Mapping[str, Any], where: str) -> list[Any]:
    if isinstance(item.get("messages"), list):
        return list(item["messages"])
    if isinstance(item.get("conversations"), list):
        return list(item["conversations"])
    if "prompt" in item and "completion" in item:
        return _turns(item["prompt"], "user") + _turns(item["completion"], "assistant")
    if "instruction" in item and "output" in item:
        parts = [item["instruction"], item.get("input") or ""]
        asked = "\n\n".join([str(part) for part in parts if part])
        return _turns(asked, "user") + _turns(item["output"], "assistant")
    raise UserError(f"this line has {sorted(item)}, which is no conversation", where=where, fix=f"it needs {_SHAPES}")


def _turns(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"a message that is no object but {message!r}", where=where)
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if isinstance(content, str):
        content = unicodedata.normalize("NFC", content.replace("\r\n", "\n").replace("\r", "\n"))
    # What is no text yet is refused by check_messages, which can say which message it is.
    return {"role": _ROLE_NAMES.get(str(role), role), "content": content}  # type: ignore[dict-item]
