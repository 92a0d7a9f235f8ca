"""Text, ids and loss mask of conversations in published chat templates, against what transformers makes of them."""

import re
from functools import partial

import numpy as np
import pytest
from template_forms import (
    ANSWERS,
    CLOCK,
    NEMOTRON,
    PIECES,
    PLAIN,
    REASONED,
    REFUSED,
    SOURCES,
    SPECIAL,
    TALKS,
    THOUGHTFUL,
    ours,
    theirs,
    with_template,
)

from affinage.data.chat import drops_reasoning, encode_conversation, encode_prompt, unstopped_answers
from affinage.errors import UserError

# A first line by which some of them are taken.
DATE = "{% macro strftime_now(format) %}2026-01-31{% endmacro %}\n"
THINKING, NOT_THINKING = "{% set enable_thinking = true %}\n", "{% set enable_thinking = false %}\n"
LED = [
    *((name, kind, DATE) for name in sorted(CLOCK) for kind in TALKS),
    *((name, kind, NOT_THINKING) for name in NEMOTRON for kind in ("plain", "system")),
    ("qwen3_5_nothink", "reasoning", THINKING),
]
ENDLESS = {"glm4moe"}  # it writes nothing after an answer


def test_there_are_templates_and_every_refused_one_is_among_them():
    assert len(SOURCES) >= 70
    assert set().union(*REFUSED.values()) <= set(SOURCES)


CASES = [  # where a system message is taken, what has none is taken as well
    pytest.param(name, kind, marks=pytest.mark.full if kind == "plain" and name not in REFUSED["system"] else ())
    for name in SOURCES
    for kind in TALKS
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_text_ids_and_mask_are_those_of_transformers(name: str, kind: str):
    if name not in REFUSED[kind]:
        compare(name, TALKS[kind])
        return
    with pytest.raises(UserError) as error:
        encode_conversation(TALKS[kind], ours(name), "")
    assert error.value.where == "chat_template" and error.value.fix


@pytest.mark.parametrize(("name", "kind", "line"), LED)
def test_what_the_messages_advise_lets_a_template_be_taken(name: str, kind: str, line: str):
    assert name in REFUSED[kind]
    compare(name, TALKS[kind], line)


def compare(name: str, messages: list[dict[str, str]], line: str = "") -> None:
    """Hold what is made of the messages to transformers' own texts, ids and masks, and the trained text to the answers.

    Some templates ask whether there is a clock; transformers has one.
    """
    tokenizer, other = ours(name, line), theirs("pieces" if name in PIECES else "bytes")
    source = tokenizer.template.source
    write = partial(other.apply_chat_template, chat_template=source.replace("strftime_now is defined", "false"))
    assert tokenizer.template.render(messages) == write(messages, tokenize=False)
    documents = encode_conversation(messages, tokenizer, "")
    places = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(documents) in (1, len(places))

    marked = re.search(r"\{%-?\s*generation\b", source)
    if marked:
        for (ids, trained), place in zip(documents, places[-len(documents) :], strict=True):
            told = write(messages[: place + 1], return_dict=True, return_assistant_tokens_mask=True)
            mask = np.array(told["assistant_masks"], bool)
            if len(documents) > 1:  # an answer that is written otherwise later is trained alone
                mask[: runs(mask)[-1][0]] = False
            assert ids == told["input_ids"] and trained == mask.tolist()
    elif len(documents) == 1:
        assert documents[0][0] == write(messages, return_dict=False)
    said = []
    for ids, trained in documents:
        said += [(ids[:start], other.decode(ids[start:stop])) for start, stop in runs(trained)]
    assert len(said) == len(places)
    assert not any(tokenizer.conversation_marks.end in ids for ids, _ in documents)

    written = False
    for place, (before, text) in zip(places, said, strict=True):
        message = messages[place]
        content, thought = message["content"], message.get("reasoning_content")
        whole = write(messages[: place + 1], tokenize=False)
        written = bool(thought) and thought in whole
        assert text.count(content) == 1 and (not thought or text.count(thought) == written)
        others = [each["content"] for each in messages if each is not message]
        assert not any(other in text for other in others)
        prompt = write(messages[:place], add_generation_prompt=True, return_dict=False)
        assert encode_prompt(messages[:place], tokenizer, "") == prompt
        if marked:
            continue
        assert before == prompt
        start = write(messages[:place], add_generation_prompt=True, tokenize=False)
        after = text.partition(content)[2]
        assert after == "" if name in ENDLESS else re.fullmatch(f"({SPECIAL.pattern}|</s>)+", after)
        if name in PIECES:  # decoding drops a space at the beginning
            assert whole.removeprefix(start).strip() == text.strip()
        else:
            assert whole.startswith(start + text) and whole[len(start + text) :].strip() in ("", "</s>")
    assert drops_reasoning(messages, tokenizer) == ("reasoning_content" in messages[-1] and not written)


def runs(trained) -> np.ndarray:
    """Beginning and end of each run of trained tokens, [runs, 2]."""
    return np.flatnonzero(np.diff(np.array([False, *trained, False]).astype(int))).reshape(-1, 2)


def trained_texts(documents, tokenizer) -> list[str]:
    """What is trained of every document."""
    return [tokenizer.decode([i for i, t in zip(*each, strict=True) if t], keep_special=True) for each in documents]


def test_reasoning_within_the_content_is_trained_as_if_it_stood_beside_it():
    tokenizer = ours("qwen3")
    for first, last in ((0, 2), (2, 4), (0, 4)):
        within, beside = (encode_conversation(talk[first:last], tokenizer, "") for talk in (THOUGHTFUL, REASONED))
        assert within == beside
    assert not drops_reasoning(THOUGHTFUL, tokenizer)


USER, FIRST, SECOND, THOUGHT, END = PLAIN[0], *ANSWERS, THOUGHTFUL[1]["content"], "<|im_end|>"
BLOCK = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
SHY = ("message.content +", "(message.content if loop.last else message.content.split('</think>')[-1]) +")
FORMS = {
    "of two texts, an answer is trained in the one that has it as it was said": (
        SOURCES["qwen2_5"].replace(*SHY),
        [USER, FIRST, USER, THOUGHT, USER, SECOND],
        [THOUGHT + END, FIRST + END + SECOND + END],
    ),
    "a block around the end of the text is of the last answer": (
        BLOCK.replace(*SHY) + "{% generation %}{{ eos_token }}{% endgeneration %}",
        [USER, THOUGHT, USER, SECOND],
        [THOUGHT + END + "</s>", SECOND + END + "</s>"],
    ),
}


@pytest.mark.parametrize("what", FORMS)
def test_every_answer_is_trained_once(what: str):
    source, turns, expected = FORMS[what]
    talk = [{"role": "assistant", "content": turn} if isinstance(turn, str) else turn for turn in turns]
    tokenizer = with_template(source)
    assert trained_texts(encode_conversation(talk, tokenizer, ""), tokenizer) == expected


@pytest.mark.parametrize("form", ["llama3", "qwen2_5_training", "qwen3_training", "zephyr"])
def test_answers_before_a_message_or_that_are_not_to_be_trained_are_not(form: str):
    tokenizer = ours(form)
    for first, expected in ((0, [FIRST, SECOND]), (2, [SECOND]), (3, [SECOND])):
        texts = "".join(trained_texts(encode_conversation(PLAIN, tokenizer, "", trained_from=first), tokenizer))
        assert [answer for answer in ANSWERS if answer in texts] == expected
    [(ids, trained)] = encode_conversation([PLAIN[0], {**PLAIN[1], "train": False}, *PLAIN[2:]], tokenizer, "")
    assert ids == encode_conversation(PLAIN, tokenizer, "")[0][0]
    assert SECOND in trained_texts([(ids, trained)], tokenizer)[0] and len(runs(trained)) == 1


@pytest.mark.parametrize("form", ["llama3", "zephyr", "mistral", "qwen2_5", "qwen2_5_training", "gemma"])
def test_many_turns_are_trained_as_few_are(form: str):
    turns = [{**each, "content": f"{each['content']} {n}"} for n in range(60) for each in PLAIN[:2]]
    tokenizer = ours(form)
    [(ids, trained)] = encode_conversation(turns, tokenizer, "")
    assert len(runs(trained)) == 60 and not unstopped_answers(ids, trained, tokenizer.stops)
    assert unstopped_answers(ids, trained, ()) == 60
    few = [encode_conversation(turns[: 2 * n], tokenizer, "")[0] for n in (1, 2, 7)]
    for some, mask in few:
        last = runs(mask)[-1][1]
        assert (ids[:last], trained[:last]) == (some[:last], mask[:last])


@pytest.mark.parametrize("content", ["", "e", "end", "s", "/s"])
def test_the_first_end_after_an_answer_is_the_last_token_trained(content: str):
    """As Phi-3 ends: what the end of the text spells may be said, too."""
    source = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '</s>' }}{% endif %}"
    tokenizer = with_template(source)
    turns = [PLAIN[0], {"role": "assistant", "content": content}]
    assert {"<|end|>", "</s>"} <= set(tokenizer.controls)
    assert trained_texts(encode_conversation(turns, tokenizer, ""), tokenizer) == [content + "<|end|>"]
