"""Conversations as tokens, with a mark on those that the assistant is taught: in ChatML, or in any chat template.

ChatML is encoded message by message. A template of Hugging Face's is rendered by transformers, and gives the same ids
as its `apply_chat_template`, with two differences: what a message says never becomes a control token, and there is no
clock (`strftime_now`), because token shards must be the same tomorrow.
"""

import json
import re
import reprlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from affinage.data.special_tokens import Marks
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.data.tokenizer import Tokenizer

Message = Mapping[str, Any]  # role, content; of some answers REASONING, and `train: False` of those not trained
Encoded = tuple[list[int], list[bool]]  # ids, and which of them are trained
Span = tuple[int, int]  # of characters

ROLES = ("system", "user", "assistant")
REASONING = "reasoning_content"  # of a message: what was thought before its content was said
_WHERE = "chat_template"  # the setting that messages name
_PROBE = "Zq7"  # a text that no template has of itself
_EDGE = "\U0001fffe"  # a noncharacter, put around contents to find them again
_THINK = "<think>"
_TAIL = 40  # characters by which the end of a content is found
_GENERATION = re.compile(r"\{%-?\+?\s*generation\b")
_OPENING = "{{- bos_token -}}"  # of a ChatML template
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
        self._marks: Marks | None = None
        self._ends: tuple[int, ...] | None = None
        self._stable: bool | None = None
        self._spaced: bool | None = None
        self.rendered([{"role": "user", "content": "?"}], check_only=True)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the conversation as text. Raises UserError for one that the template refuses."""
        return self.rendered(messages, add_generation_prompt=add_generation_prompt)[0]

    def rendered(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, check_only: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text, and the parts of it in {% generation %} blocks. Raises UserError as `render` does.

        With `check_only`, only a template that is not Jinja is refused.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template  # a second, and seldom needed

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
            if check_only:
                return "", []
            roles = [message["role"] for message in messages]
            fix = _DATE if "a_clock" in str(error) else _NO_SYSTEM if "system" in roles else _TURNS
            what = f"the chat template refuses a conversation of {', '.join(roles)}: {error}"
            raise UserError(what.replace("a_clock", "strftime_now"), where=_WHERE, fix=fix) from error

    def ends(self, tokenizer: "Tokenizer") -> tuple[int, ...]:
        """Return the control token that ends an answer; nothing where the template has none."""
        if self._ends is None:
            try:
                text = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}])
            except UserError:  # one that wants more than that; then the tokenizer's own ends of a text do
                text = ""
            after = tokenizer.encode_rendered(text[text.rfind(_PROBE) + len(_PROBE) :])[0] if _PROBE in text else []
            controls = set(tokenizer.controls.values())
            self._ends = tuple(token for token in after if token in controls)[:1]
        return self._ends

    def marks(self, tokenizer: "Tokenizer") -> Marks:
        """Return what rows of its conversations are read by: each is ended by a token that none of them holds.

        Raises UserError if the vocabulary has no control token but those that the template writes.
        """
        if self._marks is None:
            question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
            thoughtful = {**answer, REASONING: "?"}  # around which some write control tokens of their own
            talks = [[question, each, question, each] for each in (answer, thoughtful)]
            written = {token for talk in talks for token in tokenizer.encode_rendered(self.render(talk))[0]}
            likely = [tokenizer.marks.end, tokenizer.pad, *tokenizer.controls.values()]
            found = next((token for token in likely if token is not None and token not in written), None)
            if found is None:
                raise UserError("the vocabulary has no token that could stand between conversations", where=_WHERE)
            pad = found if tokenizer.pad is None or tokenizer.pad in written else tokenizer.pad
            self._marks = Marks(None, found, pad)
        return self._marks

    def asks_with_a_space(self) -> bool:
        """Whether the text by which the model is asked for an answer ends in a space, which may join the answer."""
        if self._spaced is None:
            try:
                self._spaced = self.render([{"role": "user", "content": "?"}], add_generation_prompt=True)[-1:] == " "
            except UserError:
                self._spaced = False
        return self._spaced

    def is_stable(self) -> bool:
        """Whether turns without reasoning are written the same whether or not others follow."""
        if self._stable is None:
            talk = [{"role": role, "content": f"{n} {_PROBE}."} for n in range(3) for role in ("user", "assistant")]
            try:
                whole = self.render(talk)
                parts = [self.render(talk[:n], add_generation_prompt=n % 2 == 1) for n in range(1, 6)]
            except UserError:
                whole, parts = "", ["?"]
            self._stable = all(whole.startswith(part.rstrip()) for part in parts)
        return self._stable


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
    """Return the messages, after `system_prompt` unless it is empty or they bring a system message of their own."""
    if not system_prompt or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def guarded(messages: Sequence[Message], tokenizer: "Tokenizer") -> list[Message]:
    """Return the messages with a guard in whatever spells a control token; see `Tokenizer.guard`."""

    def guard(message: Message) -> Message:
        texts = {key: message[key] for key in ("content", REASONING) if key in message}
        is_answer = message["role"] == "assistant"
        return {**message, **{key: tokenizer.guard(text, assistant=is_answer) for key, text in texts.items()}}

    return [guard(message) for message in messages]


def encode_conversation(
    messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str, *, trained_from: int = 0
) -> list[Encoded]:
    """Return the tokens of a conversation, and which of them are trained on.

    In the tokenizer's template, which may make several texts of one conversation: see `write_turns`. Or in ChatML,
    what a text begins with (`<s>`) and, per message, `<|im_start|>{role}\\n{content}<|im_end|>\\n`. Trained are
    the assistant's content and the token that ends it, from the message `trained_from` on, but for messages with
    `train: False`. ChatML has no place for reasoning: see `drops_reasoning`.
    Raises UserError as `check_messages` does, and for a vocabulary without ChatML's tokens.
    """
    check_messages(messages)
    prompted = with_system_prompt(messages, system_prompt)
    first = trained_from + len(prompted) - len(messages)
    if tokenizer.template is not None:
        found = []
        for text, spans in write_turns(tokenizer.template, prompted, tokenizer, trained_from=first):
            ids, offsets = tokenizer.encode_rendered(text)
            trained = np.zeros(len(ids), bool)
            for begin, stop in spans:
                trained |= (offsets[:, 0] < stop) & (np.maximum(offsets[:, 1], offsets[:, 0] + 1) > begin)
            found.append((ids, trained.tolist()))
        return found
    start, end = tokenizer.chat_ids
    tokens = list(tokenizer.opening)
    is_trained = [False] * len(tokens)
    newline = tokenizer.encode("\n")
    for number, message in enumerate(prompted):
        spoken, head = tokenizer.encode_message(message["role"], message["content"])
        tokens += [start, *spoken, end, *newline]
        train = message["role"] == "assistant" and number >= first and message.get("train", True)
        is_trained += [False] * (1 + head) + [bool(train)] * (len(spoken) - head + 1) + [False] * len(newline)
    return [(tokens, is_trained)]


def encode_documents(
    messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str, *, trained_from: int = 0
) -> list[Encoded]:
    """Return a conversation as documents that see no other one in their rows; see `encode_conversation`."""
    encoded = encode_conversation(messages, tokenizer, system_prompt, trained_from=trained_from)
    if tokenizer.fixed_ids and tokenizer.template is None:
        return encoded
    end = conversation_marks(tokenizer).end  # they need not begin with an id of their own
    return [([*tokens, end], [*trained, False]) for tokens, trained in encoded]


def encode_prompt(messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str) -> list[int]:
    """Return the tokens of the conversation so far, and of ChatML `<|im_start|>assistant\\n`: the answer follows."""
    if tokenizer.template is not None:
        check_messages(messages)
        prompted = guarded(with_system_prompt(messages, system_prompt), tokenizer)
        return tokenizer.encode_rendered(tokenizer.template.render(prompted, add_generation_prompt=True))[0]
    [(tokens, _)] = encode_conversation(messages, tokenizer, system_prompt)
    return [*tokens, tokenizer.chat_ids[0], *tokenizer.encode("assistant\n")]


def unstopped_answers(tokens: Sequence[int], trained: Sequence[bool], stops: Sequence[int]) -> int:
    """Return how many runs of trained tokens hold no stop: a model learns from them to go on for ever."""
    begins, ends = np.flatnonzero(np.diff(np.array([0, *trained, 0], np.int8))).reshape(-1, 2).T
    before = np.concatenate([[0], np.cumsum(np.isin(np.asarray(tokens, np.int64), stops))])
    return int(np.count_nonzero(before[ends] == before[begins]))


def drops_reasoning(
    messages: Sequence[Message], tokenizer: "Tokenizer", system_prompt: str, *, trained_from: int = 0
) -> bool:
    """Whether reasoning stands in none of the texts that `encode_conversation` makes; in ChatML none of it does.

    Raises UserError as `encode_conversation` does.
    """
    reasoning = [thought for message in messages if (thought := message.get(REASONING, "").strip())]
    if not reasoning:
        return False
    texts = [message["content"] for message in messages]  # some data has it in the answer, too
    if tokenizer.template is not None:
        prompted = with_system_prompt(messages, system_prompt)
        first = trained_from + len(prompted) - len(messages)
        written = write_turns(tokenizer.template, prompted, tokenizer, trained_from=first)
        texts = [tokenizer.unguard(text) for text, _ in written]
    return any(all(one not in text for text in texts) for one in reasoning)


def conversation_marks(tokenizer: "Tokenizer") -> Marks:
    """Return what rows of conversations are read by."""
    return tokenizer.marks if tokenizer.template is None else tokenizer.template.marks(tokenizer)


def cut_document(tokens: list[int], trained: list[bool], length: int, marks: Marks) -> Encoded:
    """Cut a document at its end to `length` tokens, but for the mark that keeps it apart from the next one."""
    if len(tokens) <= length or marks.begin is not None:
        return tokens[:length], trained[:length]
    return [*tokens[: length - 1], marks.end], [*trained[: length - 1], False]


@dataclass(frozen=True)
class _Answer:
    """An answer in its place: the text that the model sees before it, what it says, and perhaps some white space."""

    text: str
    spans: Sequence[Span]  # of what it says, with the token that ends it

    def stands_in(self, text: str) -> bool:
        """Whether the text begins with all that was seen and said here."""
        return text.startswith(self.text[: self.spans[-1][1]])


def write_turns(
    template: ChatTemplate, messages: Sequence[Message], tokenizer: "Tokenizer", *, trained_from: int = 0
) -> list[tuple[str, list[Span]]]:
    """Return a conversation as texts, and the parts of each that the assistant says from `trained_from` on.

    Those are what stands in {% generation %} blocks where the template has such. Otherwise what an answer adds to the
    text by which the model is asked for it. Counted is the token that ends a turn, not the white space after it.

    Some templates write an earlier turn otherwise once another follows; most leave out its reasoning. What the model
    would have said then stands in the conversation up to that turn alone, and it is trained there. So one conversation
    comes as several texts, in the order of its answers. In each are trained those answers that it has as the model
    would have said them, after what the model would have seen, and every answer is trained in one of them.

    Raises UserError for a template that asks for an answer with a text that the answer does not go on from, or does
    not write an answer.
    """
    safe = guarded(messages, tokenizer)
    numbers = [
        number
        for number, message in enumerate(safe)
        if message["role"] == "assistant" and number >= trained_from and message.get("train", True)
    ]
    text, blocks = template.rendered(safe)
    if not numbers:
        return [(text, [])]
    if len(numbers) > 1 and (spans := _spans_at_once(template, safe, numbers, text, blocks, tokenizer)) is not None:
        return [(text, spans)]
    write = _marked if template.marks_answers else _said
    left = [write(template, safe, number, tokenizer) for number in numbers]
    found = []
    if any(answer.stands_in(text) for answer in left):
        found.append((text, [span for answer in left if answer.stands_in(text) for span in answer.spans]))
    while left := [answer for answer in left if not answer.stands_in(text)]:
        text = left[-1].text
        found.append((text, [span for answer in left if answer.stands_in(text) for span in answer.spans]))
    return found[::-1]


def _spans_at_once(
    template: ChatTemplate,
    messages: Sequence[Message],
    numbers: Sequence[int],
    text: str,
    blocks: Sequence[Span],
    tokenizer: "Tokenizer",
) -> list[Span] | None:
    """What is trained of a conversation whose every turn has the same form, found in time linear in its turns.

    None where it cannot be found so: then each answer is looked at in its own conversation.
    """
    said = "".join(str(message[key]) for message in messages for key in ("content", REASONING) if key in message)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not template.is_stable() or any(REASONING in message for message in messages) or "think>" in said:
        return None
    if template.marks_answers:
        if len(blocks) != len(answers):
            return None
        for number, (start, end) in zip(answers, blocks, strict=True):
            _check_written(messages[number], number, text[start:end])
        return [blocks[answers.index(number)] for number in numbers]
    edged = [
        {**message, "content": f"{_EDGE}{message['content']}{_EDGE}"} if message["role"] == "assistant" else message
        for message in messages
    ]
    parts = template.render(edged).split(_EDGE)
    if len(parts) != 2 * len(answers) + 1 or "".join(parts) != text:
        return None
    edges = np.cumsum([len(part) for part in parts]).tolist()
    first = _said(template, messages, answers[0], tokenizer)
    [(begin, stop)] = first.spans
    begun, ended = text[begin : edges[0]], text[edges[1] : stop]
    asked = first.text[:begin].removeprefix(template.render(messages[: answers[0]]) if answers[0] else "")
    spans = []
    for at, number in enumerate(answers):
        start, end = edges[2 * at] - len(begun), edges[2 * at + 1] + len(ended)
        written = text.endswith(asked, 0, start) and text.startswith(begun, start)
        if not written or not text.startswith(ended, edges[2 * at + 1]):
            return None
        spans += [(start, end)] if number in numbers else []
    return spans


def _marked(template: ChatTemplate, messages: Sequence[Message], number: int, _: "Tokenizer") -> _Answer:
    """The answer `number` by its blocks: those that come with it, such as one around an end of the text."""
    text, blocks = template.rendered(messages[: number + 1])
    begun = _common(template.render(messages[:number]), text) if number else 0
    own = [block for block in blocks if block[0] >= begun]
    earlier = sum(message["role"] == "assistant" for message in messages[:number])
    if not own or len(blocks) - len(own) < earlier:
        raise UserError(
            f"the chat template has {len(blocks)} generation blocks for {earlier + 1} answers, "
            f"and message {number + 1} has none that is its own",
            where=_WHERE,
        )
    _check_written(messages[number], number, text[begun:])
    return _Answer(text, own)


def _said(template: ChatTemplate, messages: Sequence[Message], number: int, tokenizer: "Tokenizer") -> _Answer:
    """The answer `number` by what it adds to the text by which the model is asked for it."""
    before = template.render(messages[:number], add_generation_prompt=True)
    text = template.render(messages[: number + 1])
    if not text.startswith(before):
        text = before + _gone_on(template, messages[: number + 1], before)
    _check_written(messages[number], number, text[len(before) :])
    said = _turn(text[len(before) :], messages[number]["content"], tokenizer)
    return _Answer(text, [(len(before), len(before) + len(said))])


def _check_written(message: Message, number: int, text: str) -> None:
    words = message["content"].split()
    if words and words[-1] not in text:
        raise UserError(
            f"the chat template does not write what message {number + 1} says",
            where=_WHERE,
            fix="Some want messages that are lists of texts and pictures; take one for texts.",
        )


def _turn(said: str, content: str, tokenizer: "Tokenizer") -> str:
    """What is said up to the tokens that end the turn; all of it where no such end is found.

    Those are the first ones after the content: some templates write an end of the text after them.
    """
    controls = [(start, end) for _, start, end in tokenizer.control_spans(said)]
    closing: list[Span] = []  # after which nothing stands but others of these and white space
    for start, end in reversed(controls):
        if said[end : closing[0][0] if closing else len(said)].strip():
            break
        closing.insert(0, (start, end))
    last = content.rstrip()[-_TAIL:]
    if not closing or last not in said[: closing[0][0]]:
        return said
    end = closing[0][0]
    for start, stop in closing:
        end = stop if start == end else end
    return said[:end]


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _gone_on(template: ChatTemplate, messages: Sequence[Message], before: str) -> str:
    """What the model says, of the last message, after a text that begins the answer for it, and the end of the turn.

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
    """Whether it is a template of `chat_template` that begins a conversation with the bos_token."""
    return system_prompt_in(template) is not None and template.startswith(_OPENING)
