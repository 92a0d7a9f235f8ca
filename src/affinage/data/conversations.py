"""Conversations and pairs of answers in the forms of published data sets, in files and data sets wherever they are."""

import itertools
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from affinage.config.data import POCKET_WORLD, SourceSettings
from affinage.config.training import TuningSettings
from affinage.data.chat import REASONING, Message, check_messages, with_system_prompt
from affinage.data.files import DamagedFile, DatasetPart, Part, open_plain, open_stored, reports_damage
from affinage.data.ingest import find_parts
from affinage.data.json_files import encodable
from affinage.data.places import located
from affinage.data.readers import rows_of
from affinage.errors import UserError

_CONVERSATION = (
    '"messages" (a list of {"role", "content"}), "conversations" (a list of {"from", "value"}: sharegpt), "prompt" '
    'with "completion", or "instruction" with "output" (alpaca)'
)
_PAIR = '"chosen" and "rejected", with "prompt", "instruction" or "messages", or as conversations that begin alike'
# ShareGPT has its own names; OpenAI calls the system `developer` to some models.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "developer": "system"}
_MESSAGES = ("messages", "conversations", "conversation")
_QUESTIONS, _ANSWERS = ("prompt", "question"), ("completion", "output", "response", "answer")
_REASONINGS = (REASONING, "thinking", "reasoning")  # of a message; the first one that is not empty counts

Item = Mapping[str, Any]  # a line of a file, or the row of a table


@dataclass(frozen=True)
class Example:
    """A conversation; or two that begin alike, of which the first one is to be preferred."""

    id: str  # by which its line can be found again
    talks: list[list[Message]]
    prompt: int = 0  # messages that both begin with

    @property
    def content(self) -> str:
        """Examples of equal content are sampled, limited and held out together: conversations, or prompts of pairs."""
        messages = self.talks[0][: self.prompt or None]
        return json.dumps([{key: text for key, text in message.items() if key != "train"} for message in messages])

    @property
    def messages(self) -> list[Message]:
        """All messages; the prompt of a pair once."""
        return [*self.talks[0], *(message for talk in self.talks[1:] for message in talk[self.prompt :])]


# ---- forms ----


def parse_conversation(item: Item, *, where: str, name: str) -> Example:
    """Return the conversation of a line, in the first published form that its keys fit.

    Text is put into Unicode's NFC and newlines into \\n, as documents are. Raises UserError, with `where`, for a line
    that is no conversation.
    """
    answer, question = (next((key for key in keys if key in item), "") for keys in (_ANSWERS, _QUESTIONS))
    messages: list[Any] = next((item[key] for key in _MESSAGES if isinstance(item.get(key), list)), [])
    if not messages and answer and (question or "instruction" in item):
        prompt = _turns(item[question], "user") if question else [_instruction(item)]
        messages = [*prompt, *_turns(item[answer], "assistant")]
    if not messages:
        what = f"this line has {sorted(item)}, which is no conversation"
        raise UserError(what, where=where, fix=f"A conversation has {_CONVERSATION}.")
    parsed = _with_system([_message(each, where) for each in messages], item)
    check_messages(parsed, where=where)
    return Example(encodable(str(item.get("id") or name)), [parsed])


def parse_pair(item: Item, *, where: str, name: str) -> Example:
    """Return the pair of a line. Raises UserError, with `where`, for a line that is none."""
    if not {"chosen", "rejected"} <= item.keys():
        raise UserError(f"this line has {sorted(item)}, which is no pair", where=where, fix=f"A pair needs {_PAIR}.")
    chosen, rejected = (
        [_message(each, where) for each in _turns(item[key], "assistant")] for key in ("chosen", "rejected")
    )
    same = 0  # messages that both begin with, without what the assistant says last
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    key = next((key for key in (*_QUESTIONS, "messages", "conversations") if key in item), None)
    turns = _turns(item[key], "user") if key else [_instruction(item)] if "instruction" in item else []
    prompt = [_message(each, where) for each in turns] or chosen[:same]
    if same and len({(each["role"], str(each["content"]).strip()) for each in (prompt[-1], chosen[same - 1])}) == 1:
        prompt = chosen[:same]  # whole conversations, with the prompt beside them
    if chosen[: len(prompt)] == prompt == rejected[: len(prompt)]:
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt:
        raise UserError("a pair without a prompt", where=where, fix=f"A pair needs {_PAIR}.")
    prompt = [{**message, "train": False} for message in _with_system(prompt, item)]
    talks = [[*prompt, *answer] for answer in (chosen, rejected)]
    for talk in talks:
        check_messages(talk, where=where)
    return Example(encodable(str(item.get("id") or name)), talks, len(prompt))


def _turns(value: Any, role: str) -> list[Any]:
    """Return messages as they are, or a text or an object as one message."""
    if isinstance(value, list):
        return value
    return [value if isinstance(value, Mapping) else {"role": role, "content": value}]


def _instruction(item: Item) -> Item:
    """Return an instruction and the text that it is about as one message."""
    about = item.get("input") or item.get("context")
    return {"role": "user", "content": "\n\n".join(str(part) for part in (item["instruction"], about) if part)}


def _with_system(messages: list[Message], item: Item) -> list[Message]:
    """Return the messages, after the system message that the line has beside them."""
    system = item.get("system") or item.get("system_prompt")
    return with_system_prompt(messages, _text(system) if isinstance(system, str) else "")


def _message(message: Any, where: str) -> Message:
    """Return a message with the names of roles and the form of text that are ours."""
    if not isinstance(message, dict):
        raise UserError(f"a message that is no object but {message!r}", where=where)
    if call := next((key for key in ("tool_calls", "function_call") if message.get(key)), None):
        fix = "Leave such conversations out, or skip and count them with `on_error: skip`."
        raise UserError(f"a message has {call}, and calls of tools are not trained", where=where, fix=fix)
    role = message.get("role", message.get("from"))
    parsed = {"role": _ROLES.get(str(role), role), "content": _text(message.get("content", message.get("value")))}
    thoughts = [message[key] for key in _REASONINGS if message.get(key) is not None]
    if thoughts:
        parsed[REASONING] = _text(next(filter(None, thoughts), ""))
    # OpenAI and Mistral write `weight: 0`, axolotl `train: false`, for an answer that is not to be learned.
    if message.get("weight") == 0 or message.get("train") is False:
        parsed["train"] = False
    return parsed


def _text(value: Any) -> Any:
    """Return a text in Unicode's NFC with newlines as \\n, also of parts that are all texts; anything else as it is."""
    parts = value if isinstance(value, list) and all(isinstance(part, dict) for part in value) else []
    if parts and all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        value = "".join(part["text"] for part in parts)
    if not isinstance(value, str):
        return value  # check_messages refuses it, and knows which message it is
    return unicodedata.normalize("NFC", encodable(value.replace("\r\n", "\n").replace("\r", "\n")))


# ---- files and data sets ----


def open_source(
    settings: TuningSettings, index: int, world_file: Path | None = None
) -> tuple[str, SourceSettings, Sequence[Part]]:
    """Return the place of a source, its settings, with the commit of a data set on the Hub, and its parts.

    `world_file` is what the pocket world has for it. Raises UserError where there is nothing to read.
    """
    source = located(settings.sources[index].as_source(), settings)
    place = str(world_file) if source.path == POCKET_WORLD and world_file is not None else source.place
    source, parts = find_parts(source, place, place, of_text=False)
    parts = [part for part in parts if part.kind in ("lines", "table", "dataset")]
    if not parts:
        fix = "Give files, folders or globs of .jsonl, .ndjson (each also .gz, .zst, .bz2, .xz) and .parquet."
        raise UserError("no conversations found", where=place, fix=fix)
    return place, source, parts


def check_source(settings: TuningSettings, index: int) -> None:
    """Raise UserError unless a source exists, and has a name of its own; what is at a URL is not looked for."""
    if settings.mixture is not None and settings.sources[index].title in [s.title for s in settings.sources[:index]]:
        what = f"two sources are called {settings.sources[index].title}, and `mixture` weighs names"
        raise UserError(what, fix="Give each a `name` of its own.")
    source = located(settings.sources[index].as_source(), settings)
    if source.path != POCKET_WORLD and "://" not in source.place:
        open_source(settings, index)


def read_lines(
    part: Part, settings: SourceSettings, *, pairs: bool = False, number: int = 0, count: int = 1
) -> Iterator[Example | UserError]:
    """Return the lines `number`, `number + count`, ... of a part of a source, an error for one that cannot be used.

    They are conversations, or `pairs` of answers. Raises UserError for a file that is damaged.
    """
    where, sign = (part.name, "#") if isinstance(part, DatasetPart) else (part.url.removeprefix("file://"), ":")
    parse = parse_pair if pairs else parse_conversation
    try:
        with reports_damage():
            for line, content in itertools.islice(enumerate(_contents(part, settings), 1), number, None, count):
                if isinstance(content, bytes) and content.isspace():
                    continue
                place = f"{where}{sign}{line}"
                try:
                    item = json.loads(content.decode("utf-8-sig")) if isinstance(content, bytes) else content
                    if not isinstance(item, dict):
                        raise UserError("this line is not a JSON object", where=place)
                    yield parse(item, where=place, name=f"{part.name}{sign}{line}")
                except UserError as error:
                    yield error
                except (ValueError, RecursionError) as error:
                    what = f"this line is damaged or not JSON: {getattr(error, 'msg', error)}"
                    yield UserError(what, where=place)
    except DamagedFile as error:
        raise UserError(f"the file is damaged: {error}", where=where) from None


def _contents(part: Part, settings: SourceSettings) -> Iterator[Item | bytes]:
    if isinstance(part, DatasetPart):
        yield from rows_of(part, settings)
    elif part.kind == "table":
        with open_stored(part) as raw:
            for batch in pq.ParquetFile(raw).iter_batches(batch_size=256):
                yield from batch.to_pylist()
    else:
        with open_plain(part) as stream:
            yield from stream
