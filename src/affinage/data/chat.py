"""ChatML: conversations as tokens, with a mark on those that the assistant is taught to say."""

import json
import re
import reprlib
from collections.abc import Sequence

from affinage.data.chat_template import REASONING, Message, unshielded
from affinage.data.special_tokens import Marks
from affinage.data.tokenizer import Tokenizer
from affinage.data.trained_turns import Encoded, encode_turns, write_turns
from affinage.errors import UserError

_OPENING = "{{- bos_token -}}"  # of a template
ROLES = ("system", "user", "assistant")


def check_messages(messages: Sequence[Message], *, where: str = "") -> None:
    """Raise UserError unless every message has a known role and text, and only the first one is a system message."""
    if not messages:
        raise UserError("a conversation without messages", where=where)
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"message {number} has the role {role!r}", where=where, fix=f"roles are {', '.join(ROLES)}")
        for name, text in (("content", content), (REASONING, message.get(REASONING, ""))):
            if not isinstance(text, str):
                raise UserError(f"the {name} of message {number} is not a text but {reprlib.repr(text)}", where=where)
        if role == "system" and number > 1:
            raise UserError(f"message {number} is a system message", where=where, fix="only the first one may be")


def with_system_prompt(messages: Sequence[Message], system_prompt: str) -> list[Message]:
    """The messages, after `system_prompt` unless that is empty or they bring a system message of their own."""
    if not system_prompt or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def encode_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, system_prompt: str, *, trained_from: int = 0
) -> list[Encoded]:
    """Tokens of a conversation, and which of them are trained on.

    In the tokenizer's template, which may make several texts of one conversation: see `encode_turns`. Or in ChatML,
    what a text begins with (`<s>`) and, per message, `<|im_start|>{role}\\n{content}<|im_end|>\\n`. Trained are
    the assistant's content and the token that ends it, from the message `trained_from` on. Content that spells a
    control token stays text. ChatML has no place for reasoning: see `drops_reasoning`.
    Raises UserError as `check_messages` does, and for a vocabulary without ChatML's tokens.
    """
    check_messages(messages)
    told = with_system_prompt(messages, system_prompt)
    first = trained_from + len(told) - len(messages)
    if tokenizer.template is not None:
        return encode_turns(tokenizer.template, told, tokenizer, trained_from=first)
    start, end = tokenizer.chat_ids
    tokens = list(tokenizer.opening)
    trained = [False] * len(tokens)
    newline = tokenizer.encode("\n")
    for number, message in enumerate(told):
        text, head = tokenizer.encode_message(message["role"], message["content"])
        tokens += [start, *text, end, *newline]
        said = len(text) - head + 1
        trained += (
            [False] * (1 + head) + [message["role"] == "assistant" and number >= first] * said + [False] * len(newline)
        )
    return [(tokens, trained)]


def encode_documents(
    messages: Sequence[Message], tokenizer: Tokenizer, system_prompt: str, *, trained_from: int = 0
) -> list[Encoded]:
    """A conversation as documents that see no other one in their rows; see `encode_conversation`."""
    encoded = encode_conversation(messages, tokenizer, system_prompt, trained_from=trained_from)
    if tokenizer.fixed_ids and tokenizer.template is None:
        return encoded
    end = conversation_marks(tokenizer).end  # they need not begin with an id of their own
    return [([*tokens, end], [*trained, False]) for tokens, trained in encoded]


def drops_reasoning(
    messages: Sequence[Message], tokenizer: Tokenizer, system_prompt: str, *, trained_from: int = 0
) -> bool:
    """Whether reasoning stands in none of the texts that `encode_conversation` makes; in ChatML none of it does.

    Raises UserError as `encode_conversation` does.
    """
    reasoning = [thought for message in messages if (thought := message.get(REASONING, "").strip())]
    if not reasoning:
        return False
    texts = [message["content"] for message in messages]  # some data has it in the answer, too
    if tokenizer.template is not None:
        told = with_system_prompt(messages, system_prompt)
        first = trained_from + len(told) - len(messages)
        written = write_turns(tokenizer.template, told, tokenizer, trained_from=first)
        texts = [unshielded(text, tokenizer) for text, _ in written]
    return any(all(one not in text for text in texts) for one in reasoning)


def conversation_marks(tokenizer: Tokenizer) -> Marks:
    """What rows of conversations are read by."""
    return tokenizer.marks if tokenizer.template is None else tokenizer.template.marks(tokenizer)


def cut_document(tokens: list[int], trained: list[bool], length: int, marks: Marks) -> Encoded:
    """A document cut at its end to `length` tokens, but for the mark that keeps it apart from the next one."""
    if len(tokens) <= length or marks.begin is not None:
        return tokens[:length], trained[:length]
    return [*tokens[: length - 1], marks.end], [*trained[: length - 1], False]


def encode_prompt(messages: Sequence[Message], tokenizer: Tokenizer, system_prompt: str) -> list[int]:
    """Tokens of the conversation so far, and of ChatML `<|im_start|>assistant\\n`: after them the model answers."""
    if tokenizer.template is not None:
        check_messages(messages)
        return tokenizer.template.encode_prompt(with_system_prompt(messages, system_prompt), tokenizer)
    [(tokens, _)] = encode_conversation(messages, tokenizer, system_prompt)
    return [*tokens, tokenizer.chat_ids[0], *tokenizer.encode("assistant\n")]


def chat_template(system_prompt: str = "", *, opened: bool = True) -> str:
    """The Jinja template, for tokenizer_config.json, that renders what `encode_conversation` encodes.

    `opened`: whether the tokenizer puts its bos_token before a text.
    """
    default = (
        "{%- if not messages or messages[0]['role'] != 'system' -%}"
        "{{- '<|im_start|>system\\n' + " + json.dumps(system_prompt, ensure_ascii=False) + " + '<|im_end|>\\n' -}}"
        "{%- endif -%}"
    )
    return (
        (_OPENING if opened else "")
        + (default if system_prompt else "")
        + "{%- for message in messages -%}"
        + "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
        + "{%- endfor -%}"
        + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def system_prompt_in(template: str) -> str | None:
    """The system prompt with which `chat_template` makes this template; None if it makes no such template."""
    found = re.search(r"system\\n' \+ (\"(?:[^\"\\]|\\.)*\") \+", template)
    try:
        system_prompt: str = json.loads(found[1]) if found else ""
    except ValueError:
        return None  # it only looks like one of ours
    return system_prompt if template in (chat_template(system_prompt, opened=o) for o in (True, False)) else None


def opens(template: str) -> bool:
    """Whether it is a template of `chat_template` that begins a conversation with the bos_token."""
    return system_prompt_in(template) is not None and template.startswith(_OPENING)


CHAT_TEMPLATE = chat_template()
