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
_THINK = "<think>"
_TAIL = 40  # characters by which the end of a content is found
_GENERATION = re.compile(r"\{%-?\+?\s*generation\b")
_OPENING = "{{- bos_token -}}"  # of a ChatML template
_START, _END = CONTROL_PIECES[IM_START], CONTROL_PIECES[IM_END]
_RENDERING = threading.Lock()  # transformers' tracker of generation blocks serves one rendering at a time
_NO_CLOCK = "{% set strftime_now = a_clock %}"  # which is undefined

_NO_SYSTEM = "If it knows no system messages, set `system_prompt: ''` and leave them out of the conversations."
_TURNS = "Many templates want the user to begin and the roles to alternate: leave out others with `on_error: skip`."
_DATE = (
    "There is no clock, because token shards must be the same tomorrow. Write the date into the first line of the "
    "template: {% macro strftime_now(format) %}2026-01-31{% endmacro %}"
)
_MARK = (
    "Mark what the assistant says with {% generation %} and {% endgeneration %} in the template. One that reads "
    "`enable_thinking` asks otherwise with {% set enable_thinking = false %} (or true) as its first line."
)


class ChatTemplate:
    """A Jinja template with the special tokens that it may name, {bos_token: its spelling, ...}."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises UserError if the source is not Jinja."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.marks_answers = _GENERATION.search(source) is not None
        self._rendered_source = _NO_CLOCK + source if "strftime_now" in source else source
        self._try(_talk("?"))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the conversation as text. Raises UserError for one that the template refuses."""
        return self.render_blocks(messages, add_generation_prompt=add_generation_prompt)[0]

    def render_blocks(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> Written:
        """Return the text, and the parts of it in {% generation %} blocks. Raises UserError as `render` does."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template  # takes a second to import

        render: Any = render_jinja_template  # its annotations do not know what it returns
        try:
            with _RENDERING:
                texts, spans = render(
                    [[{key: message[key] for key in message if key != "train"} for message in messages]],
                    chat_template=self._rendered_source,
                    return_assistant_tokens_mask=self.marks_answers,
                    add_generation_prompt=add_generation_prompt,
                    **self.special_tokens,
                )
            return texts[0], [tuple(span) for span in spans[0]] if spans else []
        except (jinja2.TemplateSyntaxError, RecursionError, MemoryError) as error:
            raise UserError(f"this is not a chat template: {error}", where=_WHERE) from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            roles = [message["role"] for message in messages]
            fix = _DATE if "a_clock" in str(error) else _NO_SYSTEM if "system" in roles else _TURNS
            what = f"the chat template refuses a conversation of {', '.join(roles)}: {error}"
            raise UserError(what.replace("a_clock", "strftime_now"), where=_WHERE, fix=fix) from error

    def _try(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return `render`, or "" for a conversation that the template refuses, such as one without a system message."""
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt)
        except UserError as error:
            if not error.fix:  # this is not Jinja
                raise
            return ""

    @cached_property
    def asks_with_a_space(self) -> bool:
        """Whether the text by which the model is asked for an answer ends in a space, which may join the answer."""
        return self._try(_talk("?"), add_generation_prompt=True).endswith(" ")

    @cached_property
    def is_stable(self) -> bool:
        """Whether turns without reasoning are written the same whether or not others follow."""
        talk = _talk(*(f"{n} {_PROBE}." for n in range(6)))
        whole = self._try(talk)
        parts = [self._try(talk[:n], add_generation_prompt=n % 2 == 1) for n in range(1, 6)]
        return all(part and whole.startswith(part.rstrip()) for part in parts)

    def end_of_answers(self, tokenizer: "Tokenizer") -> tuple[int, ...]:
        """Return the control token that ends an answer; nothing where the template has none."""
        _, written, after = self._try(_talk("?", _PROBE)).rpartition(_PROBE)
        controls = set(tokenizer.controls.values())
        return tuple(id_ for id_ in tokenizer.encode_rendered(after)[0] if written and id_ in controls)[:1]

    def boundary_ids(self, tokenizer: "Tokenizer") -> Marks:
        """Return the ids by which rows of its conversations are read: each is ended by a token that none of them holds.

        Raises UserError if the vocabulary has no control token but those that the template writes.
        """
        talk = _talk("?", "!", "?", "!")
        thoughtful = [{**message, REASONING: "?"} if number % 2 else message for number, message in enumerate(talk)]
        written = {id_ for each in (talk, thoughtful) for id_ in tokenizer.encode_rendered(self.render(each))[0]}
        likely = [tokenizer.marks.end, tokenizer.pad, *tokenizer.controls.values()]
        found = next((id_ for id_ in likely if id_ is not None and id_ not in written), None)
        if found is None:
            raise UserError("the vocabulary has no token that could stand between conversations", where=_WHERE)
        return Marks(None, found, found if tokenizer.pad is None or tokenizer.pad in written else tokenizer.pad)


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
            raise UserError(
                f"message {number} has the role {role!r}", where=where, fix=f"Roles are {', '.join(ROLES)}."
            )
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


def guarded(messages: Sequence[Message], tokenizer: "Tokenizer") -> list[Message]:
    """Return the messages with a guard in whatever spells a control token; see `Tokenizer.guard`.

    Tags of an assistant such as <think> are structure, but not in ChatML, which has none.
    """

    found: list[Message] = []
    for message in messages:
        tags = message["role"] == "assistant" and tokenizer.template is not None
        texts = {key: tokenizer.guard(message[key], tags=tags) for key in ("content", REASONING) if key in message}
        found.append({**message, **texts})
    return found


def write_conversation(
    messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str, *, trained_from: int = 0
) -> list[Written]:
    """Return a conversation, guarded, as texts, and the parts of each that are trained: see `encode_conversation`.

    Raises UserError as `check_messages` does, and for a vocabulary without ChatML's tokens.
    """
    check_messages(messages)
    prompted = with_system_prompt(messages, system_prompt)
    first = trained_from + len(prompted) - len(messages)
    trained = [
        number
        for number, message in enumerate(prompted)
        if message["role"] == "assistant" and number >= first and message.get("train", True)
    ]
    safe = guarded(prompted, tokenizer)
    if tokenizer.template is not None:
        return write_turns(tokenizer.template, safe, trained, tokenizer)
    _ = tokenizer.chat_ids  # raises where there are none
    text, spans = "", []
    for number, message in enumerate(safe):
        text += f"{_START}{message['role']}\n"
        begin = len(text)
        text += message["content"] + _END
        if number in trained:
            spans.append((begin, len(text)))
        text += "\n"
    return [(text, spans)]


def encode_conversation(
    messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str, *, trained_from: int = 0
) -> list[Encoded]:
    """Return the tokens of a conversation, and which of them are trained on.

    In the tokenizer's template, which may make several texts of one conversation: see `write_turns`. Or in ChatML,
    what a text begins with (`<s>`) and, per message, `<|im_start|>{role}\\n{content}<|im_end|>\\n`. Trained are
    the assistant's content and the token that ends it, from the message `trained_from` on, but for messages with
    `train: False`. ChatML has no place for reasoning: see `drops_reasoning`.
    Raises UserError as `write_conversation` does.
    """
    written = write_conversation(messages, tokenizer, system_prompt, trained_from=trained_from)
    encoded = [tokenizer.encode_rendered(text, spans) for text, spans in written]
    opening = list(tokenizer.opening) if tokenizer.template is None else []
    return [([*opening, *ids], [False] * len(opening) + trained) for ids, trained in encoded]


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
    if tokenizer.template is None:
        [(text, _)] = write_conversation(messages, tokenizer, system_prompt)
        return [*tokenizer.opening, *tokenizer.encode_rendered(f"{text}{_START}assistant\n")[0]]
    check_messages(messages)
    prompted = guarded(with_system_prompt(messages, system_prompt), tokenizer)
    return tokenizer.encode_rendered(tokenizer.template.render(prompted, add_generation_prompt=True))[0]


def unstopped_answers(tokens: Sequence[int], trained: Sequence[bool], stops: Sequence[int]) -> int:
    """Return how many runs of trained tokens hold no stop: a model learns from them to go on for ever."""
    begins, ends = np.flatnonzero(np.diff(np.array([0, *trained, 0], np.int8))).reshape(-1, 2).T
    before = np.concatenate([[0], np.cumsum(np.isin(np.asarray(tokens, np.int64), stops))])
    return int(np.count_nonzero(before[ends] == before[begins]))


def drops_reasoning(
    messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str, *, trained_from: int = 0
) -> bool:
    """Return whether some reasoning is in none of the texts of `write_conversation`; raise UserError as it does."""
    reasoning = [thought for message in messages if (thought := message.get(REASONING, "").strip())]
    if not reasoning:
        return False
    written = write_conversation(messages, tokenizer, system_prompt, trained_from=trained_from)
    texts = [tokenizer.unguard(text) for text, _ in written]
    return any(all(one not in text for text in texts) for one in reasoning)


def cut_document(tokens: list[int], trained: list[bool], length: int, marks: Marks) -> Encoded:
    """Cut a document at its end to `length` tokens, but for the one that keeps it apart from the next document."""
    if len(tokens) <= length or marks.begin is not None:
        return tokens[:length], trained[:length]
    return [*tokens[: length - 1], marks.end], [*trained[: length - 1], False]


# ---- answers in a template ----


def write_turns(
    template: ChatTemplate, messages: Sequence[Message], trained: Sequence[int], tokenizer: "Tokenizer"
) -> list[Written]:
    """Return a conversation as texts, and the parts of each that are the answers of the messages `trained`.

    Those are the {% generation %} blocks where the template has such. Otherwise what an answer adds to the text by
    which the model is asked for it, with the token that ends the turn.

    Some templates write an earlier turn otherwise once another follows; most leave out its reasoning. Then one
    conversation comes as several texts, in the order of its answers. In each are trained those answers that it has as
    the model would have said them, after what the model would have seen; every answer is trained in one of them.

    Raises UserError for a template that does not write an answer, or asks for it with a text that does not begin it.
    """
    text, blocks = template.render_blocks(messages)
    if not trained:
        return [(text, [])]
    if (spans := _spans_at_once(template, messages, trained, text, blocks, tokenizer)) is not None:
        return [(text, spans)]
    left = [_answer(template, messages, number, tokenizer) for number in trained]  # the text up to each, and its parts
    found: list[Written] = []
    while left:
        here = [answer for answer in left if text.startswith(answer[0][: answer[1][-1][1]])]
        if here:
            found.append((text, [span for _, spans in here for span in spans]))
        left = [answer for answer in left if answer not in here]
        text = left[-1][0] if left else ""
    return found[::-1]


def _spans_at_once(
    template: ChatTemplate,
    messages: Sequence[Message],
    trained: Sequence[int],
    text: str,
    blocks: Sequence[Span],
    tokenizer: "Tokenizer",
) -> list[Span] | None:
    """Return the answers of a conversation whose every turn has the same form, in time linear in its turns.

    None where they cannot be found so: then each answer is found in its own conversation.
    """
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if any(REASONING in message or "think>" in message["content"] for message in messages):
        return None
    if template.marks_answers and template.is_stable:
        if len(blocks) != len(answers):
            return None
        for number, (start, end) in zip(answers, blocks, strict=True):
            _check_written(messages[number], number, text[start:end])
        return [blocks[answers.index(number)] for number in trained]
    talk = messages[messages[0]["role"] == "system" :]
    if (form := tokenizer.turn_form) is None or [each["role"] for each in talk] != ["user", "assistant"] * len(answers):
        return None
    between, after, tail, opening, closing = form
    for contents in ([each["content"] for each in talk], [each["content"].strip() for each in talk]):  # some strip them
        seams = [between, after] * (len(answers) - 1) + [between, tail]
        parts = [part for pair in zip(contents, seams, strict=True) for part in pair]
        if text.endswith("".join(parts)):
            edges = list(itertools.accumulate(map(len, parts), initial=len(text) - sum(map(len, parts))))
            places = zip(answers, edges[2::4], edges[3::4], strict=True)  # of the contents of the answers
            return [(start - len(opening), end + len(closing)) for n, start, end in places if n in trained]
    return None


def turn_form(template: ChatTemplate, tokenizer: "Tokenizer") -> tuple[str, str, str, str, str] | None:
    """Return what a template writes between a question and its answer, after an answer before a question, and at last.

    Also what of this is trained: before and after the content of an answer. None where turns differ.
    """
    talk = _talk(*(f"{n}{_PROBE}{n}" for n in range(4)))
    try:
        text, spans = _answer(template, talk, 3, tokenizer)
    except UserError:
        return None
    parts = re.split("|".join(str(message["content"]) for message in talk), text)
    if len(parts) != 5 or parts[1] != parts[3] or not template.is_stable:
        return None
    start = len(text) - len(parts[4])
    opening = text[spans[0][0] : start - len(str(talk[3]["content"]))]
    closing = text[start : spans[0][1]]
    alike = parts[1].endswith(opening) and parts[2].startswith(closing)
    return (parts[1], parts[2], parts[4], opening, closing) if alike else None


def _answer(template: ChatTemplate, messages: Sequence[Message], number: int, tokenizer: "Tokenizer") -> Written:
    """Return the text up to the answer `number`, and its own blocks or what it adds to the text that asks for it."""
    text, blocks = template.render_blocks(messages[: number + 1])
    if template.marks_answers:
        begin = _common(template.render(messages[:number]), text) if number else 0
        spans = [block for block in blocks if block[0] >= begin]
        earlier = sum(message["role"] == "assistant" for message in messages[:number])
        if not spans or len(blocks) - len(spans) < earlier:
            what = f"{len(blocks)} generation blocks for {earlier + 1} answers, and message {number + 1} has none"
            raise UserError(f"the chat template has {what} that is its own", where=_WHERE)
    else:
        before = template.render(messages[:number], add_generation_prompt=True)
        begin = len(before)
        if not text.startswith(before):
            text = before + _continuation(template, messages[: number + 1], before)
        spans = [(begin, begin + _turn_end(text[begin:], messages[number]["content"], tokenizer))]
    _check_written(messages[number], number, text[begin:])
    return text, spans


def _check_written(message: Message, number: int, text: str) -> None:
    words = message["content"].split()
    if words and words[-1] not in text:
        raise UserError(
            f"the chat template does not write what message {number + 1} says",
            where=_WHERE,
            fix="Some want messages that are lists of texts and pictures; take one for texts.",
        )


def _turn_end(said: str, content: str, tokenizer: "Tokenizer") -> int:
    """Return where the turn ends: after the first control tokens that follow the content and nothing else follows.

    Some templates write an end of the text after them. All of it is the turn where no such end is found.
    """
    closing: list[Span] = []  # after which nothing stands but others of these and white space
    for _, start, end in reversed(tokenizer.control_spans(said)):
        if said[end : closing[0][0] if closing else len(said)].strip():
            break
        closing.insert(0, (start, end))
    if not closing or content.rstrip()[-_TAIL:] not in said[: closing[0][0]]:
        return len(said)
    end = closing[0][0]
    for start, stop in closing:
        end = stop if start == end else end
    return end


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _continuation(template: ChatTemplate, messages: Sequence[Message], before: str) -> str:
    """Return how the model completes the last message after a text that begins the answer for it, with its end.

    Such a text is `<think>`, where the template writes no reasoning of answers that are given. Reasoning beside the
    content then stands before it as it does in DeepSeek R1's answers.
    """
    *earlier, answer = messages
    written = template.render([*earlier, {**answer, "content": _PROBE}])
    begun = before[_common(before, written) :]
    content, opening, thought = answer["content"].lstrip(), begun.strip(), answer.get(REASONING, "").strip()
    if opening == _THINK and thought and thought not in written and not content.startswith(opening):
        content = f"{_THINK}\n{thought}\n</think>\n\n{content}"
    probe = written.rfind(_PROBE)
    if probe < 0 or not opening or not content.startswith(opening):
        wanted = f", and it does not begin with {opening!r}" if opening else ""
        raise UserError(
            f"the chat template asks for message {len(messages)} with another text than it writes before it{wanted}: "
            "what the model would have said is a guess",
            where=_WHERE,
            fix=_MARK,
        )
    space = begun[len(begun.rstrip()) :]
    return content.removeprefix(opening).removeprefix(space) + written[probe + len(_PROBE) :]


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
    found = re.search(r"system\\n' \+ (\"(?:[^\"\\]|\\.)*\") \+", template)
    try:
        system_prompt: str = json.loads(found[1]) if found else ""
    except ValueError:
        return None  # it only looks like ChatML of this program
    return system_prompt if template in (chat_template(system_prompt, opened=o) for o in (True, False)) else None


def opens(template: str) -> bool:
    """Return whether it is a template of `chat_template` that begins a conversation with the bos_token."""
    return system_prompt_in(template) is not None and template.startswith(_OPENING)
