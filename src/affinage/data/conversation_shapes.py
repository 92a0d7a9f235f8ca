"""Conversations in the shapes that published data sets have."""

import json
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from affinage.data.chat import REASONING, Message, check_messages
from affinage.data.foreign_json import encodable
from affinage.errors import UserError

_NAMED = (
    '"messages" (a list of {"role", "content"}), "conversations" (a list of {"from", "value"}), '
    '"prompt" with "completion", or "instruction" with "output" and perhaps "input"'
)
# As ShareGPT has them; OpenAI calls the system `developer` to some models.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "developer": "system"}
_ANSWERS = ("completion", "output", "response", "answer")
_ADDED = ("input", "context")  # to an instruction: the text that it is about
_SYSTEMS = ("system", "system_prompt")
_REASONINGS = (REASONING, "thinking", "reasoning")  # of a message; the first one that says something counts
_CALLS = ("tool_calls", "function_call")
_NO_TOOLS = "Leave such conversations out, or skip and count them with `on_error: skip`."

Item = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages, and the name by which their line can be found again."""

    id: str
    messages: list[Message]

    @property
    def content(self) -> str:
        """What equal conversations have in common."""
        return json.dumps(self.messages)


def conversation(item: Item, shape: str, *, where: str, name: str) -> Conversation:
    """What a line says in the given shape, `auto` for whichever its keys tell.

    Text is put into Unicode's NFC and newlines into \\n, as documents are. Raises UserError, with `where`, for a line
    that is no conversation.
    """
    messages = [text_message(each, where) for each in _messages(item, shape, where)]
    told = next((item[key] for key in _SYSTEMS if isinstance(item.get(key), str) and item[key]), "")
    if told and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, text_message({"role": "system", "content": told}, where))
    check_messages(messages, where=where)
    return Conversation(encodable(str(item.get("id") or name)), messages)


def _messages(item: Item, shape: str, where: str) -> list[Any]:
    for known, read in SHAPES.items():
        if shape in ("auto", known) and (found := read(item)) is not None:
            return found
    wanted = _NAMED if shape == "auto" else f"the shape {shape}"
    raise UserError(f"this line has {sorted(item)}, which is no conversation", where=where, fix=f"it needs {wanted}")


def _list_of(key: str) -> Callable[[Item], list[Any] | None]:
    return lambda item: list(item[key]) if isinstance(item.get(key), list) else None


def _sharegpt(item: Item) -> list[Any] | None:
    return next((list(item[key]) for key in ("conversations", "conversation") if isinstance(item.get(key), list)), None)


def _prompt(item: Item) -> list[Any] | None:
    key = next((key for key in ("prompt", "question") if key in item), None)
    answer = next((key for key in _ANSWERS if key in item), None)
    return None if key is None or answer is None else [*turns(item[key], "user"), *turns(item[answer], "assistant")]


def _alpaca(item: Item) -> list[Any] | None:
    answer = next((key for key in _ANSWERS if key in item), None)
    return None if answer is None or "instruction" not in item else [*asked(item), *turns(item[answer], "assistant")]


def asked(item: Item) -> list[Any]:
    """An instruction and the text that it is about, as one message."""
    about = next((item[key] for key in _ADDED if item.get(key)), "")
    return turns("\n\n".join(str(part) for part in (item["instruction"], about) if part), "user")


def turns(value: Any, role: str) -> list[Any]:
    """Messages as they are, or a text as one message."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


SHAPES: dict[str, Callable[[Item], list[Any] | None]] = {
    "messages": _list_of("messages"),
    "sharegpt": _sharegpt,
    "prompt": _prompt,
    "alpaca": _alpaca,
}


def text_message(message: Any, where: str) -> Message:
    """A message with the names of roles and the form of text that are ours."""
    if not isinstance(message, dict):
        raise UserError(f"a message that is no object but {message!r}", where=where)
    if called := next((key for key in _CALLS if message.get(key)), None):
        raise UserError(f"a message has {called}, and calls of tools are not trained", where=where, fix=_NO_TOOLS)
    role = message.get("role", message.get("from"))
    content = _as_text(message.get("content", message.get("value")))
    given = [message[key] for key in _REASONINGS if message.get(key) is not None]
    thought = {REASONING: _as_text(next(filter(None, given), ""))} if given else {}
    # OpenAI and Mistral write `weight: 0`, axolotl `train: false`, for an answer that is not to be learned.
    untrained = message.get("weight") == 0 or message.get("train") is False
    # What is no text yet is refused by check_messages, which can say which message it is.
    return {
        "role": _ROLES.get(str(role), role),
        "content": content,
        **thought,
        **({"train": False} if untrained else {}),
    }


def _as_text(value: Any) -> Any:
    """A text in Unicode's NFC with newlines as \\n, also of parts that are all texts; anything else as it is."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(part, dict) and part.get("type") == "text" for part in value)
    ):
        value = "".join(str(part.get("text", "")) for part in value)
    if not isinstance(value, str):
        return value
    return unicodedata.normalize("NFC", encodable(value.replace("\r\n", "\n").replace("\r", "\n")))
