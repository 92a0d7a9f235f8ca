"""Models of the hub taken in: exactly, or refused by name; given back bit by bit; and with a tokenizer of their own."""

import errno
import itertools
import json
import shutil
from dataclasses import replace
from unittest.mock import MagicMock, Mock

import jax
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.numpy import load_file, save_file
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import tiny_graphs
from affinage.data.chat import encode_prompt
from affinage.data.tokenizer import Tokenizer
from affinage.evaluation.run import JaxLM
from affinage.generation.engine import generate
from affinage.generation.sampling import SamplingParams
from affinage.hub.families import architecture_of, family_of
from affinage.hub.folder import CONFIG, CardFacts, HubWeights, export, hub_facts, local_copy, read_hub_folder
from affinage.hub.verify import verify
from affinage.model import parse
from affinage.pipeline.models import is_chat, locate, resolve
from affinage.pipeline.opening import import_model, open_model
from affinage.results import read_json
from run_affinage import refused, run
from tiny_models import CONTEXT, ZEPHYR, full_logits, fused_experts, model_of, tiny_llama, with_template

FACTS = CardFacts(license="apache-2.0")
_LLAMA_3 = {"kind": "llama3", "factor": 8.0, "original_context": 16}
RMS = {"kind": "rms", "eps": 1e-5}
GRAPHS = {
    "llama": tiny_graphs.llama(attention={"kv_heads": 2, "dropout": 0.25}, tied=True, norm=RMS),
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
    assert is_chat(imported) and "dtype: bfloat16" in (imported / "recipe.yaml").read_text()
    export(open_model(str(imported), tmp_path), tmp_path / "m", facts=FACTS, dtype="bfloat16", max_shard_size=50_000)
    before, after = ({file.name: file.read_bytes() for file in each.iterdir()} for each in (exported, tmp_path / "m"))
    assert before.pop("README.md") != after.pop("README.md"), "the model has another name"
    assert before == after


@pytest.mark.parametrize("license", ["mit", None])
def test_a_card_says_no_more_than_the_import(exported, tmp_path, license, affinage):
    source = shutil.copytree(exported, tmp_path / "source")
    (source / "README.md").write_text(f"---\nlicense: {license}\n---\n" if license else "A model.\n")
    assert affinage("import", str(source), "--to", str(tmp_path / "imported"))[0] == 0
    for model, words in ((source, []), (tmp_path / "imported", []), (source, ["--license", "cc0-1.0"])):
        folder, expected = tmp_path / f"out-{len(list(tmp_path.iterdir()))}", words[-1] if words else license
        status, out, _ = affinage("export", str(model), "--to", str(folder), *words)
        assert (status, "states no license" in out) == (0, expected is None)
        card = ModelCard.load(folder / "README.md")
        assert card.data.license == expected and "conversational" not in card.data.tags
        assert "answer in conversations" not in card.text and f'from_pretrained("{folder.name}")' in card.text
        assert (f"Weights under {expected}." if expected else "No license of the weights is stated.") in card.text


@pytest.mark.parametrize("name", GRAPHS)
def test_every_family_comes_back_bit_by_bit(name, tmp_path):
    graph, draw = parse(GRAPHS[name]), np.random.default_rng(0)
    params = jax.tree.map(lambda one: draw.normal(size=one.shape).astype(np.float32), graph.parameters)
    family = family_of(graph)
    config, tensors = family.to_config(graph, context=64), family.to_tensors(params, graph)
    reads, has = Mock(side_effect=tensors.__getitem__), Mock(side_effect=tensors.__contains__)
    family.from_tensors(MagicMock(__getitem__=reads, __contains__=has), graph)
    read = [call.args[0] for call in reads.mock_calls]
    assert sorted(name for name, _ in itertools.groupby(read)) == sorted(tensors), "each is read once, in a row"
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


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 97, "max_position_embeddings": CONTEXT}
SIZES_OF_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": 97}


def saved_by_transformers(family, folder, **sizes):
    """A model of random weights that transformers has made, in the folder as transformers writes it."""
    sizes = (SIZES_OF_GPT2 if family == "gpt2" else SIZES) | sizes
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    made.save_pretrained(folder)
    return made


GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
RARER = [pytest.param(family, marks=pytest.mark.full) for family in ("mistral", "qwen2", "qwen3")]


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", *RARER])
def test_what_transformers_writes_is_read(family, tmp_path):
    """Logits of a model that transformers made, saved as transformers does, equal ours."""
    own = {"gpt2": {}, "mixtral": GROUPED | {"num_local_experts": 4, "sliding_window": 9}}
    theirs = saved_by_transformers(family, tmp_path, **own.get(family, GROUPED))
    ours, tokens = read_hub_folder(tmp_path), np.random.default_rng(0).integers(0, 97, 24)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens[None])).logits[0].numpy()
    np.testing.assert_allclose(full_logits(ours, tokens), expected, atol=1e-5)
    assert ours.architecture.context == CONTEXT


@pytest.mark.parametrize(("change", "named"), [
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
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(change, named):
    graph = tiny_llama().graph
    error = refused(architecture_of, family_of(graph).to_config(graph, context=64) | change, "config.json")
    assert named in str(error) and "config.json" in error.where
    refused(family_of, parse(tiny_graphs.llama(ffn={"kind": "relu2", "width": 40})), match=r"ffn\.kind: relu2")


# Configurations as published, shortened: what is known of them, and what transformers ignores.
SMOLLM2 = {"model_type": "llama", "rope_scaling": None, "pretraining_tp": 1, "rope_theta": 100000, "mlp_bias": False}
SMOLLM2_STRANGE = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}
QWEN = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 70}
QWEN |= {"num_key_value_heads": 2, "rope_theta": 1e6}
OLD, OLD_STRANGE = {"model_type": "llama", "bad_words_ids": None}, {"top_k": 50, "temperature": 1.0, "pruned_heads": {}}
OF_UNSLOTH = {"unsloth_version": "2026.1", "unsloth_fixed": True}


@pytest.mark.parametrize(
    ("known", "strange"), [(SMOLLM2, SMOLLM2_STRANGE), (QWEN, {"use_mrope": False}), (OLD, OLD_STRANGE | OF_UNSLOTH)]
)
def test_keys_that_transformers_ignores_are_named_and_ignored(known, strange):
    found = architecture_of(SIZES | known | strange, "config.json")
    assert parse(found.model).vocabulary == 97 and set(found.ignored) == set(strange)


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


def test_weights_that_cannot_be_those_of_the_model_are_refused_by_name(tmp_path):
    model, folder, file = tiny_llama(), tmp_path / "m", tmp_path / "m/model.safetensors"
    params = jax.tree.map(np.array, model.params)
    export(model, folder, facts=FACTS)
    assert file.stat().st_mode == (folder / "config.json").stat().st_mode
    tensors = dict(load_file(file))
    for value, dtype in ((1e5, "float16"), (np.nan, "float32")):
        params["norm"]["scale"][0] = value
        broken = replace(model, params=params)
        refused(export, broken, tmp_path / "n", facts=FACTS, dtype=dtype, match=r"model\.norm\.weight")
    norm, extra = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
    for written, named in (
        (tensors | {norm: params["norm"]["scale"]}, "finite"),
        (tensors | {norm: np.full(32, 1e300)}, "finite"),  # not in float32
        (tensors | {norm: np.zeros(32, np.int32)}, "I32"),
        (tensors | {extra: np.zeros(32, np.float32)}, extra),
        ({name: array for name, array in tensors.items() if name != norm}, norm),
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
    (folder / CONFIG).write_text((folder / CONFIG).read_text().replace('heads": 4', 'heads": "eight"'))
    assert f"{folder / CONFIG}: " in str(refused(read_hub_folder, folder))


def test_a_vocabulary_larger_than_the_tokenizers_stays(tmp_path):
    export(model_of(tiny_graphs.llama(layers=1, vocabulary=448)), tmp_path / "m", facts=FACTS)
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
    theirs, expected = AutoTokenizer.from_pretrained(tmp_path / "m"), encode_prompt(asked, model.tokenizer, "Be brief.")
    assert theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=False) == expected
    import_model(tmp_path / "m", tmp_path / "imported", "imported")
    for folder in (tmp_path / "m", tmp_path / "imported"):
        again = open_model(str(folder), tmp_path)
        assert is_chat(folder) and encode_prompt(asked, again.tokenizer, again.system_prompt) == expected


# ---- a model with a tokenizer of its own continues texts, is evaluated and exported


TEXTS = ["The capital of France is Paris, and où naître?", "Douze plus sept font dix-neuf. 🧀"] * 5


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's: bytes spelled as letters, one special token, nothing put before a text."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    fast.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def metaspace() -> PreTrainedTokenizerFast:
    """As Llama's: spaces as U+2581, one before the text, single bytes, and <s> before it."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = FastTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(TEXTS[:1] * 5, trainers.BpeTrainer(vocab_size=330, special_tokens=special))
    whole = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    trained.decoder = decoders.Sequence(whole)
    trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    state = json.loads(trained.to_str())
    for token in state["added_tokens"][3:]:  # bytes are pieces, not special tokens
        token["special"] = False
    return PreTrainedTokenizerFast(
        tokenizer_object=FastTokenizer.from_str(json.dumps(state)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def foreign(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    theirs = saved_by_transformers(request.param, folder / "theirs", vocab_size=352, eos_token_id=[5])
    tokenizer = {"gpt2": byte_level, "llama": metaspace}[request.param]()
    tokenizer.save_pretrained(folder / "theirs")
    import_model(folder / "theirs", folder / "ours", "theirs")
    return theirs, tokenizer, open_model(str(folder / "ours"), folder)


def test_it_continues_texts_as_transformers_does_and_is_exported_with_its_tokenizer(foreign, tmp_path):
    theirs, tokenizer, ours = foreign
    ids = tokenizer("The capital")["input_ids"]
    assert [*ours.tokenizer.opening, *ours.tokenizer.encode("The capital")] == ids
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist()[len(ids) :]
    end, result = ours.tokenizer.eos, generate(ours, [ids], SamplingParams(20))[0]
    assert [token for token in result.tokens if token != end] == [token for token in expected if token != end]
    assert ours.tokenizer.stops == (tokenizer.eos_token_id, 5)
    lm = JaxLM(ours)  # as the harness is given it
    assert lm.tok_encode("The capital") == ids
    assert (lm.eot_token_id, lm.prefix_token_id) == (tokenizer.eos_token_id, tokenizer.bos_token_id)
    export(ours, tmp_path / "m", facts=FACTS, dtype="float16")
    assert read_json(tmp_path / "m" / CONFIG)["architectures"] == [type(theirs).__name__]
    assert read_json(tmp_path / "m" / "generation_config.json")["eos_token_id"] == [tokenizer.eos_token_id, 5]
    assert verify(tmp_path / "m", ours, TEXTS[:2])["largest_logit_difference"] <= 1e-4


def test_a_leading_space_survives_decoding_piece_by_piece(tmp_path):
    metaspace().save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("The capital of France")
    assert "".join(tokenizer.decode([token]) for token in ids) == " The capital of France"
    assert tokenizer.opening == (1,) and tokenizer.byte_lengths("où", tokenizer.encode("où")).sum() == 3


def test_without_chat_tokens_it_is_not_fine_tuned(foreign, tmp_path, capsys):
    (tmp_path / "turns.jsonl").write_text('{"prompt": "Où ?", "completion": "Ici."}\n' * 24)
    schedule = "{peak_lr: 1.0e-3, min_lr: 0}"
    sft = f"sft={{sources: [{tmp_path / 'turns.jsonl'}], steps: 1, batch_size: 4, schedule: {schedule}}}"
    settings = ("export=null", "mesh={data: 1}", "data=null", "pretrain=null", sft)
    run("run", f"{foreign[2].name}/recipe.yaml", "--runs", tmp_path, settings=settings, status=2)
    assert "<|im_end|>" in capsys.readouterr().err and not [*tmp_path.glob("store/*")], "before anything runs"
