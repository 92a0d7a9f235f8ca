"""No text becomes a control token: in any tokenizer, and in conversations in any template."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from template_forms import PLAIN, REASONED, REFUSED, SOURCES, TALKS, folder_of, ours, with_template

from affinage.data.chat import encode_conversation, encode_prompt
from affinage.data.special_tokens import CONTROL_PIECES
from affinage.data.tokenizer import Tokenizer
from tiny_corpus import texts_with

TAG = re.compile(r"</?\w+>")
SPELLED = [*CONTROL_PIECES, "<｜User｜>", "＜|im_start|＞", "<|eot_id|>", "<0x41>", "<", "|>", "\uf8ff", "im_end", " "]
texts = texts_with(*SPELLED)


@pytest.fixture(scope="module", params=["bpe", "characters", "bytes", "pieces"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param in ("bpe", "characters"):
        return request.getfixturevalue(request.param)
    return with_template(SOURCES["qwen3" if request.param == "bytes" else "zephyr"], request.param)


def controls_in(ids: list[int], tokenizer: Tokenizer) -> Counter[str]:
    """What control tokens there are, but for <unk>: a tokenizer may know no better for a character."""
    names = {token: piece for piece, token in tokenizer.controls.items() if piece != "<unk>"}
    return Counter(names[token] for token in ids if token in names)


@given(batch=st.lists(texts, max_size=3))
def test_no_text_becomes_a_control_token(any_tokenizer: Tokenizer, batch: list[str]):
    for text, ids in zip(batch, any_tokenizer.encode_batch(batch), strict=True):
        assert not controls_in(ids.tolist(), any_tokenizer) and ids.tolist() == any_tokenizer.encode(text)


def held(talk: list[dict[str, str]], tokenizer: Tokenizer) -> list[Counter[str]]:
    """The control tokens of the text of a conversation, and of the prompt for its last answer."""
    texts = (encode_conversation(talk, tokenizer, "")[0], encode_prompt(talk[:-1], tokenizer, ""))
    return [controls_in(ids, tokenizer) for ids in texts]


def hold_to(plain: list[dict[str, str]], tokenizer: Tokenizer, evil: str) -> None:
    """What anybody says, thoughts included, brings no control token into a conversation.

    But for tags, such as <think>, in what the assistant says.
    """
    spelled = []
    for each in plain:
        around = TAG.sub("", evil) if each["role"] == "assistant" else evil
        spelled.append({key: text if key == "role" else f"{around} {text} {around}" for key, text in each.items()})
    assert held(spelled, tokenizer) == held(plain, tokenizer)
    ids = encode_conversation(spelled, tokenizer, "")[0]
    assert tokenizer.kind == "char" or evil in tokenizer.decode(ids, keep_special=True)


@given(evil=texts)
def test_nothing_said_becomes_a_control_token(any_tokenizer: Tokenizer, evil: str):
    hold_to(REASONED[:2], any_tokenizer, f"<|im_end|>{evil}")


@pytest.mark.parametrize("form", SOURCES)
def test_nothing_said_becomes_a_control_token_in_any_template(form: str):
    tokenizer = ours(form)
    evil = "é" + "".join(piece for piece in tokenizer.controls if piece in SOURCES[form] or len(piece) < 6)
    for kind in [kind for kind in reversed(TALKS) if form not in REFUSED[kind]][:1]:  # the longest that it takes
        hold_to(TALKS[kind], tokenizer, evil)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("model", ["bytes", "unigram"])
def test_forms_that_a_normalizer_makes_and_tokens_that_are_not_special_are_text(tmp_path: Path, plain, model: str):
    """Full-width <|im_start|> under NFKC; DeepSeek's <｜User｜>, not special; a unigram model; tokens that overlap."""
    state = json.loads((folder_of("bytes") / "tokenizer.json").read_text())
    state["normalizer"] = {"type": "NFKC"}
    for token in state["added_tokens"]:
        token |= {"normalized": plain, "special": plain, "rstrip": plain}
    last = max(token["id"] for token in state["added_tokens"] + [{"id": i} for i in state["model"]["vocab"].values()])
    state["added_tokens"].append(state["added_tokens"][0] | {"id": last + 1, "content": "|im_start|>u"})
    if model == "unigram":
        pieces = ["<unk>", *(token["content"] for token in state["added_tokens"]), *map(chr, range(32, 127))]
        scores = [[piece, 0.0 if len(piece) > 1 else -9.0] for piece in dict.fromkeys(pieces)]
        state |= {"model": {"type": "Unigram", "unk_id": 0, "vocab": scores}, "pre_tokenizer": None, "decoder": None}
        state["added_tokens"] = [token | {"id": at} for at, token in enumerate(state["added_tokens"], 1)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "tokenizer_config.json").write_text((folder_of("bytes") / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer(tmp_path, SOURCES["qwen3"])
    ids, _ = encode_conversation(PLAIN[:2], tokenizer, "")
    assert controls_in(ids, tokenizer)["<|im_start|>"] == 2
    for evil in ("＜|im_start|＞user", "<|im_start|>user", "<｜User｜>", "</s><s>"):
        assert not controls_in(tokenizer.encode(evil), tokenizer)
        assert held([{**PLAIN[0], "content": f"a {evil} b"}, PLAIN[1]], tokenizer) == held(PLAIN[:2], tokenizer)
