"""Conversations as tokens, with a mask of those that the assistant is taught: in ChatML, or in any chat template.

A template of Hugging Face's is rendered by transformers, and gives the same ids as its `apply_chat_template`, with two
differences: the text of a message never becomes a control token, and there is no clock (`strftime_now`), because token
shards must be the same tomorrow.
"""

import json
import re
import reprlib
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Integer

from affinage.data.special_tokens import CONTROL_PIECES, IM_END, IM_START, Marks
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.data.tokenizer import Tokenizer

Message = Mapping[str, Any]  # role, content; of some answers REASONING, and `train: False` of those not trained
Talk = Sequence[Message]
Encoded = tuple[list[int], list[bool]]  # ids, and which of them are trained
Span = tuple[int, int]  # of characters
Written = tuple[str, list[Span]]  # a text, and the parts of it that are trained
Form = tuple[str, ...]  # of a message: the role, and the content and perhaps reasoning but for their words
Parts = tuple[Form, str, str]  # with these words, first of the reasoning
# Around a message: what is written from the words before it to its own, divided at its reasoning; what comes after;
# and what is trained with it: nothing, or from a place in the one, counted from its beginning, to one in the other.
Seam = tuple[list[str], str, list[Span]]

ROLES = ("system", "user", "assistant")
REASONING = "reasoning_content"  # of a message: the thoughts before its content
_WHERE = "chat_template"  # the setting that messages name
_GENERATION = re.compile(r"\{%-?\+?\s*generation\b")
_START, _END = CONTROL_PIECES[IM_START], CONTROL_PIECES[IM_END]
_RENDERING = threading.Lock()  # transformers' tracker of generation blocks serves one rendering at a time
_NO_CLOCK = "{% set strftime_now = the_clock_of_strftime_now %}"  # which is undefined
_MANY = 40  # messages, beyond which no template counts them
# What a template looks for in texts: 'x' in message.content, and message.content.split('x'), but no names of tools.
_TESTED = re.compile(r"""(['"])((?:(?!\1).)+)\1\s+(?:not\s+)?in\s+(\w+[.\[]?)""")
_CALLED = re.compile(r"""(?<!name)\.(?:\w*with|r?split|r?find|count|replace)\(\s*(['"])((?:(?!\1).)+)\1""")
_SAID, _THOUGHT = "{0}Zq7{0}", "{0}Qz7{0}"  # by message 0 of a probe: texts that no template has of itself
_TAGGED = re.compile("<think>(.*)</think>(.*)", re.DOTALL)  # thoughts in the content

_REFUSED = (
    "Leave such conversations out with `on_error: skip`; for a template without system messages set "
    "`system_prompt: ''`. One that writes the date needs it in its first line: "
    "{% macro strftime_now(format) %}2026-01-31{% endmacro %}"
)
_MARK = (
    "Mark what the assistant says with {% generation %} and {% endgeneration %} in the template, or begin one that "
    "reads `enable_thinking` with {% set enable_thinking = false %} (or true)."
)


def _probe(forms: Iterable[Form]) -> list[Message]:
    return [dict(zip(("role", "content", REASONING), [x.format(n) for x in form])) for n, form in enumerate(forms)]


_PROBE = _probe((role, _SAID) for role in ROLES[1:] * 3)


class ChatTemplate:
    """A Jinja template of a tokenizer, whose special tokens it may name."""

    def __init__(self, source: str, tokenizer: "Tokenizer") -> None:
        """Raises UserError if the source is not Jinja."""
        self.source, self.tokenizer = source, tokenizer
        self.marks_answers = _GENERATION.search(source) is not None
        self._rendered_source = _NO_CLOCK + source if "strftime_now" in source else source
        tested = [text for _, text, of in _TESTED.findall(source) if of[-1] in ".[" or not re.fullmatch(r"\w+", text)]
        sought = [text for text in (*tested, *(text for _, text in _CALLED.findall(source))) if "think>" not in text]
        self._sought = re.compile("|".join(map(re.escape, sought))) if sought else None
        self._parts = partial(_parts, tags="think>" in source)
        self._regular = dict[tuple[int, bool, str, Form], bool]()
        self._seams = dict[tuple[tuple[Form, ...], bool], Seam | None]()
        self._probe = prompt = ""
        try:
            self._probe, prompt = self.render(_PROBE), self.render(_PROBE[:1], add_generation_prompt=True)
        except UserError as error:
            if not error.fix:  # this is not Jinja; other templates refuse what has no system message
                raise
        # The text by which the model is asked for an answer may end in a space, which may join the answer.
        self.prompt_ends_in_space = prompt.endswith(" ")

    def render(self, messages: Talk, *, add_generation_prompt: bool = False) -> str:
        """Return the conversation as text. Raises UserError for one that the template refuses."""
        return self.render_blocks(messages, add_generation_prompt=add_generation_prompt)[0]

    def render_blocks(self, messages: Talk, *, add_generation_prompt: bool = False) -> Written:
        """Return the text, and the parts of it in {% generation %} blocks. Raises UserError as `render` does."""
        import jinja2
        from transformers.utils import chat_template_utils  # takes a second to import

        render: Any = chat_template_utils.render_jinja_template  # its annotations do not know what it returns
        shown = [{k: v for k, v in each.items() if k != "train"} if "train" in each else each for each in messages]
        try:
            with _RENDERING:
                texts, blocks = render(
                    [shown],
                    chat_template=self._rendered_source,
                    return_assistant_tokens_mask=self.marks_answers,
                    add_generation_prompt=add_generation_prompt,
                    **self.tokenizer.special_tokens,
                )
            return texts[0], [tuple(block) for block in blocks[0]] if blocks else []
        except Exception as error:  # a template may raise whatever Python does
            roles = ", ".join(message["role"] for message in messages)
            fix = "" if isinstance(error, jinja2.TemplateSyntaxError | RecursionError | MemoryError) else _REFUSED
            what = f"the chat template refuses a conversation of {roles}: {error}"
            raise UserError(what, where=_WHERE, fix=fix) from error

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The control token that ends an answer; nothing where the template has none."""
        _, written, after = self._probe.rpartition(_PROBE[-1]["content"])
        return tuple(id_ for id_, *_ in self.tokenizer.control_spans(after) if written)[:1]

    @cached_property
    def marks(self) -> Marks:
        """The ids by which rows of its conversations are read: each is ended by a token that none of them holds.

        Raises UserError if the vocabulary has no control token but those that the template writes.
        """
        tokenizer, thoughtful = self.tokenizer, [{**message, REASONING: "?"} for message in _PROBE]
        written = {id_ for each in (_PROBE, thoughtful) for id_, *_ in tokenizer.control_spans(self.render(each))}
        likely = (tokenizer.marks.end, tokenizer.pad, *tokenizer.controls.values())
        end = next((id_ for id_ in likely if id_ is not None and id_ not in written), None)
        if end is None:
            fix = "Give the tokenizer a pad token of its own."
            raise UserError("the vocabulary has no token that could stand between conversations", where=_WHERE, fix=fix)
        return Marks(None, end, end if tokenizer.pad is None or tokenizer.pad in written else tokenizer.pad)

    # ---- answers ----

    def write(self, messages: Talk) -> Written:
        """Return the conversation as text, and the parts of it that are the answers to train.

        Those are its {% generation %} blocks, or else what is added to the text by which the model is asked, with the
        token that ends the turn; what is written differently once another turn follows is not trained.
        """
        text, blocks = self.render_blocks(messages)
        trained = [number for number, message in enumerate(messages) if is_trained(message)]
        if not self.marks_answers:
            parts = [*map(self._parts, messages)]
            regular = self._is_regular(messages, parts, trained)
            spans = self._answers_by_forms(messages, parts, text) if regular else None
            return text, self._answers_by_prefixes(messages, trained, text) if spans is None else spans
        said = "".join(text[begin:end] for begin, end in blocks)
        for number in trained:
            _check_written(messages, number, said)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return text, blocks if trained == answers else self._blocks_of(trained, messages, answers, blocks)

    def _blocks_of(self, some: list[int], messages: Talk, answers: list[int], blocks: list[Span]) -> list[Span]:
        """Return the blocks of some answers: those of the same numbers in a probe, where it is plain whose they are."""
        probe = _probe(self._parts(message)[0] or (message["role"], _SAID) for message in messages)
        text, places = self.render_blocks(probe)
        if len(places) != len(blocks):
            fix = "Leave such conversations out with `on_error: skip`."
            raise UserError("the chat template does not tell which answer is not to be trained", where=_WHERE, fix=fix)
        said = [*re.finditer(r"(\d+)Zq7\1", text)]
        starts, numbers = [match.start() for match in said], [*(int(match[1]) for match in said), len(messages)]
        ahead = [numbers[bisect_left(starts, begin)] for begin, _ in places]  # the message it is in, or comes before
        return [block for block, number in zip(blocks, ahead) if number - (number not in answers) in some]

    def _is_regular(self, messages: Talk, parts: Sequence[Parts], trained: Sequence[int]) -> bool:
        """Whether short probes tell the answers: they do so in one of as many messages, in which renderings up to each
        answer say the same; and the template looks for nothing that this conversation has."""
        texts = (each[key] for each in messages for key in ("content", REASONING) if key in each)
        if not trained or (self._sought and self._sought.search("\n".join(texts))):
            return False
        system, form = messages[0]["role"] == "system", parts[trained[-1]][0]
        key = min(len(messages), _MANY), system, messages[-1]["role"], tuple(part.strip() for part in form)
        if form and key not in self._regular:
            asks, says = ("user", _SAID), key[-1]
            turns = (((says, asks), (asks, says))[key[2] == "assistant"] * _MANY)[system - key[0] :]
            probe = _probe([*[("system", _SAID)] * system, asks, *turns[1:]])
            answers = [number for number, message in enumerate(probe) if is_trained(message)]
            self._regular[key] = False
            with suppress(UserError):
                text = self.render(probe)
                spans = self._answers_by_prefixes(probe, answers, text)
                self._regular[key] = spans == self._answers_by_forms(probe, [*map(self._parts, probe)], text)
        return self._regular.get(key, False)

    def _seam(self, forms: tuple[Form, ...], system: bool) -> Seam | None:
        """Return what is around the second of two or three messages; None where the template refuses them."""
        if (forms, system) not in self._seams:
            before = [("system", _SAID)] * system + [("user", _SAID)] * (forms[0][0] != "user")
            probe, at = _probe([*before, *forms]), len(before) + 1
            if len(self._seams) == 10_000:  # every combination of white space has its own
                self._seams.clear()
            self._seams[forms, system] = None
            with suppress(UserError):
                text = self.render(probe)
                spans = self._answers_by_prefixes(probe, [at] * is_trained(probe[at]), text)
                start, first, rest = text.partition(_SAID.format(at - 1))
                between, second, after = rest.partition(_SAID.format(at))
                if second:
                    own = [(begin - len(start + first), end + len(after) - len(text)) for begin, end in spans]
                    self._seams[forms, system] = between.split(_THOUGHT.format(at)), after, own
        return self._seams[forms, system]

    def _answers_by_forms(self, messages: Talk, parts: Sequence[Parts], text: str) -> list[Span] | None:
        """Return the answers in linear time; None unless short probes of the same forms explain the whole text."""
        (forms, thoughts, words), first = zip(*parts), int(messages[0]["role"] == "system")
        answers = {number for number, message in enumerate(messages) if message["role"] == "assistant"}
        if () in forms or first in answers or any(number + 1 in answers for number in answers):
            return None
        spans, place = list[Span](), len(text)
        for number in range(len(messages) - 1, first, -1):
            if (seam := self._seam(forms[number - 1 : number + 2], bool(first))) is None:
                return None
            before, after, own = seam
            rest = after if number + 1 == len(messages) else ""
            written = thoughts[number].join(before) + words[number] + rest
            if not text.endswith(written, 0, place):
                return None
            end, place = place - len(rest), place - len(written)
            spans += [(place + start, end + stop) for start, stop in own if is_trained(messages[number])]
        return spans[::-1] if text.endswith(words[first], 0, place) else None

    def _answers_by_prefixes(self, messages: Talk, trained: Sequence[int], text: str) -> list[Span]:
        """Return the answers of a conversation, which is rendered up to each of them and after it."""
        spans: list[Span] = []
        for number in filter(None, trained):  # nothing asks for an answer that begins a conversation
            prompt = self.render(messages[:number], add_generation_prompt=True)
            whole = text if number + 1 == len(messages) else self.render(messages[: number + 1])
            if not whole.startswith(prompt):
                what = f"the chat template asks for message {number + 1} with another text than it writes before it"
                raise UserError(f"{what}: what the model would have said is a guess", where=_WHERE, fix=_MARK)
            end = len(prompt) + self._turn_end(whole[len(prompt) :])
            _check_written(messages, number, whole[len(prompt) : end])
            spans += [(len(prompt), end)] if text.startswith(whole[:end]) else []
        return spans

    def _turn_end(self, answer: str) -> int:
        """Where a turn ends: after the first group of control tokens that only others and white space follow."""
        end = rest = len(answer)
        for id_, start, stop in reversed(self.tokenizer.control_spans(answer)):
            if id_ in self.tokenizer.tags:
                continue  # an assistant's own, such as </think>
            if answer[stop:rest].strip():
                break
            end, rest = end if stop == rest else stop, start
        return end


def _parts(message: Message, *, tags: bool) -> Parts:
    """Return a message's form, () if it has none that is looked for, and the words of its reasoning and content."""
    role, said, thought = message["role"], message["content"], message.get(REASONING, "")
    if tagged := _TAGGED.fullmatch(said) if tags and REASONING not in message else None:
        thought, said = tagged.groups()
    thoughts, words = thought.strip(), said.strip()
    if tags and role == "assistant" and "think>" in said + thought:
        return (), "", ""
    reasoning = thought.replace(thoughts, _THOUGHT) if thoughts else thought
    content = said.replace(words, _SAID) if words else said + _SAID
    content = f"<think>{reasoning}</think>{content}" if tagged else content
    return (role, content, reasoning) if REASONING in message else (role, content), thoughts, words


def _check_written(messages: Talk, number: int, answer: str) -> None:
    if not all(word in answer for word in messages[number]["content"].rpartition("</think>")[2].rsplit(None, 1)[-1:]):
        fix = "Some want messages that are lists of texts and pictures; take one for texts."
        raise UserError(f"the chat template does not write what message {number + 1} says", where=_WHERE, fix=fix)


# ---- conversations ----


def check_messages(messages: Talk) -> None:
    """Raise UserError unless every message has a known role and text, and only the first one is a system message."""
    if not messages:
        raise UserError("a conversation without messages")
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        if role not in ROLES:
            raise UserError(f"message {number} has the role {role!r}", fix=f"Roles are {', '.join(ROLES)}.")
        for name, text in (("content", message.get("content")), (REASONING, message.get(REASONING, ""))):
            if not isinstance(text, str):
                raise UserError(f"the {name} of message {number} is not a text but {reprlib.repr(text)}")
        if role == "system" and number > 1:
            raise UserError(f"message {number} is a system message", fix="Only the first one may be.")


def with_system_prompt(messages: Talk, system_prompt: str) -> list[Message]:
    """Return the messages, after `system_prompt` unless it is empty or they bring a system message of their own."""
    if not system_prompt or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def guarded(messages: Talk, tokenizer: "Tokenizer", system_prompt: str) -> list[Message]:
    """Return the messages, as `with_system_prompt` does, with a guard in what spells a control token.

    In a template, though not in ChatML, an assistant's tags such as <think> are structure. See `Tokenizer.guard`.
    """
    safe: list[Message] = []
    for message in with_system_prompt(messages, system_prompt):
        tags = message["role"] == "assistant" and tokenizer.template is not None
        texts = {key: tokenizer.guard(message[key], tags=tags) for key in ("content", REASONING) if key in message}
        safe.append({**message, **texts})
    return safe


def encode_conversation(messages: Talk, tokenizer: "Tokenizer", system_prompt: str, *, asks: bool = False) -> Encoded:
    """Return the tokens of a conversation, and which of them are trained on.

    In a template, see `ChatTemplate.write`; or in ChatML, without reasoning: what a text begins with and,
    per message, `<|im_start|>{role}\\n{content}<|im_end|>\\n`, of which an answer and its <|im_end|> are trained.
    With `asks`, the text by which the model is asked for an answer follows, and nothing is trained.
    Raises UserError as `check_messages` does, and for a vocabulary without ChatML's tokens.
    """
    check_messages(messages)
    safe, template = guarded(messages, tokenizer, system_prompt), tokenizer.template
    if template is not None:
        written = (template.render(safe, add_generation_prompt=True), []) if asks else template.write(safe)
        return tokenizer.encode_rendered(*written)
    if not {_START, _END} <= tokenizer.controls.keys():
        what = "conversations are written with <|im_start|> and <|im_end|>, which this model's vocabulary lacks"
        fix = "Fine-tune it first: with `chat_template: FILE.jinja` (or tokenizer), or the two added (docs/hub.md)."
        raise UserError(what, where=str(tokenizer.folder), fix=fix)
    text, spans = "", list[Span]()
    for message in safe:
        text += f"{_START}{message['role']}\n"
        begin = len(text)
        text += message["content"] + _END
        spans += [(begin, len(text))] if is_trained(message) and not asks else []
        text += "\n"
    ids, trained = tokenizer.encode_rendered(text + (f"{_START}assistant\n" if asks else ""), spans)
    return [*tokenizer.opening, *ids], [False] * len(tokenizer.opening) + trained


def is_trained(message: Message) -> bool:
    """Return whether a message is an answer that the model is to learn."""
    return message["role"] == "assistant" and message.get("train", True) is not False


def encode_document(messages: Talk, tokenizer: "Tokenizer", system_prompt: str) -> Encoded:
    """Return a conversation as a document that sees no other one in its row; see `encode_conversation`."""
    tokens, trained = encode_conversation(messages, tokenizer, system_prompt)
    own = tokenizer.fixed_ids and tokenizer.template is None  # others need not begin with an id of their own
    return (tokens, trained) if own else ([*tokens, tokenizer.conversation_marks.end], [*trained, False])


def encode_prompt(messages: Talk, tokenizer: "Tokenizer", system_prompt: str) -> list[int]:
    """Return the tokens of the conversation so far, and of ChatML `<|im_start|>assistant\\n`: the answer follows."""
    return encode_conversation(messages, tokenizer, system_prompt, asks=True)[0]


def trained_runs(trained: Sequence[bool]) -> Integer[np.ndarray, "runs 2"]:
    """Return where each run of trained tokens begins and ends."""
    return np.flatnonzero(np.diff(np.array([0, *trained, 0], np.int8))).reshape(-1, 2)


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
    turns = (
        "{%- for message in messages -%}"
        "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    return ("{{- bos_token -}}" if opened else "") + (default if system_prompt else "") + turns


def with_default_system(template: str, system_prompt: str) -> str:
    """Return another model's Jinja template that puts `system_prompt` before messages without one; as it is for ""."""
    if not system_prompt:
        return template
    message = json.dumps({"role": "system", "content": system_prompt}, ensure_ascii=False)
    first = f"{{% set messages = [{message}] + messages %}}"
    return f"{{% if not messages or messages[0]['role'] != 'system' %}}{first}{{% endif %}}\n{template}"


def system_prompt_in(template: str) -> str | None:
    """Return the system prompt with which `chat_template` makes this template; None if it makes no such template."""
    match = re.search(r"system\\n' \+ (\"(?:[^\"\\]|\\.)*\") \+", template)
    try:
        system_prompt: str = json.loads(match[1]) if match else ""
    except ValueError:
        return None  # it only looks like ChatML of this program
    return system_prompt if template in (chat_template(system_prompt, opened=o) for o in (True, False)) else None
