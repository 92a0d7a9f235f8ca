"""Adapters against PEFT: the same weights, A, B and batch give the same loss, gradients, update and logits."""

import jax
import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

from affinage.config.training import LoraSettings, SftSettings
from affinage.hub.folder import adapter_tensors, write_adapter
from affinage.model import Adapters, ApplyConfig, apply, init_params
from affinage.training.state import TrainState, split_params
from affinage.training.trainer import optimizer_of, step_of
from tiny_models import VOCABULARY, in_transformers, tiny_llama, tiny_mixtral

TARGETS = ("query", "value", "out", "gate", "down")
LORA = LoraSettings(r=3, alpha=7, target_modules=TARGETS)
RATE = 1e-2


def two_layers():
    return tiny_llama(layers=2)


def drawn(adapters):
    """A and B, as if they had been trained."""
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(adapters, jax.random.key(0)))
    return jax.tree.map(lambda p: draw.normal(0, 0.1, p.shape).astype(np.float32), shapes)


def in_peft(ours, adapters, params):
    """The same adapters beside the same weights."""
    modules = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=LORA.r, lora_alpha=LORA.alpha, target_modules=modules, task_type="CAUSAL_LM")
    model = get_peft_model(in_transformers(ours.graph, ours.params), config)
    tensors = {
        name.replace(".weight", ".default.weight"): torch.tensor(array)
        for name, array in adapter_tensors(adapters, params).items()
    }
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys and not any("lora" in name for name in missing.missing_keys)
    return model


def batch():
    draw = np.random.default_rng(1)
    tokens = draw.integers(10, VOCABULARY, (4, 24)).astype(np.int32)
    return {"tokens": tokens, "loss_mask": (draw.random((4, 24)) < 0.6).astype(np.float32)}


def torch_loss(model):
    ids, mask = torch.tensor(batch()["tokens"], dtype=torch.long), torch.tensor(batch()["loss_mask"])[:, 1:]
    found = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    return -(found * mask).sum() / mask.sum()


def assert_same(ours, theirs, adapters):
    for name, array in adapter_tensors(adapters, jax.device_get(ours)).items():
        expected = theirs[name.replace(".weight", ".default.weight")]
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def test_loss_gradients_and_one_update():
    ours = two_layers()
    adapters = Adapters(ours.graph, LORA)
    params = drawn(adapters)
    peft_model = in_peft(ours, adapters, params)
    settings = SftSettings.model_validate(
        {
            "steps": 1,
            "batch_size": 4,
            "sources": ["none"],
            "lora": LORA.model_dump(),
            "schedule": {"name": "constant", "peak_lr": RATE, "min_lr": RATE},
            "optimizer": {"max_grad_norm": 0.5, "weight_decay": 0.1},
        }
    )
    split = split_params(ours.graph, settings)
    optimizer = optimizer_of(split, settings)

    def loss(low):
        return apply(ours.graph, adapters.beside(ours.params, low), batch(), ApplyConfig()).values["loss"].mean()

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    expected = torch_loss(peft_model)
    peft_model.zero_grad()
    expected.backward()
    trained = {name: p for name, p in peft_model.named_parameters() if p.requires_grad}
    assert float(value) == pytest.approx(expected.item(), rel=1e-4)
    assert_same(gradients, {name: p.grad.numpy() for name, p in trained.items()}, adapters)

    state = TrainState(np.int32(0), params, optimizer.init(params), frozen=ours.params)
    new, metrics = jax.jit(step_of(split, settings, ApplyConfig(), seed=0))(state, batch())
    adamw = torch.optim.AdamW(trained.values(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
    adamw.step()
    assert float(metrics["grad_norm"]) == pytest.approx(norm.item(), rel=1e-4) and norm.item() > 0.5
    assert_same(new.params, {name: p.detach().numpy() for name, p in trained.items()}, adapters)


@pytest.mark.parametrize(("make", "targets"), [(two_layers, TARGETS), (tiny_mixtral, ("query", "value"))])
def test_an_exported_adapter_is_read_by_peft_and_gives_the_merged_models_logits(make, targets, tmp_path):
    ours = make()
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
