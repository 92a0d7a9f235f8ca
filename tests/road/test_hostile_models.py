"""Folders of models from strangers: whatever their files say, reading them ends in a message or in a model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from affinage.data.hub_tokenizer import HubTokenizer, template_in
from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.hub.read import read_hub_folder
from affinage.hub.weights import INDEX, HubWeights
from affinage.stages.imports import fitting_tokenizer, system_prompt_of

DEEP = "[" * 100_000
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "rope_scaling": None,
    "attention_bias": False, "head_dim": 4,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
ODD = [[], {}, "x", "1", -1, 0, 1.5, 1e300, 10**30, True, float("nan"), [1, 1, 1], {"a": {}}, None]
TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer_json(**changes: object) -> str:
    words = {"</s>": 0, "<|im_end|>": 1, "a": 2, "b": 3, "c": 4}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 0, "content": "</s>", **TOKEN}],
            "normalizer": None,
            "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"},
        }
        | changes
    )


def word_level(token: object) -> dict:
    return {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": token}, "unk_token": "a"}


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_configuration_of_odd_values_ends_in_a_message(tmp_path: Path, config: dict):
    for key in config:
        for value in ODD:
            (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
            with pytest.raises(UserError):  # at the latest because there are no weights
                read_hub_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", '"x"', DEEP, "9" * 5000, "\ud800", '{"model_type": []}'])
def test_a_configuration_that_is_none_ends_in_a_message(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(UserError):
        read_hub_folder(tmp_path)


@pytest.mark.parametrize("index", [DEEP, "[]", "{}", '{"weight_map": [["a", "b"]]}', '{"weight_map": {"w": 5}}'])
def test_an_index_of_weights_that_is_none_ends_in_a_message(tmp_path: Path, index: str):
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(UserError):
        HubWeights(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        DEEP,
        tokenizer_json(model=word_level(4_000_000_000)),
        tokenizer_json(model=word_level(-1)),
        tokenizer_json(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}),
        tokenizer_json(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}),
        tokenizer_json(pre_tokenizer={"type": "Python", "code": "import os"}),
        tokenizer_json(decoder={"type": "__import__"}),
    ],
)
def test_a_tokenizer_that_is_none_or_has_ids_far_off_ends_in_a_message(tmp_path: Path, text: str):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError):
        fitting_tokenizer(tmp_path, 100)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        DEEP,
        '{"eos_token": ["x"]}',
        '{"eos_token": {"x": 1}}',
        '{"eos_token": {"content": 5}, "bos_token": {}}',
        '{"chat_template": 5}',
        '{"chat_template": ["a"]}',
        '{"chat_template": [{"x": 1}]}',
        '{"chat_template": [{"name": "default"}]}',
        json.dumps({"chat_template": "{{ '<|im_start|>system\\n' + \"\\q\" + 'x' }}"}),
    ],
)
def test_the_configuration_of_a_tokenizer_is_read_or_ends_in_a_message(tmp_path: Path, text: str):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "tokenizer_config.json").write_text(text)
    asked: list[Callable[[], object]] = [
        lambda: template_in(tmp_path),
        lambda: system_prompt_of(tmp_path),
        lambda: HubTokenizer(tmp_path).special_tokens,
        lambda: HubTokenizer(tmp_path).stops,
        lambda: HubTokenizer(tmp_path).opening,
    ]
    for ask in asked:
        try:
            ask()
        except UserError as error:
            assert "tokenizer" in str(error)


@pytest.mark.parametrize("contents", [b"", b"no model", b"\x0a\xff\xff\xff\xff\x7f", b"\x80" * 99])
def test_a_sentencepiece_model_that_is_none_ends_in_a_message(tmp_path: Path, contents: bytes):
    (tmp_path / "tokenizer.model").write_bytes(contents)
    with pytest.raises(UserError):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "characters.json").write_text(DEEP)
    with pytest.raises(UserError):
        Tokenizer.load(tmp_path)
