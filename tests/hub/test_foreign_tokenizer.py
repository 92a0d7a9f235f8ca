"""A model with a tokenizer of its own: it continues texts, is evaluated and exported; what needs our ids is refused."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from affinage.data.tokenizer import Tokenizer
from affinage.errors import UserError
from affinage.evaluation.backend import JaxLM
from affinage.generation.decode import Generator, Request
from affinage.hub.card import CardFacts
from affinage.hub.export import export
from affinage.hub.verify import verify
from affinage.stages.imports import import_model
from affinage.stages.models import open_model

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
    replaced = normalizers.Replace(" ", "▁")
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
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
def imported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 64, "vocab_size": 352}
    if request.param == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 352}
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **sizes)).eval()
    theirs.save_pretrained(folder / "theirs")
    tokenizer = {"gpt2": byte_level, "llama": metaspace}[request.param]()
    tokenizer.save_pretrained(folder / "theirs")
    import_model(folder / "theirs", folder / "ours", "theirs")
    return theirs, tokenizer, open_model(str(folder / "ours"), folder)


def test_it_continues_texts_as_transformers_does(imported):
    theirs, tokenizer, ours = imported
    ids = tokenizer("The capital")["input_ids"]
    assert [*ours.tokenizer.opening, *ours.tokenizer.encode("The capital")] == ids
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist()[len(ids) :]
    end = ours.tokenizer.eos
    result = Generator(ours).generate([ids], Request(20))[0]
    assert [token for token in result.tokens if token != end] == [token for token in expected if token != end]
    assert ours.tokenizer.stops == (tokenizer.eos_token_id,)


def test_it_is_exported_with_its_tokenizer(imported, tmp_path):
    _, _, ours = imported
    export(ours, tmp_path / "m", facts=CardFacts(licence="apache-2.0"))
    assert verify(tmp_path / "m", ours, TEXTS[:2])["largest_logit_difference"] <= 1e-4


def test_the_harness_is_given_its_ids(imported):
    _, tokenizer, ours = imported
    lm = JaxLM(ours)
    assert lm.tok_encode("The capital") == tokenizer("The capital")["input_ids"]
    assert (lm.eot_token_id, lm.prefix_token_id) == (tokenizer.eos_token_id, tokenizer.bos_token_id)


def test_chatml_is_refused(imported):
    from affinage.data.chat import encode_prompt

    with pytest.raises(UserError, match="ChatML needs a tokenizer of affinage's"):
        encode_prompt([{"role": "user", "content": "Hello"}], imported[2].tokenizer, "")


_SAVED: dict[str, Tokenizer] = {}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    for name, make in (("bytes", byte_level), ("metaspace", metaspace)):
        folder = tmp_path_factory.mktemp(name)
        make().save_pretrained(folder)
        _SAVED[name] = Tokenizer.load(folder)
    return _SAVED


@given(st.text(alphabet="aé 🧀\n<|endoftext|>s/", max_size=20))
def test_text_comes_back_and_its_bytes_are_counted_once(tokenizers, text):
    tokenizer = tokenizers["bytes"]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and not set(ids) & {tokenizer.eos}
    assert tokenizer.byte_lengths(text, ids).sum() == len(text.encode())
    assert (tokenizer.byte_lengths(text, ids) >= 0).all() and len(tokenizer.byte_lengths(text, ids)) == len(ids)


def test_a_leading_space_survives_decoding_piece_by_piece(tokenizers):
    tokenizer = tokenizers["metaspace"]
    ids = tokenizer.encode("The capital of France")
    assert "".join(tokenizer.decode([token]) for token in ids) == " The capital of France"
    assert tokenizer.opening == (1,) and tokenizer.byte_lengths("où", tokenizer.encode("où")).sum() == 3


def test_training_on_with_it_is_refused_before_anything_runs(imported, tmp_path, capsys):
    from affinage.cli.program import main

    recipe = tmp_path / "recipe.yaml"
    folder = imported[2].name
    recipe.write_text((Path(folder) / "recipe.yaml").read_text().replace("init: .", f"init: {folder}"))
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "run",
                str(recipe),
                "--runs",
                str(tmp_path),
                "--set",
                "data.sources=[pocket-world]",
                "--set",
                "mesh.data=1",
            ]
        )
    assert ended.value.code == 2 and not (tmp_path / "store").exists()
    assert "training needs a tokenizer of affinage's: this one has other special tokens" in capsys.readouterr().err
