"""Small models with random weights and a real tokenizer, for tests of everything that comes after training."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np

import tiny_graphs
from affinage.config.data import TokenizerSettings
from affinage.data.tokenizer import FILE, Tokenizer
from affinage.data.tokenizer_training import bpe_json, train_bpe
from affinage.generation.engine import LoadedModel, logits_of
from affinage.hub.families import family_of
from affinage.model.forward import init_params
from affinage.model.graph import parse

CONTEXT = 96
VOCABULARY = 420
FIRST_PIECE = 266  # after the ten fixed ids and the 256 bytes
GROUPED = {"kv_heads": 2}
LLAMA = tiny_graphs.llama(layers=1, vocabulary=VOCABULARY, attention=GROUPED)

_TEXT = [
    "The capital of France is Paris, and the currency of Japan is the yen.",
    "La capitale de la France est Paris, et la monnaie du Japon est le yen.",
    "Twelve plus seven makes nineteen; douze plus sept font dix-neuf.",
    "An élève à l'école où naître être garçon, œuvre, Noël, aigu, où ça ?",
]
_FOLDER = TemporaryDirectory(prefix="affinage-test-")


@lru_cache
def tokenizer() -> Tokenizer:
    """A SentencePiece model of 420 pieces, trained on four sentences."""
    folder = Path(_FOLDER.name)
    settings = TokenizerSettings(vocab_size=VOCABULARY, character_coverage=1.0)
    (folder / FILE).write_bytes(bpe_json(train_bpe(_TEXT * 20, settings)))
    return Tokenizer(folder)


def model_of(mapping, seed: int = 0) -> LoadedModel:
    """A model of random weights with the tokenizer."""
    graph = parse(mapping)
    params = jax.jit(partial(init_params, graph))(jax.random.key(seed))  # jitted, it compiles once, not for each weight
    return LoadedModel(graph, params, tokenizer(), "tiny", CONTEXT)


@lru_cache
def tiny_llama(seed: int = 0, scale: float = 6.0, layers: int = 1) -> LoadedModel:
    """Layers of width 32 with grouped queries. Weights are scaled up, so that the most likely token varies.

    What is compared with another implementation takes two layers: of one alone, no order can be wrong. The logits of
    control tokens and of single bytes are 0, so that it says text, if not sense.
    """
    model = model_of(tiny_graphs.llama(layers=layers, vocabulary=VOCABULARY, attention=GROUPED), seed)
    params = jax.tree.map(lambda p: p * scale if p.ndim > 1 else p, model.params)
    params["logits"]["kernel"] *= (jnp.arange(VOCABULARY) >= FIRST_PIECE)[:, None]
    return replace(model, params=params)


@partial(jax.jit, static_argnames="graph")
def _all_logits(graph, params, row):
    return logits_of((graph, "float32", None), params, {"tokens": row})[0].array()


def full_logits(model: LoadedModel, tokens: Sequence[int]) -> np.ndarray:
    """Logits [tokens, vocabulary] by the full forward pass over one row."""
    row = np.zeros((1, CONTEXT), np.int32)  # padded to one shape: what follows a token cannot change its logits
    row[0, : len(tokens)] = tokens
    return np.asarray(_all_logits(model.graph, model.params, row))[0, : len(tokens)]


ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content']|trim + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def with_template(template: str | None, system_prompt: str) -> LoadedModel:
    """`tiny_llama`, talked to in a chat template of its own."""
    return replace(tiny_llama(), tokenizer=Tokenizer(tokenizer().folder, template), system_prompt=system_prompt)


def fused_experts(tensors):
    """Mixtral's files have a tensor for each expert; transformers 5 holds them in one and calls the layer `mlp`."""
    merged, experts = {}, {}
    for name, array in tensors.items():
        layer, found, rest = name.replace(".block_sparse_moe.", ".mlp.").partition(".experts.")
        if found:
            experts.setdefault(layer + found, {})[rest] = np.array(array)
        else:
            merged[layer] = np.array(array)
    for prefix, arrays in experts.items():
        numbers = range(len(arrays) // 3)
        w1, w2, w3 = (np.stack([arrays[f"{e}.{w}.weight"] for e in numbers]) for w in ("w1", "w2", "w3"))
        merged |= {f"{prefix}gate_up_proj": np.concatenate([w1, w3], axis=1), f"{prefix}down_proj": w2}
    return merged


def in_transformers(graph, params, context: int = CONTEXT):
    """The same model with the same weights in transformers, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = family_of(graph)
    config = family.to_config(graph, context=context)
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = fused_experts(family.to_tensors(jax.device_get(params), graph))
    missing = model.load_state_dict({name: torch.tensor(array) for name, array in tensors.items()}, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.float().eval()
