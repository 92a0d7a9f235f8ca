"""What a Jinja chat template makes of a conversation to train on: what the model would say, after what it would see."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from affinage.data.chat_template import PROBE, REASONING, WHERE, ChatTemplate, Message, Span, shield
from affinage.errors import UserError

if TYPE_CHECKING:
    from affinage.data.tokenizer import Tokenizer

_GENERATION = re.compile(r"\{%-?\+?\s*generation\b")
_TAIL = 40  # characters by which the end of a content is found
_MARK = (
    "Mark what the assistant says with {% generation %} and {% endgeneration %} in the template. One that reads "
    "`enable_thinking` asks otherwise with {% set enable_thinking = false %} (or true) as its first line."
)
_THINK = "<think>"

Encoded = tuple[list[int], list[bool]]  # ids, and which of them are trained


@dataclass(frozen=True)
class _Answer:
    """An answer in its place: the text that the model sees before it, what it says, and perhaps some white space."""

    text: str
    spans: Sequence[Span]  # of what it says, with the token that ends it

    def stands_in(self, text: str) -> bool:
        """Whether the text begins with all that was seen and said here."""
        return text.startswith(self.text[: self.spans[-1][1]])


def encode_turns(
    template: ChatTemplate, messages: Sequence[Message], tokenizer: "Tokenizer", *, trained_from: int = 0
) -> list[Encoded]:
    """Ids of a conversation, and which are said by the assistant; see `write_turns`."""
    written = write_turns(template, messages, tokenizer, trained_from=trained_from)
    return [_encoded(text, spans, tokenizer) for text, spans in written]


def write_turns(
    template: ChatTemplate, messages: Sequence[Message], tokenizer: "Tokenizer", *, trained_from: int = 0
) -> list[tuple[str, list[Span]]]:
    """A conversation as texts, and the parts of each that the assistant says from the message `trained_from` on.

    Those are what stands in {% generation %} blocks where the template has such. Otherwise what an answer adds to the
    text by which the model is asked for it. Counted is the token that ends a turn, not the white space after it.

    Some templates write an earlier turn otherwise once another follows; most leave out its reasoning. What the model
    would have said then stands in the conversation up to that turn alone, and it is trained there. So one conversation
    comes as several texts, in the order of its answers. In each are trained those answers that it has as the model
    would have said them, after what the model would have seen, and every answer is trained in one of them.

    Raises:
        UserError: for a template that asks for an answer with a text that the answer does not go on from, or does not
            write an answer.
    """
    shielded = shield(messages, tokenizer)
    marked = _GENERATION.search(template.source) is not None
    left = [
        _marked(template, shielded, number) if marked else _said(template, shielded, number, tokenizer)
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number >= trained_from
    ]
    text, found = template.render(shielded), []
    if not left or any(answer.stands_in(text) for answer in left):
        found.append((text, _spans_in(text, left)))
    while left := [answer for answer in left if not answer.stands_in(text)]:
        text = left[-1].text
        found.append((text, _spans_in(text, left)))
    return found[::-1]


def _spans_in(text: str, answers: Sequence[_Answer]) -> list[Span]:
    return [span for answer in answers if answer.stands_in(text) for span in answer.spans]


def _marked(template: ChatTemplate, messages: Sequence[Message], number: int) -> _Answer:
    """The answer `number` by its blocks: those that come with it, such as one around an end of the text."""
    text, blocks = template.rendered(messages[: number + 1])
    begun = _common(template.render(messages[:number]), text) if number else 0
    own = [block for block in blocks if block[0] >= begun]
    earlier = sum(message["role"] == "assistant" for message in messages[:number])
    if not own or len(blocks) - len(own) < earlier:
        raise UserError(
            f"the chat template has {len(blocks)} generation blocks for {earlier + 1} answers, "
            f"and message {number + 1} has none that is its own",
            where=WHERE,
        )
    _check_written(messages[number], number, text[begun:])
    return _Answer(text, own)


def _said(template: ChatTemplate, messages: Sequence[Message], number: int, tokenizer: "Tokenizer") -> _Answer:
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
            where=WHERE,
            fix="Some want messages that are lists of texts and pictures; take one for texts.",
        )


def _turn(said: str, content: str, tokenizer: "Tokenizer") -> str:
    """What is said up to the tokens that end the turn; all of it where no such end is found.

    Those are the first ones after the content: some templates write an end of the text after them.
    """
    controls = "|".join(map(re.escape, sorted(tokenizer.controls, key=len, reverse=True)))
    if not controls:
        return said
    last = content.rstrip()[-_TAIL:]
    found = [*re.finditer(f"(?:{controls})+", said)]
    at = said.rfind(last) + len(last) if last and last in said else len(said)
    after = next((one for one in found if one.start() >= at), found[-1] if found else None)
    return said[: after.end()] if after and not re.sub(controls, "", said[after.end() :]).strip() else said


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _gone_on(template: ChatTemplate, messages: Sequence[Message], before: str) -> str:
    """What the model says, of the last message, after a text that begins the answer for it, and the end of the turn.

    Such a text is `<think>`, where the template writes no reasoning of answers that are given. Reasoning beside the
    content then stands before it as it does in DeepSeek R1's answers.
    """
    *earlier, answer = messages
    written = template.render([*earlier, {**answer, "content": PROBE}])
    begun = before[_common(before, written) :]
    content, opening, thought = answer["content"].lstrip(), begun.strip(), answer.get(REASONING, "").strip()
    if opening == _THINK and thought and thought not in written and not content.startswith(opening):
        content = f"{_THINK}\n{thought}\n</think>\n\n{content}"
    probe = written.rfind(PROBE)
    if probe < 0 or not opening or not content.startswith(opening):
        wanted = f", and it does not begin with {opening!r}" if opening else ""
        raise UserError(
            f"the chat template asks for message {len(messages)} with another text than it writes before it{wanted}: "
            "what the model would have said is a guess",
            where=WHERE,
            fix=_MARK,
        )
    space = begun[len(begun.rstrip()) :]
    return content.removeprefix(opening).removeprefix(space) + written[probe + len(PROBE) :]


def _encoded(text: str, spans: Sequence[Span], tokenizer: "Tokenizer") -> Encoded:
    ids, offsets = tokenizer.encode_rendered(text)
    return ids, [_inside(offset, spans) for offset in offsets]


def _inside(offset: Span, spans: Sequence[Span]) -> bool:
    start, end = offset[0], max(offset[1], offset[0] + 1)
    return any(start < stop and end > begin for begin, stop in spans)
