"""A model with a tokenizer of its own: it continues texts, is evaluated, trained further, fine-tuned and exported."""

import json

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from affinage.data.tokenizer import Tokenizer
from affinage.evaluation.run import JaxLM
from affinage.generation.engine import generate
from affinage.generation.sampling import SamplingParams
from affinage.hub.folder import CardFacts, export
from affinage.hub.verify import verify
from affinage.pipeline.opening import import_model, open_model
from run_affinage import run

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
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"max_position_embeddings": 128, "vocab_size": 352}
    if request.param == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 128, "vocab_size": 352}
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
    result = generate(ours, [ids], SamplingParams(20))[0]
    assert [token for token in result.tokens if token != end] == [token for token in expected if token != end]
    assert ours.tokenizer.stops == (tokenizer.eos_token_id,)
    lm = JaxLM(ours)  # as the harness is given it
    assert lm.tok_encode("The capital") == ids
    assert (lm.eot_token_id, lm.prefix_token_id) == (tokenizer.eos_token_id, tokenizer.bos_token_id)


def test_it_is_exported_with_its_tokenizer(imported, tmp_path):
    export(imported[2], tmp_path / "m", facts=CardFacts(license="apache-2.0"))
    assert verify(tmp_path / "m", imported[2], TEXTS[:2])["largest_logit_difference"] <= 1e-4


def test_a_leading_space_survives_decoding_piece_by_piece(tmp_path):
    metaspace().save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("The capital of France")
    assert "".join(tokenizer.decode([token]) for token in ids) == " The capital of France"
    assert tokenizer.opening == (1,) and tokenizer.byte_lengths("où", tokenizer.encode("où")).sum() == 3


def test_without_chat_tokens_it_is_not_fine_tuned(imported, tmp_path, capsys):
    (tmp_path / "turns.jsonl").write_text('{"prompt": "Où ?", "completion": "Ici."}\n' * 24)
    schedule = "{peak_lr: 1.0e-3, min_lr: 0}"
    sft = f"sft={{sources: [{tmp_path / 'turns.jsonl'}], steps: 1, batch_size: 4, schedule: {schedule}}}"
    settings = ("export=null", "mesh={data: 1}", "data=null", "pretrain=null", sft)
    run("run", f"{imported[2].name}/recipe.yaml", "--runs", tmp_path, settings=settings, status=2)
    assert "<|im_end|>" in capsys.readouterr().err
