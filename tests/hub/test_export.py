"""Exported folders, as transformers sees them: the same tokens, the same logits, the same text."""

import json
import os
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file, save_file

from affinage.errors import UserError
from affinage.hub.folder import CardFacts, export, model_card, read_hub_folder
from affinage.hub.verify import TRICKY_TEXTS, verify, verify_gguf
from affinage.model.graph import parameters
from tiny_models import CONTEXT, tiny_gpt2, tiny_llama

TEXTS = ["The capital of France is Paris.", "La monnaie du Japon est le yen, où naître ?", "Twelve plus seven", "x"]
FACTS = CardFacts(
    license="apache-2.0",
    summary="A model of 1.23M parameters.",
    command="affinage run quickstart",
    languages=("en", "fr"),
    sources=[{"name": "pocket-world", "licence": "CC0-1.0", "documents": 1234, "bytes": 5678}],
    training={"Pretraining: steps": 1800},
    results={
        "base": {"facts|en": {"acc": {"value": 0.5, "stderr": 0.01}}},
        "sft": {"facts|en": {"acc": {"value": 0.75, "stderr": None, "chat_template": True}}},
    },
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "model"
    model = replace(tiny_llama(scale=3.0, layers=2), system_prompt="You are a helpful assistant.", chat=True)
    export(model, folder, facts=FACTS)
    return model, folder


def test_transformers_gives_the_same_tokens_and_logits(exported):
    model, folder = exported
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [3, 7] and settings["pad_token_id"] == 0
    assert json.loads((folder / "tokenizer_config.json").read_text())["add_prefix_space"] is False  # for llama.cpp
    assert "You are a helpful assistant." in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    report = verify(folder, model, TEXTS)
    assert report["largest_logit_difference"] <= 1e-4
    assert report["texts"] == len(TEXTS) and report["conversations"] == 3 and report["token_sequences"] > 10


def test_narrower_weights_in_several_files_verify_against_the_rounded_model(tmp_path):
    model = tiny_llama(scale=3.0)
    export(model, tmp_path / "m", facts=FACTS, dtype="bfloat16", max_shard_size=50_000)
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    assert {str(one.dtype) for file in files for one in load_file(tmp_path / "m" / file).values()} == {"bfloat16"}
    assert index["metadata"]["total_size"] == sum(2 * leaf.size for leaf in jax.tree.leaves(model.params))
    assert verify(tmp_path / "m", model, TEXTS[:2])["largest_logit_difference"] <= 1e-4
    expected, last = read_hub_folder(tmp_path / "m").params, tmp_path / "m" / [*index["weight_map"].values()][-1]
    stale = {name: np.zeros_like(tensor) for file in files for name, tensor in load_file(tmp_path / "m" / file).items()}
    save_file(stale | load_file(last), last)  # the index places the others in other files
    jax.tree.map(np.testing.assert_array_equal, read_hub_folder(tmp_path / "m").params, expected)


def test_a_comparison_with_llama_cpp_names_what_is_missing(exported, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(UserError) as caught:
        verify_gguf(exported[1], exported[0], TEXTS)
    assert "LLAMA_CPP" in caught.value.fix


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="needs a checkout of llama.cpp, and llama-cpp-python")
def test_llama_cpp_gives_the_same_tokens_and_logits(exported):
    model, folder = exported
    found = verify_gguf(folder, model, [*TEXTS, *TRICKY_TEXTS])
    assert found["texts"] == len(TEXTS) + len(TRICKY_TEXTS) and found["largest_logit_difference"] < 1e-2


def test_gpt2_has_its_own_architecture(tmp_path):
    model = tiny_gpt2()
    export(model, tmp_path / "m", facts=FACTS, dtype="float16")
    assert json.loads((tmp_path / "m/config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert verify(tmp_path / "m", model, TEXTS[:2])["largest_logit_difference"] <= 1e-4


def test_a_changed_weight_or_token_does_not_verify(exported, tmp_path):
    model, folder = exported
    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors = dict(load_file(broken / "model.safetensors"))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.01)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="logits"):
        verify(broken, model, TEXTS)
    kind = type(model.tokenizer)
    shifted = type("Shifted", (kind,), {"encode": lambda self, text: [token + 1 for token in kind.encode(self, text)]})
    with pytest.raises(UserError, match="token 0"):
        verify(folder, replace(model, tokenizer=shifted(model.tokenizer.folder)), TEXTS)


def test_the_same_model_gives_the_same_bytes_and_replaces_what_was_there(exported, tmp_path):
    model, folder = exported
    target = tmp_path / "model"
    target.mkdir()
    (target / "old.txt").write_text("of an earlier export")
    summary = export(model, target, facts=FACTS)
    assert {p.name for p in target.iterdir()} == {p.name for p in folder.iterdir()} == set(summary["files"])
    for file in folder.iterdir():
        assert file.read_bytes() == (target / file.name).read_bytes(), file.name
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_card_tells_licence_scores_text_and_command_in_its_language_and_nothing_that_is_not_known(exported):
    card = ModelCard.load(exported[1] / "README.md")
    assert card.data.license == "apache-2.0" and card.data.language == ["en", "fr"]
    assert "| facts\\|en | acc | 0.500 ± 0.010 | 0.750 † |" in card.text
    assert "| pocket-world | CC0-1.0 | 1,234 | 5,678 |" in card.text
    assert "affinage run quickstart" in card.text and str(CONTEXT) in card.text
    count = f"{parameters(exported[0].graph).total:,}"
    french = model_card(exported[0], replace(FACTS, language="fr"), "m")
    assert f"{count} parameters" in card.text and f"{count.replace(',', chr(0x202F))} paramètres" in french
    assert "0,500 ± 0,010" in french
    unknown = model_card(tiny_llama(), CardFacts(license="mit"), "m")
    assert "license: mit" in unknown and not any(word in unknown for word in ("## Scores", "## Training", "None"))
