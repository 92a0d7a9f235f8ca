"""Conversations in ChatML, against their text written as plainly as can be and against its Jinja template."""

import copy

import pytest

from affinage.data.chat import chat_template, encode_conversation, encode_prompt
from affinage.data.special_tokens import IM_END

TALK = [
    {"role": "user", "content": "Was the cat  there ?"},
    {"role": "assistant", "content": "Behind the door."},
    {"role": "user", "content": "Bread\n\n!"},
    {"role": "assistant", "content": "  The cheese\n"},
]
OWN = {"role": "system", "content": "The river"}


def render(messages: list[dict[str, str]], system_prompt: str) -> str:
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return "<s>" + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


@pytest.mark.parametrize("system_prompt", ["", "Say \"yes\" \\ or 'no'.\nThe {{ 1 }} {% raw %}"])
@pytest.mark.parametrize("talk", [TALK, [OWN, *TALK[:2]]], ids=["turns", "system"])
def test_a_conversation_spells_chatml_and_the_answers_and_their_ends_are_trained(tokenizer, talk, system_prompt: str):
    tokens, trained = found = encode_conversation(talk, tokenizer, system_prompt)
    prompt = encode_prompt(talk[:-1], tokenizer, system_prompt)
    if tokenizer.kind == "bpe":
        assert tokenizer.decode(tokens, keep_special=True) == render(talk, system_prompt)
    said = [token for token, flag in zip(tokens, trained, strict=True) if flag]
    answers = [m["content"] for m in talk if m["role"] == "assistant"]
    assert said == [token for answer in answers for token in (*tokenizer.encode(answer), IM_END)]
    assert prompt == tokens[: len(prompt)] and trained[len(prompt) - 1 : len(prompt) + 1] == [False, True]

    exported = copy.copy(tokenizer)  # an exported model has a template
    exported.use_template(chat_template(system_prompt))
    assert exported.template.render(talk) == render(talk, system_prompt)
    assert encode_conversation(talk, exported, "") == found and encode_prompt(talk[:-1], exported, "") == prompt
