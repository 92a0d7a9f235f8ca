"""One step of fine-tuning and of DPO on packed rows, against transformers and torch on the conversations one by one.

The same weights (through the export's layout), float32: per-token masks, loss and the gradient of every weight.
"""

import copy

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

import tiny_graphs
from affinage.config.training import DpoSettings, LoraSettings, SftSettings
from affinage.data.dataloader import REFERENCE, DataLoader
from affinage.data.tuning_data import documents_in_a_row, prepare_tuning_data
from affinage.hub.families import family_of
from affinage.hub.folder import adapter_tensors, write_adapter, write_hf_tokenizer
from affinage.model import Adapters, ApplyConfig, apply, init_params
from affinage.model.graph import ANSWERS, parse, preference_graph
from affinage.training.state import TrainState, split_params
from affinage.training.trainer import optimizer_of, step_of
from source_forms import write_lines
from tiny_models import CONTEXT, VOCABULARY, in_transformers, model_of, tiny_llama, tokenizer

COMMON = {"steps": 1, "batch_size": 4, "schedule": {"peak_lr": 1e-3, "min_lr": 0}, "validation_fraction": 0}
COMMON["system_prompt"] = "Be kind."
TALKS = [
    [("user", "Où est Paris ?"), ("assistant", "En France."), ("user", "Yen?"), ("assistant", "The yen is Japan's.")],
    [("user", "Twelve plus seven?"), ("assistant", "Nineteen.")],
    [("system", "Réponds."), ("user", "Noël ?"), ("assistant", "L'école où naître.")],
    [("user", "Who?"), ("assistant", "The capital of France.")],
]
TALKS = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in TALKS]
PAIRS = [("Capital?", "It is Paris.", "Yen."), ("Sept ?", "Dix-neuf sont dix.", "Où ça, élève ?"), ("Yen?", "Y.", "N.")]
PAIRS = [dict(zip(("prompt", "chosen", "rejected"), pair)) for pair in PAIRS]


@pytest.fixture(scope="module")
def llama():
    """(our model, the same weights in transformers)."""
    ours = tiny_llama(layers=2)
    return ours, in_transformers(ours.graph, ours.params)


@pytest.fixture(scope="module")
def hf_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_hf_tokenizer(tokenizer(), folder, context=CONTEXT, system_prompt="Be kind.")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def rendered(hf_tokenizer, said):
    """Ids of a conversation by the exported chat template, and which are the assistant's by the characters."""
    text = hf_tokenizer.apply_chat_template(said, tokenize=False)
    encoded = hf_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans, place = [], 0
    for message in said:
        head = f"<|im_start|>{message['role']}\n"
        start = text.index(head + message["content"] + "<|im_end|>", place) + len(head)
        place = start + len(message["content"]) + len("<|im_end|>")
        if message["role"] == "assistant":
            spans.append((start, place))
    trained = [any(a <= start and end <= b for a, b in spans) for start, end in encoded["offset_mapping"]]
    return encoded["input_ids"], np.array(trained)


def log_probabilities(model, ids, trained):
    logits = model(torch.tensor([ids])).logits[0, :-1]
    found = F.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return found[torch.tensor(trained[1:])]


def assert_near(found, expected):
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4 * np.abs(array).max(), err_msg=name)


def assert_same_gradients(ours, theirs, graph):
    expected = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert_near(family_of(graph).to_tensors(jax.device_get(ours), graph), expected)


def prepared(kind, said, folder, **told):
    """The settings of a fine-tuning on these conversations or pairs, and all of their rows in one batch."""
    settings = kind.model_validate({**COMMON, "sources": [str(write_lines(folder / "said.jsonl", said))], **told})
    rows = {"seq_len": CONTEXT if kind is SftSettings else 2 * CONTEXT, "system_prompt": "Be kind."}
    summary = prepare_tuning_data(settings, tokenizer(), folder / "rows", **rows)
    return settings, DataLoader(folder / "rows/train", seed=0, batch=summary["train"]["rows"]).batch(0)


def test_one_step_of_fine_tuning(llama, hf_tokenizer, tmp_path):
    ours, theirs = llama
    _, batch = prepared(SftSettings, TALKS, tmp_path)
    assert len(batch["tokens"]) < len(TALKS)  # some share a row
    expected = [rendered(hf_tokenizer, talk["messages"]) for talk in TALKS]

    def loss(params):
        return apply(ours.graph, params, batch, ApplyConfig()).values[ours.graph.loss].mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(ours.params)
    theirs.zero_grad()
    torch_loss = -torch.cat([log_probabilities(theirs, *each) for each in expected]).mean()
    torch_loss.backward()
    assert float(value) == pytest.approx(torch_loss.item(), rel=1e-4)
    assert_same_gradients(gradients, theirs, ours.graph)


@pytest.mark.parametrize("chunk", [pytest.param("auto", marks=pytest.mark.full), 7])
def test_loss_gradients_and_metrics_are_those_of_trls_trainer(llama, hf_tokenizer, tmp_path, chunk):
    """TRL's own trainer computes the loss of the same documents, one to a row, against a reference that it holds."""
    ours, theirs = llama
    settings, batch = prepared(DpoSettings, PAIRS, tmp_path, beta=0.3)
    model = ours.graph.to_dict()
    model["nodes"][ours.graph.loss] |= {"chunk": chunk}
    graph = preference_graph(parse(model), settings, documents_in_a_row(tmp_path / "rows"))
    reference = jax.tree.map(lambda leaf: 0.9 * leaf, ours.params)
    answers = apply(graph, reference, batch, ApplyConfig(until=ANSWERS)).values[ANSWERS]

    def mean(params):
        outputs = apply(graph, params, {**batch, REFERENCE: answers[..., 0]}, ApplyConfig())
        return outputs.values[graph.loss].mean(), outputs.metrics

    (value, metrics), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(ours.params)

    before = in_transformers(ours.graph, reference)
    told = {"beta": 0.3, "report_to": "none", "use_cpu": True, "bf16": False}
    config = DPOConfig(output_dir=str(tmp_path / "trl"), **told)
    said = {"train_dataset": Dataset.from_list(PAIRS), "processing_class": hf_tokenizer}
    trainer = DPOTrainer(copy.deepcopy(theirs), before, config, **said)
    trainer.model.eval()  # no dropout; the metrics go by the mode
    trained_loss = trainer.compute_loss(trainer.model, documents(batch))
    trained_loss.backward()
    assert float(value) == pytest.approx(trained_loss.item(), rel=1e-4)
    assert_same_gradients(gradients, trainer.model, ours.graph)
    trainer.log({})
    expected = {name.removeprefix("eval_"): value for name, value in trainer.state.log_history[-1].items()}
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    assert {"rewards/margins", "logps/rejected"} < means.keys() <= expected.keys()
    assert means == pytest.approx({name: expected[name] for name in means}, rel=1e-4, abs=1e-5)


def documents(batch):
    """All chosen documents of a batch and then all rejected ones, one to a row, as TRL collates them."""
    sides = ([], [])
    for row, mask, ids in zip(batch["tokens"], batch["loss_mask"], batch["segment_ids"]):
        for number in sorted(set(ids.tolist())):
            inside = (ids == number) & (row != 0)
            if inside.any():
                sides[(number - ids.min()) % 2].append((row[inside], np.ones(inside.sum()), mask[inside]))
    both = [*sides[0], *sides[1]]
    filled = np.zeros((3, len(both), max(len(tokens) for tokens, *_ in both)), np.int64)
    for index, document in enumerate(both):
        filled[:, index, : len(document[0])] = np.stack(document)
    return dict(zip(("input_ids", "attention_mask", "completion_mask"), map(torch.tensor, filled)))


TARGETS = ("query", "value", "out", "gate", "down")
LORA = LoraSettings(r=3, alpha=7, target_modules=TARGETS)
RATE = 1e-2


def drawn(adapters):
    """A and B, as if they had been trained."""
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(adapters, jax.random.key(0)))
    return jax.tree.map(lambda p: draw.normal(0, 0.1, p.shape).astype(np.float32), shapes)


def in_peft(base, adapters, params):
    """The same adapters beside the same weights, and its parameters that are trained by our names."""
    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=LORA.r, lora_alpha=LORA.alpha, target_modules=modules, task_type="CAUSAL_LM")
    model = get_peft_model(in_transformers(base.graph, base.params), config)
    ours = adapter_tensors(adapters, params).items()
    tensors = {name.replace(".weight", ".default.weight"): torch.tensor(array) for name, array in ours}
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys and not any("lora" in name for name in missing.missing_keys)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return model, {name.replace(".default.weight", ".weight"): p for name, p in trained.items()}


def batch():
    draw = np.random.default_rng(1)
    tokens = draw.integers(10, VOCABULARY, (4, 24)).astype(np.int32)
    return {"tokens": tokens, "loss_mask": (draw.random((4, 24)) < 0.6).astype(np.float32)}


def torch_loss(model):
    rows = zip(batch()["tokens"].tolist(), batch()["loss_mask"] > 0, strict=True)
    return -torch.cat([log_probabilities(model, ids, trained) for ids, trained in rows]).mean()


def test_loss_gradients_and_one_update():
    ours = tiny_llama(layers=2)
    adapters = Adapters(ours.graph, LORA)
    params = drawn(adapters)
    peft_model, trained = in_peft(ours, adapters, params)
    how = {"schedule": {"name": "constant", "peak_lr": RATE, "min_lr": RATE}, "lora": LORA.model_dump()}
    how |= {"optimizer": {"max_grad_norm": 0.5, "weight_decay": 0.1}, "sources": ["none"]}
    settings = SftSettings.model_validate(COMMON | how)
    split = split_params(ours.graph, settings)
    optimizer = optimizer_of(split, settings)

    def loss(low):
        return apply(ours.graph, adapters.beside(ours.params, low), batch(), ApplyConfig()).values["loss"].mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    expected = torch_loss(peft_model)
    peft_model.zero_grad()
    expected.backward()
    assert float(value) == pytest.approx(expected.item(), rel=1e-4)
    expected = {name: p.grad.numpy() for name, p in trained.items()}
    assert_near(adapter_tensors(adapters, jax.device_get(gradients)), expected)

    state = TrainState(np.int32(0), params, optimizer.init(params), frozen=ours.params)
    new, metrics = jax.jit(step_of(split, settings, ApplyConfig(), seed=0))(state, batch())
    adamw = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
    adamw.step()
    assert float(metrics["grad_norm"]) == pytest.approx(norm.item(), rel=1e-4) and norm.item() > 0.5
    expected = {name: p.detach().numpy() for name, p in trained.items()}
    assert_near(adapter_tensors(adapters, jax.device_get(new.params)), expected)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_an_exported_adapter_is_read_by_peft_and_gives_the_merged_models_logits(name, tmp_path):
    ours, targets = tiny_llama(layers=2), TARGETS
    if name == "mixtral":
        mapping = tiny_graphs.moe(vocabulary=VOCABULARY, attention={"kv_heads": 2}, z_loss_weight=0.0)
        ours, targets = model_of(mapping), ("query", "value")
    adapters = Adapters(ours.graph, LoraSettings(r=3, alpha=7, target_modules=targets))
    params = drawn(adapters)
    in_transformers(ours.graph, ours.params).save_pretrained(tmp_path / "base")
    write_adapter(tmp_path / "adapter", adapters, params, base=str(tmp_path / "base"))
    read = PeftModel.from_pretrained(in_transformers(ours.graph, ours.params), tmp_path / "adapter").eval()
    by_itself = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    ids = torch.tensor(batch()["tokens"], dtype=torch.long)
    with torch.no_grad():
        found, of_base = read(ids).logits, in_transformers(ours.graph, ours.params)(ids).logits
        expected = in_transformers(ours.graph, adapters.merged(ours.params, params))(ids).logits
        others = by_itself(ids).logits, read.merge_and_unload()(ids).logits
    scale = expected.abs().max().item()
    assert (expected - of_base).abs().max() > 0.02 * scale
    for logits in (found, *others):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * scale)
