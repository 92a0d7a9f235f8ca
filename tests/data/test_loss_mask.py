"""Text, ids and loss mask of conversations in published chat templates, against what transformers makes of them."""

import re
from functools import partial

import numpy as np
import pytest
import template_forms as forms
from template_forms import PIECES, PLAIN, REFUSED, SOURCES, TALKS, ours, with_template

from affinage.data.chat import encode_conversation, encode_prompt, trained_runs
from affinage.errors import UserError
from run_affinage import refused

MARKED = re.compile(r"\{%-?\s*generation\b")
# A first line by which some of them are taken.
DATE = "{% macro strftime_now(format) %}2026-01-31{% endmacro %}\n"
LED = [
    *((name, kind, DATE) for name in sorted(forms.CLOCK) for kind in TALKS),
    *((name, kind, "{% set enable_thinking = false %}\n") for name in forms.NEMOTRON for kind in ("plain", "system")),
    ("qwen3_5_nothink", "reasoning", "{% set enable_thinking = true %}\n"),
]
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
    error = refused(lambda: encode_conversation(TALKS[kind], ours(name), ""))
    assert error.where == "chat_template" and error.fix


@pytest.mark.parametrize(("name", "kind", "line"), LED)
def test_what_the_messages_advise_lets_a_template_be_taken(name: str, kind: str, line: str):
    assert name in REFUSED[kind]
    compare(name, TALKS[kind], line)


def compare(name: str, messages: list[dict[str, str]], line: str = "") -> None:
    """Hold what is made of messages to transformers' texts, ids and masks, and the trained text to the answers."""
    tokenizer, other = ours(name, line), forms.theirs("pieces" if name in PIECES else "bytes")
    source = tokenizer.template.source.replace("strftime_now is defined", "false")  # transformers has a clock
    write = partial(other.apply_chat_template, chat_template=source)
    assert tokenizer.template.render(messages) == write(messages, tokenize=False)
    ids, trained = encode_conversation(messages, tokenizer, "")
    if marked := MARKED.search(source):
        expected = write(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert ids == expected["input_ids"] and trained == np.array(expected["assistant_masks"], bool).tolist()
    else:
        assert ids == write(messages, return_dict=False)
    said = [(ids[:start], other.decode(ids[start:stop])) for start, stop in trained_runs(trained)]
    places = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if len(said) < len(places):  # the template writes the first answer otherwise once another turn follows
        upto = write(messages[: places[0] + 1], tokenize=False)
        assert not marked and not write(messages, tokenize=False).startswith(upto.rstrip())
        places = places[1:]
    assert len(said) == len(places) and tokenizer.conversation_marks.end not in ids

    for place, (before, text) in zip(places, said, strict=True):
        message = messages[place]
        content, thought = message["content"], message.get("reasoning_content")
        whole = write(messages if marked else messages[: place + 1], tokenize=False)
        written = bool(thought) and thought in whole
        assert text.count(content) == 1 and (not thought or text.count(thought) == written)
        assert not any(each["content"] in text for each in messages if each is not message)
        prompt = write(messages[:place], add_generation_prompt=True, return_dict=False)
        assert encode_prompt(messages[:place], tokenizer, "") == prompt
        if marked:
            continue
        assert before == prompt
        start = write(messages[:place], add_generation_prompt=True, tokenize=False)
        after = text.partition(content)[2]
        assert after == "" if name == "glm4moe" else re.fullmatch(f"({forms.SPECIAL.pattern}|</s>)+", after)
        if name in PIECES:  # decoding drops a space at the beginning
            assert whole.removeprefix(start).strip() == text.strip()
        else:
            assert whole.startswith(start + text) and whole[len(start + text) :].strip() in ("", "</s>")


def trained_text(ids, trained, tokenizer) -> str:
    """What is trained of a document."""
    return tokenizer.decode([token for token, is_trained in zip(ids, trained, strict=True) if is_trained], True)


@pytest.mark.parametrize("turns", [slice(2), slice(2, 4)])
def test_reasoning_within_the_content_is_trained_as_if_it_stood_beside_it(turns: slice):
    within, beside = (talk[turns] for talk in (forms.THOUGHTFUL, forms.REASONED))
    assert encode_conversation(within, ours("qwen3"), "") == encode_conversation(beside, ours("qwen3"), "")


def test_an_answer_is_trained_only_where_the_text_has_it_as_it_was_said():
    shy = "(message.content if loop.last else message.content.split('</think>')[-1]) +"
    tokenizer = with_template(SOURCES["qwen2_5"].replace("message.content +", shy))
    talk = [*PLAIN[:2], PLAIN[0], forms.THOUGHTFUL[1], PLAIN[0], PLAIN[3]]
    first, second, thought = (each["content"] + "<|im_end|>" for each in (PLAIN[1], PLAIN[3], forms.THOUGHTFUL[1]))
    assert trained_text(*encode_conversation(talk, tokenizer, ""), tokenizer) == first + second
    assert trained_text(*encode_conversation(talk[:4], tokenizer, ""), tokenizer) == first + thought
    assert trained_text(*encode_conversation(talk[1:4], tokenizer, ""), tokenizer) == thought  # none asks for `first`


PLAINLY = ("llama3", "qwen2_5_training", "qwen3_training", "phi3_training", "glm4moe_training", "zephyr")


@pytest.mark.parametrize(("form", "talk"), [*((form, PLAIN) for form in PLAINLY), ("lfm2_2_5", forms.REASONED)])
def test_answers_that_are_not_to_be_trained_are_not(form: str, talk: list[dict[str, str]]):
    ids, trained = encode_conversation([talk[0], {**talk[1], "train": False}, *talk[2:]], ours(form), "")
    assert ids == encode_conversation(talk, ours(form), "")[0]
    assert forms.ANSWERS[1] in trained_text(ids, trained, ours(form)) and len(trained_runs(trained)) == 1
    other = {**forms.REASONED[3], "content": "NO", "train": False}  # two answers in a row, between others
    found = encode_conversation([*forms.REASONED[:2], other, PLAIN[1], PLAIN[2]], ours(form), "")
    assert "NO" not in trained_text(*found, ours(form)) and "In Paris" in trained_text(*found, ours(form))


@pytest.mark.parametrize("turns", [PLAIN, forms.REASONED, forms.THOUGHTFUL, [PLAIN[0], *PLAIN]])
@pytest.mark.parametrize("form", [name for name, source in SOURCES.items() if not MARKED.search(source)])
def test_answers_are_found_in_one_rendering_as_by_rendering_up_to_each(form: str, turns: list, monkeypatch):
    tokenizer = ours(form)
    talk = [{**each, "content": f"{each['content']} {n}" + "\n" * (n % 2)} for n in range(6) for each in turns]
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer.template, "_is_regular", lambda *_: False)
        try:
            expected = encode_conversation(talk, tokenizer, "")
        except UserError as error:
            assert str(refused(encode_conversation, talk, tokenizer, "")) == str(error)
            return
    assert encode_conversation(talk, tokenizer, "") == expected
    monkeypatch.setattr(tokenizer.template, "_answers_by_prefixes", None)
    assert encode_conversation(talk, tokenizer, "") == expected


@pytest.mark.parametrize("test", ["[0].role == 'system'", "|length > 1", "[-1].content.endswith('/no')"])
def test_what_asks_for_an_answer_may_depend_on_any_other_message(test: str):
    source = "{% for m in messages %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ 'assistant' + ('!' if messages" + test + " else '') }}{% endif %}"
    talk = [forms.SYSTEM, {"role": "user", "content": "/no"}, PLAIN[1]]
    refused(encode_conversation, talk, with_template(source), "", match="a guess")
    assert len(trained_runs(encode_conversation(PLAIN[:2], with_template(source), "")[1])) == 1


@pytest.mark.parametrize("content", ["", "e", "end", "s", "/s"])
def test_the_first_end_after_an_answer_is_the_last_token_trained(content: str):
    """As Phi-3 ends: what the end of the text spells may be said, too."""
    source = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '</s>' }}{% endif %}"
    tokenizer, turns = with_template(source), [PLAIN[0], {"role": "assistant", "content": content}]
    assert {"<|end|>", "</s>"} <= set(tokenizer.controls)
    assert trained_text(*encode_conversation(turns, tokenizer, ""), tokenizer) == content + "<|end|>"
    assert trained_text(*encode_conversation(turns, ours("qwen3"), ""), ours("qwen3")).endswith(content + "<|im_end|>")
