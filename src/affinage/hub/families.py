"""The families of transformers that a graph can be read from and written as."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from affinage.errors import UserError
from affinage.hub.family_spec import REQUIRED, Decoder, FamilySpec, Key, Settings, TensorSpec
from affinage.model.graph import Graph, parse
from affinage.model.parameter import PyTree


class Architecture(NamedTuple):
    """What a config.json describes."""

    family: str  # its model_type
    model: dict[str, Any]  # the `model:` of a recipe
    context: int  # the longest input in tokens
    dtype: str  # of the weights in the files
    ignored: tuple[str, ...]  # keys that transformers does not know for this family, and so ignores


def _llama_keys(kv_heads: Any = REQUIRED, head_dim: Any = None, eps: float = 1e-6) -> tuple[Key, ...]:
    """The keys that all families of Llama's form share, with the defaults that differ."""
    return (
        Key("vocab_size", "embed.vocab"),
        Key("hidden_size", "embed.width"),
        Key("intermediate_size", "blocks.ffn.width"),
        Key("num_hidden_layers", "blocks.repeat"),
        Key("num_attention_heads", "blocks.attention.heads"),
        Key("num_key_value_heads", "blocks.attention.kv_heads", default=kv_heads),
        Key("head_dim", "blocks.attention.head_dim", default=head_dim),
        Key("rms_norm_eps", "blocks.norm.eps", "norm.eps", default=eps),
        Key("tie_word_embeddings", "logits.tied", default=False),
        Key("attention_dropout", "blocks.attention.dropout", default=0.0),
        Key("initializer_range", "blocks.init_std", "embed.init_std", "logits.init_std", default=0.02),
        Key("max_position_embeddings", "context"),
    )


_MIXTRAL_KEYS = (
    *_llama_keys(eps=1e-5),
    Key("sliding_window", "blocks.attention.window", default=None),
    Key("num_local_experts", "blocks.ffn.experts", default=8),
    Key("num_experts_per_tok", "blocks.ffn.top_k", default=2),
    Key("router_aux_loss_coef", "blocks.ffn.load_balance_weight", default=0.001),
)
_GPT2_KEYS = (
    Key("vocab_size", "embed.vocab"),
    Key("n_positions", "positions.length", "context"),
    Key("n_embd", "embed.width"),
    Key("n_layer", "blocks.repeat"),
    Key("n_head", "blocks.attention.heads"),
    Key("n_inner", "blocks.ffn.width", default=None),
    Key("layer_norm_epsilon", "blocks.norm.eps", "norm.eps", default=1e-5),
    Key("resid_pdrop", "blocks.dropout", default=0.1),
    Key("embd_pdrop", "drop.rate", default=0.1),
    Key("attn_pdrop", "blocks.attention.dropout", default=0.1),
    Key(
        "initializer_range", *(f"{role}.init_std" for role in ("blocks", "embed", "positions", "logits")), default=0.02
    ),
)


def _linear(module: str, inputs: int = 1) -> TensorSpec:
    return TensorSpec(f"model.layers.{{layer}}.{module}.weight", inputs, transposed=True)


def _vectors(ours: str, theirs: str) -> dict[str, TensorSpec]:
    """The scale and the bias of a layer norm."""
    return {f"{ours}.scale": TensorSpec(f"{theirs}.weight"), f"{ours}.bias": TensorSpec(f"{theirs}.bias")}


def _conv(ours: str, theirs: str, inputs: int = 1, part: int | None = None) -> dict[str, TensorSpec]:
    """The kernel and the bias of GPT-2's Conv1D, which stores [inputs, outputs]."""
    name = f"transformer.h.{{layer}}.{theirs}"
    kernel, bias = TensorSpec(f"{name}.weight", inputs, part=part), TensorSpec(f"{name}.bias", part=part)
    return {f"blocks.{ours}.kernel": kernel, f"blocks.{ours}.bias": bias}


_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
_LLAMA_TENSORS: dict[str, TensorSpec] = {
    "embed.embedding": TensorSpec("model.embed_tokens.weight", 1),
    "norm.scale": TensorSpec("model.norm.weight"),
    "logits.kernel": TensorSpec("lm_head.weight", 1),
    "blocks.attention_norm.scale": TensorSpec("model.layers.{layer}.input_layernorm.weight"),
    "blocks.ffn_norm.scale": TensorSpec("model.layers.{layer}.post_attention_layernorm.weight"),
    "blocks.attention.query_norm.scale": TensorSpec("model.layers.{layer}.self_attn.q_norm.weight"),
    "blocks.attention.key_norm.scale": TensorSpec("model.layers.{layer}.self_attn.k_norm.weight"),
}
for _ours, _theirs in _ATTENTION.items():
    _place = f"blocks.attention.{_ours}"
    _LLAMA_TENSORS[f"{_place}.kernel"] = _linear(f"self_attn.{_theirs}", 2 if _ours == "out" else 1)
    _LLAMA_TENSORS[f"{_place}.bias"] = TensorSpec(f"model.layers.{{layer}}.self_attn.{_theirs}.bias")
_MIXTRAL_TENSORS = _LLAMA_TENSORS | {"blocks.ffn.router.kernel": _linear("block_sparse_moe.gate")}
for _ours, _theirs in {"gate": "w1", "down": "w2", "up": "w3"}.items():
    _LLAMA_TENSORS[f"blocks.ffn.{_ours}.kernel"] = _linear(f"mlp.{_ours}_proj")
    _MIXTRAL_TENSORS[f"blocks.ffn.{_ours}.kernel"] = _linear(f"block_sparse_moe.experts.{{expert}}.{_theirs}")
_GPT2_TENSORS: dict[str, TensorSpec] = {
    "embed.embedding": TensorSpec("transformer.wte.weight", 1),
    "positions.embedding": TensorSpec("transformer.wpe.weight", 1),
    **_vectors("norm", "transformer.ln_f"),
    **_vectors("blocks.attention_norm", "transformer.h.{layer}.ln_1"),
    **_vectors("blocks.ffn_norm", "transformer.h.{layer}.ln_2"),
    **_conv("attention.query", "attn.c_attn", part=0),
    **_conv("attention.key", "attn.c_attn", part=1),
    **_conv("attention.value", "attn.c_attn", part=2),
    **_conv("attention.out", "attn.c_proj", inputs=2),
    **_conv("ffn.up", "mlp.c_fc"),
    **_conv("ffn.down", "mlp.c_proj"),
}

_RMS: Settings = {"blocks.norm.kind": "rms", "norm.kind": "rms_norm"}
_SWIGLU: Settings = _RMS | {"blocks.ffn.kind": "swiglu"}
_GPT2: Settings = {"blocks.norm.kind": "layer", "norm.kind": "layer_norm", "logits.tied": True}
_GPT2 |= {"blocks.attention.bias": True, "blocks.ffn.kind": "gelu", "blocks.ffn.bias": True}
_LLAMA_FIXED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (None, 1.0)}
_QWEN_FIXED = _LLAMA_FIXED | {"use_sliding_window": (False,)}
_GPT2_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}

_SPECS = (
    FamilySpec(
        "llama",
        "LlamaForCausalLM",
        (
            *_llama_keys(kv_heads=None),
            Key("attention_bias", "blocks.attention.bias", default=False, values=(False, True)),
        ),
        _SWIGLU,
        _LLAMA_TENSORS,
        _LLAMA_FIXED | {"mlp_bias": (False,), "pretraining_tp": (1,)},
    ),
    FamilySpec(
        "mistral",
        "MistralForCausalLM",
        (*_llama_keys(), Key("sliding_window", "blocks.attention.window", default=4096, nullable=True)),
        _SWIGLU,
        _LLAMA_TENSORS,
        _LLAMA_FIXED,
    ),
    FamilySpec(
        "qwen2",
        "Qwen2ForCausalLM",
        _llama_keys(),
        _SWIGLU | {"blocks.attention.bias": "qkv"},
        _LLAMA_TENSORS,
        _QWEN_FIXED,
    ),
    FamilySpec(
        "qwen3",
        "Qwen3ForCausalLM",
        _llama_keys(head_dim=128),
        _SWIGLU | {"blocks.attention.qk_norm": True},
        _LLAMA_TENSORS,
        _QWEN_FIXED | {"attention_bias": (False,)},
    ),
    FamilySpec(
        "mixtral",
        "MixtralForCausalLM",
        _MIXTRAL_KEYS,
        # Its loss has no z-term, so training it further has none either.
        _RMS | {"blocks.ffn.kind": "moe", "blocks.ffn.z_loss_weight": 0.0},
        _MIXTRAL_TENSORS,
        _LLAMA_FIXED | {"router_jitter_noise": (0.0,)},
        rope_theta=1e6,
    ),
    FamilySpec("gpt2", "GPT2LMHeadModel", _GPT2_KEYS, _GPT2, _GPT2_TENSORS, _GPT2_FIXED, rope_theta=None),
)
FAMILIES = {family.model_type: family for family in _SPECS}


def family_of(graph: Graph) -> FamilySpec:
    """The family that computes a graph. Raises UserError that names what no family of transformers has."""
    settings = Decoder.of(graph).settings()
    family, differences = min(((each, each.differences(settings)) for each in _SPECS), key=lambda pair: len(pair[1]))
    if differences:
        listed = ", ".join(f"{path}: {ours} (not {theirs})" for path, (ours, theirs) in list(differences.items())[:4])
        raise UserError(f"the model is of no family of transformers; as a {family.model_type} it differs in {listed}")
    return family


def architecture_of(values: Mapping[str, Any], where: str) -> Architecture:
    """Read a config.json of one of `FAMILIES`; where it has no value, transformers' default holds.

    Raises:
        UserError: another family, or a value that the graph would not compute with.
    """
    if values.get("auto_map"):
        fix = "Import a version of the model in transformers' own form."
        raise UserError("this model brings code of its own, and nothing that is loaded may run", where=where, fix=fix)
    if values.get("quantization_config"):
        raise UserError("its weights are quantized", where=where, fix="Import the model it was made from.")
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        fix = f"There are: {', '.join(FAMILIES)}."
        raise UserError(f"`model_type: {values.get('model_type')}` is not a known family", where=where, fix=fix)
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"`dtype: {dtype}` is not a dtype of weights", where=where, fix="Use float32 or bfloat16.")
    context, model = family.from_config(values, where)
    return Architecture(family.model_type, model, context, dtype, family.unknown(values))


def with_ids(graph: Graph, params: PyTree, ids: Sequence[int]) -> tuple[Graph, PyTree]:
    """Return the model with rows for new ids, each the mean of those below the first of them.

    A vocabulary that is padded that far stays as large as it is. A token that was never seen is then no likelier than
    the others (Hewitt, Initializing new word embeddings, 2021).
    """
    if not ids:
        return graph, params
    size, written, changed = max(graph.vocabulary, max(ids) + 1), graph.to_dict(), {**params}

    def grown(rows: Float[np.ndarray, "V D"]) -> Float[np.ndarray, "W D"]:
        old = np.asarray(rows)
        new = np.concatenate([old, np.zeros((size - len(old), old.shape[1]), old.dtype)])
        new[list(ids)] = old[: min(ids)].mean(axis=0, dtype=np.float64)
        return new

    for name in (Decoder.of(graph).nodes[role].name for role in ("embed", "logits")):
        settings: dict[str, Any] = written["nodes"][name]
        settings |= {"vocab": size} if "vocab" in settings else {}
        if name in params:
            changed[name] = {leaf: grown(rows) for leaf, rows in params[name].items()}
    return parse(written), changed
