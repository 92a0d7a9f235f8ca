"""Models of the hub taken in: exactly, or refused by name; and given back bit by bit."""

import errno
import itertools
import json
import shutil
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from huggingface_hub import ModelCard
from safetensors.numpy import load_file, save_file
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

import tiny_graphs
from affinage.data.chat import encode_prompt
from affinage.hub.families import architecture_of, family_of
from affinage.hub.folder import CONFIG, CardFacts, HubWeights, export, hub_facts, local_copy, read_hub_folder
from affinage.hub.verify import verify
from affinage.model import init_params, parse
from affinage.pipeline.models import is_chat, locate, resolve
from affinage.pipeline.opening import import_model, open_model
from run_affinage import refused
from tiny_models import CONTEXT, LLAMA, ZEPHYR, full_logits, fused_experts, tiny_llama, with_template

FACTS = CardFacts(license="apache-2.0")
_LLAMA_3 = {"kind": "llama3", "factor": 8.0, "original_context": 16}
GRAPHS = {
    "llama": tiny_graphs.llama(
        attention={"kv_heads": 2, "dropout": 0.25}, tied=True, norm={"kind": "rms", "eps": 1e-5}
    ),
    "llama with biases": tiny_graphs.llama(attention={"bias": True, "head_dim": 12}, init_std=0.01),
    "llama 3": tiny_graphs.llama(attention={"rope": {"theta": 5e5, "scaling": _LLAMA_3}}),
    "stretched": tiny_graphs.llama(attention={"rope": {"scaling": {"kind": "linear", "factor": 2.0}}}),
    "qwen2": tiny_graphs.llama(attention={"kv_heads": 2, "bias": "qkv"}),
    "qwen3": tiny_graphs.llama(attention={"kv_heads": 2, "qk_norm": True, "rope": {"theta": 1e6}}),
    "mistral": tiny_graphs.llama(attention={"kv_heads": 2, "window": 9}),
    "mixtral": tiny_graphs.moe(attention={"kv_heads": 2}, z_loss_weight=0.0, load_balance_weight=0.02),
    "gpt2": tiny_graphs.gpt2(dropout=0.1),
}
GRAPHS["llama"]["nodes"]["norm"]["eps"] = 1e-5


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "model"
    model = replace(tiny_llama(), system_prompt='Say "oui".\nBe brief.', chat=True)
    export(model, folder, facts=FACTS, dtype="bfloat16", max_shard_size=50_000)
    return folder


@pytest.fixture(scope="module")
def imported(exported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported") / "model"
    import_model(exported, folder, "tiny")
    return folder


def test_an_import_exported_again_is_the_same_bytes(exported, imported, tmp_path):
    assert len(list(exported.glob("*.safetensors"))) > 1
    locate(resolve(str(imported), tmp_path), tmp_path)
    again, recipe = open_model(str(imported), tmp_path), (imported / "recipe.yaml").read_text()
    assert is_chat(imported) and "dtype: bfloat16" in recipe
    export(again, tmp_path / "m", facts=FACTS, dtype="bfloat16", max_shard_size=50_000)
    assert {file.name for file in exported.iterdir()} == {file.name for file in (tmp_path / "m").iterdir()}
    for file in exported.iterdir():
        if file.name != "README.md":  # the model has another name
            assert file.read_bytes() == (tmp_path / "m" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("license", ["mit", None])
def test_a_card_says_no_more_than_the_import(exported, tmp_path, license, affinage):
    source = shutil.copytree(exported, tmp_path / "source")
    (source / "README.md").write_text(f"---\nlicense: {license}\n---\n" if license else "A model.\n")
    assert affinage("import", str(source), "--to", str(tmp_path / "imported"))[0] == 0
    for model, words in ((source, []), (tmp_path / "imported", []), (source, ["--license", "cc0-1.0"])):
        folder, expected = tmp_path / f"out-{len(list(tmp_path.iterdir()))}", words[-1] if words else license
        assert affinage("export", str(model), "--to", str(folder), *words)[0] == 0
        card = ModelCard.load(folder / "README.md")
        assert card.data.license == expected and "conversational" not in card.data.tags
        assert "answer in conversations" not in card.text and f'from_pretrained("{folder.name}")' in card.text
        assert (f"Weights under {expected}." if expected else "The license of the weights is not known.") in card.text


class Counted(dict):
    """Tensors by name, with the names in the order in which they are read; a name in a row is one reading."""

    def __init__(self, tensors: dict) -> None:
        super().__init__(tensors)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> np.ndarray:
        self.read += [name] if self.read[-1:] != [name] else []
        return super().__getitem__(name)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_family_comes_back_bit_by_bit(name, tmp_path):
    graph, draw = parse(GRAPHS[name]), np.random.default_rng(0)
    params = jax.tree.map(lambda one: draw.normal(size=one.shape).astype(np.float32), graph.parameters)
    family = family_of(graph)
    config, tensors = family.to_config(graph, context=64), family.to_tensors(params, graph)
    family.from_tensors(counted := Counted(tensors), graph)
    assert sorted(counted.read) == sorted(tensors), "each is read once"
    assert family.unknown(config) == ()
    (tmp_path / CONFIG).write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    read = read_hub_folder(tmp_path)
    assert family.to_config(read.graph, context=read.architecture.context) == config
    again = family.to_tensors(jax.device_get(read.params), read.graph)
    assert {name: array.tobytes() for name, array in again.items()} == {n: a.tobytes() for n, a in tensors.items()}
    for name, shape in zip(tensors, itertools.cycle([(), (0,), (7,), (2, 3, 5)])):
        save_file({**tensors, name: np.zeros(shape, np.float32)}, tmp_path / "model.safetensors")
        assert name in refused(read_hub_folder, tmp_path, match="shape").what
    turned = next(name for name, array in tensors.items() if array.ndim == 2 and len(set(array.shape)) == 2)
    save_file({**tensors, turned: np.ascontiguousarray(tensors[turned].T)}, tmp_path / "model.safetensors")
    refused(read_hub_folder, tmp_path, match="shape")  # as many elements


def test_a_hugging_face_folder_is_a_model_as_it_is(exported, imported, tmp_path):
    ours, read = open_model(str(imported), tmp_path), open_model(str(exported), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, ours.params, read.params)
    assert (read.system_prompt, read.context, is_chat(exported)) == ('Say "oui".\nBe brief.', ours.context, True)
    saved = tmp_path / "saved"
    AutoTokenizer.from_pretrained(exported).save_pretrained(saved)  # transformers gives the template a file of its own
    assert (saved / "chat_template.jinja").is_file() and hub_facts(saved)["system_prompt"] == 'Say "oui".\nBe brief.'
    refused(open_model, f"{exported}@3", tmp_path, match="checkpoints")


RARER = [pytest.param(family, marks=pytest.mark.full) for family in ("mistral", "qwen2", "qwen3")]


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", *RARER])
def test_what_transformers_writes_is_read(family, tmp_path):
    """Logits of a model that transformers made, saved as transformers does, equal ours."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": CONTEXT}
    if family == "mixtral":
        sizes |= {"num_local_experts": 4, "sliding_window": 9}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": 97}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = read_hub_folder(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(0, 97, 24)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens[None])).logits[0].numpy()
    np.testing.assert_allclose(full_logits(ours, tokens), expected, atol=1e-5)
    assert ours.architecture.context == CONTEXT


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type: mamba"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta: 5.0 and 10000.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "contradict"),
        ({"mlp_bias": True}, "mlp_bias: True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "code of its own"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change, named):
    graph = tiny_llama().graph
    error = refused(architecture_of, family_of(graph).to_config(graph, context=64) | change, "config.json")
    assert named in str(error) and "config.json" in error.where


# Configurations as published, shortened to what differs from the family's other models.
PUBLISHED = {
    "SmolLM2": {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None}
    | {"pretraining_tp": 1, "rope_theta": 100000, "attention_bias": False, "transformers.js_config": {"dtype": "q4"}},
    "TinyLlama": {"model_type": "llama", "pretraining_tp": 1, "rope_scaling": None, "num_key_value_heads": 2},
    "Qwen2.5": {"model_type": "qwen2", "use_mrope": False, "use_sliding_window": False, "sliding_window": 131072}
    | {"max_window_layers": 70, "num_key_value_heads": 2, "rope_theta": 1e6},
    "unsloth": {"model_type": "llama", "unsloth_version": "2026.1", "unsloth_fixed": True, "mlp_bias": False},
    "an old dump": {"model_type": "llama", "top_k": 50, "temperature": 1.0, "pruned_heads": {}, "bad_words_ids": None},
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 97, "max_position_embeddings": 64}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_that_transformers_ignores_are_named_and_ignored(name):
    found = architecture_of(SIZES | PUBLISHED[name], "config.json")
    assert parse(found.model).vocabulary == 97
    strange = {"is_llama_config", "rope_interleaved", "transformers.js_config", "use_mrope", "unsloth_version"}
    strange |= {"unsloth_fixed", "top_k", "temperature", "pruned_heads"}
    assert set(found.ignored) == strange & set(PUBLISHED[name])


def test_weights_in_other_forms_that_transformers_loads_are_read(tmp_path):
    for name in ("mixtral", "llama", "gpt2"):
        graph = parse(GRAPHS[name])
        params, family = tiny_graphs.random_params(graph), family_of(graph)
        tensors = family.to_tensors(params, graph)
        if name == "mixtral":
            tensors = fused_experts(tensors)
            save_file(tensors, tmp_path / "model.safetensors")
            weights = HubWeights(tmp_path)
            first = weights["model.layers.0.mlp.experts.gate_up_proj"]
            assert weights["model.layers.0.mlp.experts.gate_up_proj"] is first, "it is read once for all experts"
        elif name == "llama":  # tied
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        else:
            tensors = {name.removeprefix("transformer."): array for name, array in tensors.items()}
        folder = tmp_path / name
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(family.to_config(graph, context=64)))
        save_file(tensors, folder / "model.safetensors")
        jax.tree.map(np.testing.assert_array_equal, read_hub_folder(folder).params, params)


def test_a_full_disk_is_not_said_to_be_the_hub(monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("affinage.hub.folder.snapshot_download", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space"):  # of which the verb says that room is to be made
        local_copy("me/model")


def test_a_graph_of_no_family_is_refused_by_what_differs():
    refused(family_of, parse(tiny_graphs.llama(ffn={"kind": "relu2", "width": 40})), match=r"ffn\.kind: relu2")


def test_weights_that_cannot_be_those_of_the_model_are_refused_by_name(tmp_path):
    model, folder = tiny_llama(), tmp_path / "m"
    params = jax.tree.map(np.array, model.params)
    export(model, folder, facts=FACTS)
    file = folder / "model.safetensors"
    assert file.stat().st_mode == (folder / "config.json").stat().st_mode
    tensors = dict(load_file(file))
    for value, dtype in ((1e5, "float16"), (np.nan, "float32")):
        params["norm"]["scale"][0] = value
        broken = replace(model, params=params)
        refused(export, broken, tmp_path / "n", facts=FACTS, dtype=dtype, match=r"model\.norm\.weight")
    extra = "model.layers.0.self_attn.q_proj.bias"
    for written, named in (
        (tensors | {"model.norm.weight": params["norm"]["scale"]}, "finite"),
        (tensors | {"model.norm.weight": np.zeros(32, np.int32)}, "I32"),
        (tensors | {extra: np.zeros(32, np.float32)}, extra),
        ({name: array for name, array in tensors.items() if name != "model.norm.weight"}, "model.norm.weight"),
    ):
        save_file(written, file)
        assert named in str(refused(read_hub_folder, folder))
    file.write_bytes(file.read_bytes()[:-7])
    assert "model.safetensors" in str(refused(read_hub_folder, folder))
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors, file)
    assert "both" in str(refused(read_hub_folder, folder))
    config = json.loads((folder / CONFIG).read_text()) | {"num_attention_heads": "eight"}
    (folder / CONFIG).write_text(json.dumps(config))
    assert f"{folder / CONFIG}: " in str(refused(read_hub_folder, folder))


def test_a_vocabulary_larger_than_the_tokenizers_stays(tmp_path):
    small = tiny_llama()
    model = {"inputs": ["tokens"], "nodes": {name: dict(node) for name, node in LLAMA["nodes"].items()}}
    for node in ("embed", "logits"):
        model["nodes"][node]["vocab"] = 448
    graph = parse(model)
    params = jax.jit(partial(init_params, graph))(jax.random.key(1))
    export(replace(small, graph=graph, params=params), tmp_path / "m", facts=FACTS)
    import_model(tmp_path / "m", tmp_path / "imported", "padded")
    padded = open_model(str(tmp_path / "imported"), tmp_path)
    assert (padded.graph.vocabulary, padded.tokenizer.vocabulary) == (448, 420)
    assert verify(tmp_path / "m", padded, ["The capital"])["largest_logit_difference"] <= 1e-4


def test_tokenizers_that_cannot_be_used_are_refused_with_what_is_needed(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "m")
    FastTokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    refused(import_model, folder, tmp_path / "n", "tiny", match="3 ids, the model 420")
    (folder / "tokenizer.json").unlink()
    theirs = {"sentence_iterator": iter(["a b c d e f g"] * 9), "vocab_size": 12, "minloglevel": 2}
    SentencePieceTrainer.train(model_prefix=str(folder / "tokenizer"), **theirs)  # another project's
    assert "AutoTokenizer.from_pretrained" in refused(import_model, folder, tmp_path / "n", "tiny").fix


def test_a_model_of_another_chat_template_is_released_taken_in_and_talked_to_in_it(tmp_path):
    model = replace(with_template(ZEPHYR, "Be brief."), chat=True)
    export(model, tmp_path / "m", facts=FACTS)
    assert verify(tmp_path / "m", model, ["Paris"])["conversations"] == 3
    asked = [{"role": "user", "content": "Où est Paris ?"}]
    told, theirs = [{"role": "system", "content": "Be brief."}, *asked], AutoTokenizer.from_pretrained(tmp_path / "m")
    expected = theirs.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
    import_model(tmp_path / "m", tmp_path / "imported", "imported")
    for folder in (tmp_path / "m", tmp_path / "imported"):
        again = open_model(str(folder), tmp_path)
        assert is_chat(folder) and encode_prompt(asked, again.tokenizer, "Be brief.") == expected
