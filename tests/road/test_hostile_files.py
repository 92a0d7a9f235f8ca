"""Files and models from strangers: none runs code, writes outside its folder, or ends in anything but a message."""

import json
import pickle
from pathlib import Path

import pytest

from affinage.config.data import PlaceSettings, safe_name
from affinage.config.load import load_recipe
from affinage.config.yaml import parse
from affinage.data.tokenizer import Tokenizer, template_in
from affinage.errors import UserError
from affinage.hub.folder import INDEX, HubWeights, hub_facts, read_hub_folder
from affinage.pipeline.models import made_from
from affinage.pipeline.opening import fitting_tokenizer
from affinage.pipeline.store import read_request
from run_affinage import refused
from source_forms import write_files

DEEP = "[" * 100_000
LLAMA = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "rope_scaling": None,
    "attention_bias": False, "head_dim": 4,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
ODD = [[], {}, "x", -1, 0, 1.5, 10**30, float("nan"), {"a": {}}, None]
WORD_LEVEL = {"type": "WordLevel", "unk_token": "a"}
TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer_json(**changes: object) -> str:
    model = {**WORD_LEVEL, "vocab": {"</s>": 0, "<|im_end|>": 1, "a": 2, "b": 3, "c": 4}}
    split = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    none = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    added = [{"id": 0, "content": "</s>", **TOKEN}]
    given = {"version": "1.0", "added_tokens": added, "pre_tokenizer": split, "model": model}
    return json.dumps(given | none | changes)


RECIPES = {
    "object": "name: !!python/object/apply:os.system ['touch x']",
    "function": "name: !function os.system",
    "key": "? [a, b]\n: c",
    "deep": "a: " + "[" * 2000 + "]" * 2000,
    "digits": "steps: " + "9" * 10_000,
}


@pytest.mark.parametrize("form", RECIPES)
def test_a_recipe_is_words_and_numbers(form: str):
    refused(parse, RECIPES[form], "x.yaml")


@pytest.mark.parametrize("name", ["../up", "/up", ".hidden", "a/b", "a\n", ""])
def test_the_name_of_a_run_leads_nowhere_else(tmp_path: Path, name: str):
    refused(load_recipe, "quickstart", [f"name={json.dumps(name)}"])


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", "a/../../b", "C:\\x", "nul\0l", "~/x"])
def test_the_names_of_sources_are_names_of_files(tmp_path: Path, name: str):
    for made in (safe_name(name), PlaceSettings(path=name).title):
        place = tmp_path / made
        assert place.resolve().parent == tmp_path.resolve() and place.name not in (".", "..") and "\0" not in made


ELSEWHERE = ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "evil.bin", 5]
INDICES = [DEEP, "[]", "{}", '{"weight_map": [["a", "b"]]}', *(json.dumps({"weight_map": {"w": f}}) for f in ELSEWHERE)]


@pytest.mark.parametrize("index", INDICES)
def test_an_index_of_weights_leads_nowhere_else(tmp_path: Path, index: str):
    write_files(tmp_path, {"secret.safetensors": b"x", f"model/{INDEX}": index})
    refused(HubWeights, tmp_path / "model")


def test_weights_that_are_pickles_are_not_read(tmp_path: Path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        refused(HubWeights, tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("key", ["../../secret", "/etc/passwd", "a/b", "", 5])
def test_what_a_result_says_that_it_was_made_from_leads_nowhere_else(tmp_path: Path, key: object):
    folder = tmp_path / "runs" / "store" / "pretrain-0123456789ab"
    folder.mkdir(parents=True)
    (tmp_path / "runs" / "store" / "train-tokenizer-0123456789ab").mkdir()
    request = {"step": "pretrain", "version": 1, "settings": {}, "sources": {}, "key": "0123456789ab"}
    right = {"train-tokenizer": "0123456789ab"}
    for inputs in ({"train-tokenizer": key}, {f"../{key}": "0123456789ab"}, {**right, "tokenize": key}):
        (folder / "request.json").write_text(json.dumps(request | {"inputs": inputs}))
        assert read_request(folder) is None and made_from(folder, "train-tokenizer") is None
    (folder / "request.json").write_text(json.dumps(request | {"inputs": right}))
    assert made_from(folder, "train-tokenizer") == folder.with_name("train-tokenizer-0123456789ab")


def test_a_configuration_that_is_none_or_of_odd_values_ends_in_a_message(tmp_path: Path):
    texts = [json.dumps({**config, key: value}) for config in (LLAMA, GPT2) for key in config for value in ODD]
    for text in [*texts, "", "{", "[]", "null", "5", '"x"', DEEP, "9" * 5000, "\ud800", '{"model_type": []}']:
        (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        refused(read_hub_folder, tmp_path)  # at the latest because there are no weights


@pytest.mark.parametrize("text", [
    None, "", "{", "{}", "x", DEEP,
    *(tokenizer_json(model={**WORD_LEVEL, "vocab": {"</s>": 0, "a": 1, "b": id}}) for id in ("b", 4_000_000_000, -1)),
    tokenizer_json(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}),
    tokenizer_json(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}),
    tokenizer_json(pre_tokenizer={"type": "Python", "code": "import os"}),
    tokenizer_json(decoder={"type": "__import__"}),
])  # fmt: skip
def test_a_tokenizer_that_is_none_or_has_ids_far_off_ends_in_a_message(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    assert str(tmp_path) in refused(fitting_tokenizer, tmp_path, 100).where


@pytest.mark.parametrize("text", [
    "{", "[]", DEEP, '{"eos_token": ["x"]}', '{"eos_token": {"x": 1}}',
    '{"eos_token": {"content": 5}, "bos_token": {}}', '{"chat_template": 5}', '{"chat_template": ["a"]}',
    '{"chat_template": [{"x": 1}]}', '{"chat_template": [{"name": "default"}]}',
    json.dumps({"chat_template": "{{ '<|im_start|>system\\n' + \"\\q\" + 'x' }}"}),
])  # fmt: skip
def test_the_configuration_of_a_tokenizer_is_read_or_ends_in_a_message(tmp_path: Path, text: str):
    write_files(tmp_path, {"tokenizer.json": tokenizer_json(), "tokenizer_config.json": text})
    asked = [template_in, hub_facts, lambda folder: Tokenizer(folder).special_tokens]
    asked += [lambda folder: Tokenizer(folder).stops, lambda folder: Tokenizer(folder).opening]
    for ask in asked:
        try:
            ask(tmp_path)
        except UserError as error:
            assert "tokenizer" in str(error)
