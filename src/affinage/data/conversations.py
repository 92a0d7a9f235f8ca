"""Conversations and pairs of answers in the forms of published data sets, in files and data sets wherever they are."""

import json
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from affinage.config.data import SourceSettings
from affinage.config.training import ConversationSettings, TuningSettings
from affinage.data.chat import REASONING, Message, check_messages, with_system_prompt
from affinage.data.files import DamagedFile, Part
from affinage.data.ingest import find_parts
from affinage.data.places import located
from affinage.data.readers import BadRecord, read_rows
from affinage.errors import UserError, UserWarned
from affinage.json_files import encodable

_CONVERSATION = (
    'A conversation has "messages" (a list of {"role", "content"}), "conversations" (a list of {"from", "value"}: '
    'sharegpt), "prompt" with "completion", or "instruction" with "output" (alpaca).'
)
_PAIR = 'A pair has "chosen" and "rejected", with "prompt", "instruction" or "messages", or that begin alike.'
# ShareGPT has its own names; OpenAI calls the system `developer` to some models.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "developer": "system"}
_MESSAGES = ("messages", "conversations", "conversation")
_QUESTIONS, _ANSWERS = ("prompt", "question", *_MESSAGES), ("completion", "output", "response", "answer")
_REASONINGS = (REASONING, "thinking", "reasoning")  # of a message; the first one that is not empty counts
# An answer is not to be learned that OpenAI and Mistral write with `weight: 0`, axolotl and ms-swift with one of these.
_LEARNED, _NOT = ("weight", "train", "training", "loss"), (0, "0", "0.0", "false", "False", "no")

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


def parse_conversation(item: Item, id: str) -> Example:
    """Return the conversation of a line, its text in NFC, by its keys. Raises UserError for a line that is none."""
    answer = next((item[key] for key in _ANSWERS if key in item), None)
    messages: list[Any] = next((item[key] for key in _MESSAGES if isinstance(item.get(key), list)), [])
    if not messages and answer is not None and (question := _question(item)):
        messages = [*question, *_turns(answer, "assistant")]
    if not messages:
        raise UserError(f"this line has {sorted(item)}, which is no conversation", fix=_CONVERSATION)
    parsed = _with_system([_message(each) for each in messages], item)
    check_messages(parsed)
    return Example(id, [parsed])


def parse_pair(item: Item, id: str) -> Example:
    """Return the pair of a line. Raises UserError for a line that is none."""
    if not {"chosen", "rejected"} <= item.keys():
        raise UserError(f"this line has {sorted(item)}, which is no pair", fix=_PAIR)
    asked = [_message(each) for each in _question(item)]
    sides = [[_message(each) for each in _turns(item[key], "assistant")] for key in ("chosen", "rejected")]
    # Each may begin with all or the end of the prompt that stands beside it, both with all of it in another form.
    held = [max((n for n in range(len(asked) + 1) if n and side[:n] == asked[-n:]), default=0) for side in sides]
    chosen, rejected = (side[count:] for side, count in zip(sides, held))
    same = 0  # messages that both begin with, without what the assistant says last
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    prompt = [*([] if same and chosen[0]["role"] != "assistant" else asked), *chosen[:same]]
    if not prompt:
        raise UserError("a pair without a prompt", fix=_PAIR)
    prompt = [{**message, "train": False} for message in _with_system(prompt, item)]
    talks = [[*prompt, *answer[same:]] for answer in (chosen, rejected)]
    for talk in talks:
        check_messages(talk)
    return Example(id, talks, len(prompt))


def _question(item: Item) -> list[Any]:
    """Return the messages before the answer: a prompt, or an instruction with the text that it is about; or nothing."""
    for key in _QUESTIONS:
        if item.get(key) not in (None, []):
            return _turns(item[key], "user")
    about = item.get("input") or item.get("context")
    parts = [str(part) for part in (item.get("instruction"), about) if part]
    pairs = item["history"] if isinstance(item.get("history"), list) else []  # of earlier questions and answers
    turns = [{"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair)]
    return [*turns, *_turns("\n\n".join(parts), "user")] if "instruction" in item else []


def _turns(value: Any, role: str) -> list[Any]:
    """Return messages as they are, or a text or an object as one message."""
    if isinstance(value, list):
        return value
    return [value if isinstance(value, Mapping) else {"role": role, "content": value}]


def _with_system(messages: list[Message], item: Item) -> list[Message]:
    """Return the messages, after the system message that the line has beside them."""
    system = item.get("system") or item.get("system_prompt")
    return with_system_prompt(messages, _text(system) if isinstance(system, str) else "")


def _message(message: Any) -> Message:
    """Return a message with the names of roles and the form of text that are ours."""
    if not isinstance(message, dict):
        raise UserError(f"a message that is no object but {message!r}")
    if call := next((key for key in ("tool_calls", "function_call") if message.get(key)), None):
        fix = "Leave such conversations out, or skip and count them with `on_error: skip`."
        raise UserError(f"a message has {call}, and calls of tools are not trained", fix=fix)
    role = message.get("role", message.get("from"))
    parsed = {"role": _ROLES.get(str(role), role), "content": _text(message.get("content", message.get("value")))}
    if thoughts := [message[key] for key in _REASONINGS if message.get(key) is not None]:
        parsed[REASONING] = _text(next(filter(None, thoughts), ""))
    return parsed | ({"train": False} if any(message.get(key) in _NOT for key in _LEARNED) else {})


def _text(value: Any) -> Any:
    """Return a text in Unicode's NFC with newlines as \\n, also of parts that are all texts; anything else as it is."""
    parts = value if isinstance(value, list) and all(isinstance(part, dict) for part in value) else []
    if parts and all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        value = "".join(part["text"] for part in parts)
    if not isinstance(value, str):
        return value  # check_messages refuses it, and knows which message it is
    return unicodedata.normalize("NFC", encodable(value.replace("\r\n", "\n").replace("\r", "\n")))


# ---- files and data sets ----


def open_source(source: ConversationSettings, settings: TuningSettings) -> tuple[SourceSettings, Sequence[Part]]:
    """Return the settings of a source, with the place and the commit at which it is read, and its parts.

    Raises UserError where there is nothing to read.
    """
    opened = located(source.as_source(), settings)
    opened, found = find_parts(opened, opened.place)
    parts = [part for part in found if part.kind in ("lines", "table", "dataset")]
    if not parts:
        fix = "Give files, folders or globs of .jsonl, .ndjson (each also .gz, .zst, .bz2, .xz) and .parquet."
        raise UserError("no conversations found", where=opened.place, fix=fix)
    if others := [part.name for part in found if part.kind in ("", "text", "warc", "dump")]:
        warnings.warn(f"{opened.place}: not read, for their kind: {', '.join(others[:3])}", UserWarned, stacklevel=1)
    return opened, parts


def read_examples(part: Part, settings: SourceSettings, *, pairs: bool = False) -> Iterator[Example | UserError]:
    """Stream the conversations, or the `pairs` of answers, of a part of a source; an error for what cannot be used.

    Raises UserError for a file that is damaged.
    """
    parse = parse_pair if pairs else parse_conversation
    where = part.url.removeprefix("file://") or part.name
    try:
        for row in read_rows(part, settings):
            place = row.id if isinstance(row, BadRecord) else row[0]
            try:
                if isinstance(row, BadRecord):
                    raise UserError(f"{row.reason}: {row.detail}")
                yield parse(row[1], encodable(str(row[1].get("id") or place)))
            except UserError as error:
                error.where = where.removesuffix(part.name) + place
                yield error
    except DamagedFile as error:
        raise UserError(str(error), where=where) from None
