"""Conversations in ChatML, against their text written as plainly as can be and against its Jinja template."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from template_forms import PIECES, PLAIN, ours, with_template

from affinage.data.chat import ChatTemplate, chat_template, encode_conversation, encode_prompt
from affinage.data.special_tokens import IM_END
from affinage.data.tokenizer import Tokenizer
from run_affinage import refused

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
    assert said == [i for m in talk if m["role"] == "assistant" for i in (*tokenizer.encode(m["content"]), IM_END)]
    assert prompt == tokens[: len(prompt)] and trained[len(prompt) - 1 : len(prompt) + 1] == [False, True]

    exported = Tokenizer(tokenizer.folder, chat_template(system_prompt))  # an exported model has a template
    assert exported.template.render(talk) == render(talk, system_prompt)
    assert encode_conversation(talk, exported, "") == found and encode_prompt(talk[:-1], exported, "") == prompt
    assert ".jinja" in refused(encode_prompt, talk, Tokenizer(ours("mistral").folder), "", match="lacks").fix


# ---- what a chat template may do: see test_loss_mask for what is trained in it


@pytest.mark.parametrize("form", ["qwen3", "mistral"])  # byte-level BPE, and byte fallback
def test_tokens_of_parts_of_characters_count_their_bytes_once(form: str):
    tokenizer, text = ours(form), "Ça coûte 5 € : naïf 🧀, 日本語."
    ids = tokenizer.encode(text)
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids)
    decoded = tokenizer.decode(ids)
    assert decoded.strip() == text  # one of them puts a space before it
    assert tokenizer.piece_bytes[ids].sum() == len(decoded.encode())


def test_conversations_that_several_threads_encode_do_not_mix():
    tokenizer = ours("qwen3")
    asked = [[{"role": "user", "content": f"{number} + 7 user Paris" * number}] for number in range(1, 9)]
    wanted = [encode_prompt(each, tokenizer, "") for each in asked]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many clients of a server do it by their number
    try:
        with ThreadPoolExecutor(8) as threads:
            told = list(threads.map(lambda number: encode_prompt(asked[number % 8], tokenizer, ""), range(400)))
    finally:
        sys.setswitchinterval(before)
    assert told == wanted * 50


def test_answers_end_with_their_turn_and_documents_with_a_token_that_no_conversation_holds():
    """Where </s> ends a turn or a thought, it would hide the turn before from the one after."""
    written = "{% for message in messages %}{{ message.content + '<|im_end|>' }}{% endfor %}"
    thinking = written.replace("{{", "{{ (message.reasoning_content or '') + '</s>' +")
    ends = [with_template(source).conversation_marks.end for source in (written, thinking)]
    controls = ours("qwen3").controls
    assert controls["<|im_end|>"] in ours("qwen3").stops and controls["<|eot_id|>"] in ours("llama3").stops
    assert ends == [controls["</s>"], controls["<pad>"]]
    assert all(ours(form).conversation_marks.end != ours(form).controls["</s>"] for form in PIECES)


@pytest.mark.parametrize("source", [
    "{% for message in messages %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__['os'].popen('touch HERE').read() }}",
    "{{ messages.append({'role': 'user', 'content': 'more'}) }}",
])  # fmt: skip
def test_a_hostile_or_broken_template_gets_nowhere(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    messages = [dict(PLAIN[0])]
    assert refused(lambda: ChatTemplate(source, ours("qwen3")).render(messages)).where == "chat_template"
    assert messages == PLAIN[:1] and not list(tmp_path.iterdir())
