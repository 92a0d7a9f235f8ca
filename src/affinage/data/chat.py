"""Conversations as tokens, with a mask of those that the assistant is taught: in ChatML, or in any chat template.

A template of Hugging Face's is rendered by transformers, and gives the same ids as its `apply_chat_template`, with two
differences: the text of a message never becomes a control token, and there is no clock (`strftime_now`), because token
shards must be the same tomorrow.
"""

import itertools
import json
import re
import reprlib
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from affinage.data.special_tokens import CONTROL_PIECES, IM_END, IM_START, Marks
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.data.tokenizer import Tokenizer

Message = Mapping[str, Any]  # role, content; of some answers REASONING, and `train: False` of those not trained
Encoded = tuple[list[int], list[bool]]  # ids, and which of them are trained
Span = tuple[int, int]  # of characters
Written = tuple[str, list[Span]]  # a text, and the parts of it that are trained

ROLES = ("system", "user", "assistant")
REASONING = "reasoning_content"  # of a message: the thoughts before its content
_WHERE = "chat_template"  # the setting that messages name
_PROBE = "Zq7"  # a text that no template has of itself
_GENERATION = re.compile(r"\{%-?\+?\s*generation\b")
_OPENING = "{{- bos_token -}}"  # of a ChatML template
_START, _END = CONTROL_PIECES[IM_START], CONTROL_PIECES[IM_END]
_RENDERING = threading.Lock()  # transformers' tracker of generation blocks serves one rendering at a time
_NO_CLOCK = "{% set strftime_now = no_clock %}"  # which is undefined

_REFUSED = (
    "Leave such conversations out with `on_error: skip`; for a template without system messages set "
    "`system_prompt: ''`. One that writes the date needs it in its first line: "
    "{% macro strftime_now(format) %}2026-01-31{% endmacro %}"
)
_MARK = (
    "Mark what the assistant says with {% generation %} and {% endgeneration %} in the template, or begin one that "
    "reads `enable_thinking` with {% set enable_thinking = false %} (or true)."
)


class ChatTemplate:
    """A Jinja template of a tokenizer, whose special tokens it may name."""

    def __init__(self, source: str, tokenizer: "Tokenizer", special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises UserError if the source is not Jinja. `special_tokens` stand in for the tokenizer's."""
        self.source, self.tokenizer = source, tokenizer
        self.special_tokens = dict(tokenizer.special_tokens if special_tokens is None else special_tokens)
        self.marks_answers = _GENERATION.search(source) is not None
        self._rendered_source = _NO_CLOCK + source if "strftime_now" in source else source
        self._try(_talk("?"))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the conversation as text. Raises UserError for one that the template refuses."""
        return self.render_blocks(messages, add_generation_prompt=add_generation_prompt)[0]

    def render_blocks(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> Written:
        """Return the text, and the parts of it in {% generation %} blocks. Raises UserError as `render` does."""
        import jinja2
        from transformers.utils import chat_template_utils  # takes a second to import

        render: Any = chat_template_utils.render_jinja_template  # its annotations do not know what it returns
        try:
            with _RENDERING:
                texts, blocks = render(
                    [[{key: message[key] for key in message if key != "train"} for message in messages]],
                    chat_template=self._rendered_source,
                    return_assistant_tokens_mask=self.marks_answers,
                    add_generation_prompt=add_generation_prompt,
                    **self.special_tokens,
                )
            return texts[0], [tuple(block) for block in blocks[0]] if blocks else []
        except Exception as error:  # a template may raise whatever Python does
            roles = ", ".join(message["role"] for message in messages)
            fix = "" if isinstance(error, jinja2.TemplateSyntaxError | RecursionError | MemoryError) else _REFUSED
            what = f"the chat template refuses a conversation of {roles}: {error}"
            raise UserError(what, where=_WHERE, fix=fix) from error

    def _try(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return `render`, or "" for a conversation that the template refuses, such as one without a system message."""
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt)
        except UserError as error:
            if not error.fix:  # this is not Jinja
                raise
            return ""

    @cached_property
    def prompt_ends_in_space(self) -> bool:
        """Whether the text by which the model is asked for an answer ends in a space, which may join the answer."""
        return self._try(_talk("?"), add_generation_prompt=True).endswith(" ")

    @cached_property
    def writes_reasoning(self) -> bool:
        """Whether the reasoning of a last answer is written."""
        question, answer = _talk("?", "!")
        return _PROBE in self._try([question, {**answer, REASONING: _PROBE}])

    @cached_property
    def turn(self) -> tuple[str, str, str, str, str] | None:
        """What is written between a question and its answer, after an answer before a question, and after the last one.

        Also what of this is trained: before and after the content of an answer. None where turns differ, or where one
        is written otherwise once another follows.
        """
        talk = _talk(*(f"{number}{_PROBE}{number}" for number in range(6)))
        try:
            text, spans = _answer(self, talk, 5)
        except UserError:
            return None
        parts = re.split("|".join(each["content"] for each in talk), text)
        prefixes = [self._try(talk[:n], add_generation_prompt=n % 2 == 1) for n in range(1, 6)]
        if len(parts) != 7 or not all(prefix and text.startswith(prefix.rstrip()) for prefix in prefixes):
            return None
        between, after, tail = parts[1], parts[2], parts[6]
        opening, _, closing = text[spans[0][0] : spans[-1][1]].partition(talk[5]["content"])
        alike = parts[3:6] == [between, after, between] and between.endswith(opening) and after.startswith(closing)
        return (between, after, tail, opening, closing) if alike else None

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The control token that ends an answer; nothing where the template has none."""
        _, written, after = self._try(_talk("?", _PROBE)).rpartition(_PROBE)
        controls = set(self.tokenizer.controls.values())
        return tuple(id_ for id_ in self.tokenizer.encode_rendered(after)[0] if written and id_ in controls)[:1]

    @cached_property
    def marks(self) -> Marks:
        """The ids by which rows of its conversations are read: each is ended by a token that none of them holds.

        Raises UserError if the vocabulary has no control token but those that the template writes.
        """
        tokenizer, talk = self.tokenizer, _talk("?", "!", "?", "!")
        thoughtful = [{**message, REASONING: "?"} if number % 2 else message for number, message in enumerate(talk)]
        written = {id_ for each in (talk, thoughtful) for id_ in tokenizer.encode_rendered(self.render(each))[0]}
        likely = (tokenizer.marks.end, tokenizer.pad, *tokenizer.controls.values())
        end = next((id_ for id_ in likely if id_ is not None and id_ not in written), None)
        if end is None:
            fix = "Give the tokenizer a pad token of its own, or import the model with --chat-tokens."
            raise UserError("the vocabulary has no token that could stand between conversations", where=_WHERE, fix=fix)
        return Marks(None, end, end if tokenizer.pad is None or tokenizer.pad in written else tokenizer.pad)


def _talk(*contents: str) -> list[Message]:
    return [{"role": ROLES[1 + number % 2], "content": content} for number, content in enumerate(contents)]


# ---- conversations ----


def check_messages(messages: Sequence[Message], *, where: str = "") -> None:
    """Raise UserError unless every message has a known role and text, and only the first one is a system message."""
    if not messages:
        raise UserError("a conversation without messages", where=where)
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        if role not in ROLES:
            fix = f"Roles are {', '.join(ROLES)}."
            raise UserError(f"message {number} has the role {role!r}", where=where, fix=fix)
        for name, text in (("content", message.get("content")), (REASONING, message.get(REASONING, ""))):
            if not isinstance(text, str):
                raise UserError(f"the {name} of message {number} is not a text but {reprlib.repr(text)}", where=where)
        if role == "system" and number > 1:
            raise UserError(f"message {number} is a system message", where=where, fix="Only the first one may be.")


def with_system_prompt(messages: Sequence[Message], system_prompt: str) -> list[Message]:
    """Return the messages, after `system_prompt` unless it is empty or they bring a system message of their own."""
    if not system_prompt or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def guarded(messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str) -> list[Message]:
    """Return the messages with a guard in whatever spells a control token, see `Tokenizer.guard`.

    `system_prompt` comes first as `with_system_prompt` has it. Tags of an assistant such as <think> are structure, but
    not in ChatML, which has none.
    """
    safe: list[Message] = []
    for message in with_system_prompt(messages, system_prompt):
        tags = message["role"] == "assistant" and tokenizer.template is not None
        texts = {key: tokenizer.guard(message[key], tags=tags) for key in ("content", REASONING) if key in message}
        safe.append({**message, **texts})
    return safe


def encode_conversation(
    messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str, *, trained_from: int = 0
) -> list[Encoded]:
    """Return the tokens of a conversation, and which of them are trained on.

    In the tokenizer's template, which may make several texts of one conversation: see `_write_answers`. Or in ChatML,
    what a text begins with (`<s>`) and, per message, `<|im_start|>{role}\\n{content}<|im_end|>\\n`. Trained are
    the assistant's content and the token that ends it, from the message `trained_from` on, but for messages with
    `train: False`. ChatML has no place for reasoning.
    Raises UserError as `check_messages` does, and for a vocabulary without ChatML's tokens.
    """
    check_messages(messages)
    safe = guarded(messages, tokenizer, system_prompt)
    answers = [number for number, message in enumerate(safe) if message["role"] == "assistant"]
    first = trained_from + len(safe) - len(messages)
    trained = [number for number in answers if number >= first and safe[number].get("train", True)]
    if tokenizer.template is not None:
        return [tokenizer.encode_rendered(*written) for written in _write_answers(tokenizer.template, safe, trained)]
    ids, mask = tokenizer.encode_rendered(*_write_chatml(safe, trained, tokenizer))
    return [([*tokenizer.opening, *ids], [False] * len(tokenizer.opening) + mask)]


def encode_documents(
    messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str, *, trained_from: int = 0
) -> list[Encoded]:
    """Return a conversation as documents that see no other one in their rows; see `encode_conversation`."""
    encoded = encode_conversation(messages, tokenizer, system_prompt, trained_from=trained_from)
    if tokenizer.fixed_ids and tokenizer.template is None:
        return encoded
    end = tokenizer.conversation_marks.end  # they need not begin with an id of their own
    return [([*tokens, end], [*trained, False]) for tokens, trained in encoded]


def encode_prompt(messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str) -> list[int]:
    """Return the tokens of the conversation so far, and of ChatML `<|im_start|>assistant\\n`: the answer follows."""
    check_messages(messages)
    safe = guarded(messages, tokenizer, system_prompt)
    if tokenizer.template is not None:
        return tokenizer.encode_rendered(tokenizer.template.render(safe, add_generation_prompt=True))[0]
    text, _ = _write_chatml(safe, (), tokenizer)
    return [*tokenizer.opening, *tokenizer.encode_rendered(f"{text}{_START}assistant\n")[0]]


def unstopped_answers(tokens: Sequence[int], trained: Sequence[bool], stops: Sequence[int]) -> int:
    """Return how many runs of trained tokens hold no stop: a model learns from them to go on for ever."""
    begins, ends = np.flatnonzero(np.diff(np.array([0, *trained, 0], np.int8))).reshape(-1, 2).T
    before = np.concatenate([[0], np.cumsum(np.isin(np.asarray(tokens, np.int64), stops))])
    return int(np.count_nonzero(before[ends] == before[begins]))


def drops_reasoning(messages: Sequence[Message], tokenizer: "Tokenizer") -> bool:
    """Return whether messages have reasoning beside their content that is not written."""
    writes = tokenizer.template is not None and tokenizer.template.writes_reasoning
    return not writes and any(message.get(REASONING, "").strip() for message in messages)


# ---- answers in a text ----


def _write_chatml(messages: Sequence[Message], trained: Sequence[int], tokenizer: "Tokenizer") -> Written:
    tokenizer.require_chat_tokens()
    text, spans = "", []
    for number, message in enumerate(messages):
        text += f"{_START}{message['role']}\n"
        begin = len(text)
        text += message["content"] + _END
        spans += [(begin, len(text))] if number in trained else []
        text += "\n"
    return text, spans


def _write_answers(template: ChatTemplate, messages: Sequence[Message], trained: Sequence[int]) -> list[Written]:
    """Return a conversation as texts, and the parts of each that are the answers of the messages `trained`.

    Some templates write an earlier turn otherwise once another follows: most leave out its reasoning. Then one
    conversation comes as several texts, and each answer is trained in the one that has it as the model would say it.
    """
    text, blocks = template.render_blocks(messages)
    spans = _spans_at_once(template, messages, trained, text, blocks) if trained else []
    if spans is not None:
        return [(text, spans)]
    answers = [_answer(template, messages, number) for number in trained]  # the text up to each, and its parts
    texts: list[Written] = []
    while answers:
        here = [answer for answer in answers if text.startswith(answer[0][: answer[1][-1][1]])]
        texts += [(text, [span for _, spans in here for span in spans])] if here else []
        answers = [answer for answer in answers if answer not in here]
        text = answers[-1][0] if answers else ""
    return texts[::-1]


def _spans_at_once(
    template: ChatTemplate, messages: Sequence[Message], trained: Sequence[int], text: str, blocks: Sequence[Span]
) -> list[Span] | None:
    """Return the answers of a conversation in linear time; None unless every turn of it has the same form."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if any(REASONING in message or "think>" in message["content"] for message in messages) or template.turn is None:
        return None
    if template.marks_answers:
        if len(blocks) != len(answers):
            return None
        return [block for number, block in zip(answers, blocks, strict=True) if number in trained]
    talk = messages[messages[0]["role"] == "system" :]
    if [each["role"] for each in talk] != ["user", "assistant"] * len(answers):
        return None
    between, after, tail, opening, closing = template.turn
    for contents in ([each["content"] for each in talk], [each["content"].strip() for each in talk]):  # some strip them
        seams = [between, after] * (len(answers) - 1) + [between, tail]
        parts = [part for pair in zip(contents, seams, strict=True) for part in pair]
        if text.endswith("".join(parts)):
            edges = list(itertools.accumulate(map(len, parts), initial=len(text) - sum(map(len, parts))))
            places = zip(answers, edges[2::4], edges[3::4], strict=True)  # of the contents of the answers
            return [(start - len(opening), end + len(closing)) for n, start, end in places if n in trained]
    return None


def _answer(template: ChatTemplate, messages: Sequence[Message], number: int) -> Written:
    """Return the text up to the answer `number`, and the parts of it that are this answer.

    Those are its {% generation %} blocks if the template has such, or else what it adds to the text by which the model
    is asked for it, with the token that ends the turn.
    """
    text, blocks = template.render_blocks(messages[: number + 1])
    if template.marks_answers:
        before = template.render(messages[:number]) if number else ""
        begin = next((n for n, pair in enumerate(zip(before, text)) if pair[0] != pair[1]), min(len(before), len(text)))
        spans = [block for block in blocks if block[0] >= begin]
        earlier = sum(message["role"] == "assistant" for message in messages[:number])
        if not spans or len(blocks) - len(spans) < earlier:
            raise UserError(f"the chat template has no generation block for message {number + 1}", where=_WHERE)
    else:
        before = template.render(messages[:number], add_generation_prompt=True)
        begin = len(before)
        if not text.startswith(before):
            what = f"the chat template asks for message {number + 1} with another text than it writes before it"
            raise UserError(f"{what}: what the model would have said is a guess", where=_WHERE, fix=_MARK)
        spans = [(begin, begin + _turn_end(text[begin:], template.tokenizer))]
    if not all(word in text[begin:] for word in messages[number]["content"].split()[-1:]):
        fix = "Some want messages that are lists of texts and pictures; take one for texts."
        raise UserError(f"the chat template does not write what message {number + 1} says", where=_WHERE, fix=fix)
    return text, spans


def _turn_end(answer: str, tokenizer: "Tokenizer") -> int:
    """Return where the turn ends: after the first of the control tokens that nothing but others and space follows."""
    end, controls = len(answer), tokenizer.control_spans(answer)
    for _, start, stop in reversed(controls):
        if answer[stop:end].strip():
            break
        end = start
    for _, start, stop in controls:
        end = stop if start == end else end
    return end


# ---- ChatML as a template ----


def chat_template(system_prompt: str = "", *, opened: bool = True) -> str:
    """Return the Jinja template, for tokenizer_config.json, that renders ChatML as `encode_conversation` encodes it.

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
    """Return the system prompt with which `chat_template` makes this template; None if it makes no such template."""
    match = re.search(r"system\\n' \+ (\"(?:[^\"\\]|\\.)*\") \+", template)
    try:
        system_prompt: str = json.loads(match[1]) if match else ""
    except ValueError:
        return None  # it only looks like ChatML of this program
    return system_prompt if template in (chat_template(system_prompt, opened=o) for o in (True, False)) else None
