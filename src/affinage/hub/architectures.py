"""From a config.json to the `model:` of a recipe: exactly what it says, or a refusal that names what is in the way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from affinage.errors import UserError
from affinage.hub.hf_config import HfConfig

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Architecture:
    """What a config.json describes."""

    family: str  # its model_type
    model: dict[str, Any]  # the `model:` of a recipe
    context: int  # tokens a row may have
    dtype: str  # of the weights in the files


def architecture_of(values: Mapping[str, Any], where: str) -> Architecture:
    """Read a config.json of Llama, Mistral, Mixtral, Qwen 2, Qwen 3 or GPT-2.

    Where it is silent, transformers' defaults hold.

    Raises:
        UserError: for other families, and for every value that the graph would not compute with.
    """
    family = str(values.get("model_type"))
    if values.get("auto_map"):
        raise UserError("this model brings code of its own, and nothing that is loaded may run", where=where)
    if values.get("quantization_config"):
        raise UserError("its weights are quantised", where=where, fix="Import the model it was made from.")
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UserError(f"`model_type: {family}` is not a known family", where=where, fix=f"There are: {known}.")
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UserError(f"`dtype: {dtype}` is not a dtype of weights", where=where)
    config = HfConfig(values, where)
    context, nodes = _FAMILIES[family](config)
    config.finish()
    return Architecture(family, {"inputs": ["tokens"], "nodes": nodes}, context, dtype)


def _llama_family(config: HfConfig) -> tuple[int, dict[str, Any]]:
    family = config.get("model_type")
    width, std = config.need("hidden_size"), config.get("initializer_range", 0.02)
    context = config.need("max_position_embeddings")
    config.expect("hidden_act", "silu", default="silu")
    config.expect("mlp_bias", False, default=False)
    config.expect("pretraining_tp", 1, default=1)
    eps = config.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6)
    heads = config.need("num_attention_heads")
    attention: dict[str, Any] = {
        "heads": heads,
        "kv_heads": _kv_heads(config, family, heads),
        "head_dim": config.get("head_dim") or (128 if family == "qwen3" else width // heads),
        "rope": _rope(config, theta=1e6 if family == "mixtral" else 1e4),
        "dropout": config.get("attention_dropout", 0.0),
        **_FORMS[family](config),
    }
    block = {
        "kind": "transformer_block",
        "in": "embed",
        "repeat": config.need("num_hidden_layers"),
        "attention": attention,
        "ffn": _experts(config) if family == "mixtral" else _feed_forward(config),
        "norm": {"kind": "rms", "eps": eps},
        "init_std": std,
    }
    embed = {"kind": "embedding", "in": "tokens", "vocab": config.need("vocab_size"), "width": width, "init_std": std}
    tied = bool(config.get("tie_word_embeddings", False))
    return context, {
        "embed": embed,
        "blocks": block,
        "norm": {"kind": "rms_norm", "in": "blocks", "eps": eps},
        "logits": {"kind": "unembed", "in": "norm", "tied": tied, "init_std": std},
        "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
    }


def _feed_forward(config: HfConfig) -> dict[str, Any]:
    return {"kind": "swiglu", "width": config.need("intermediate_size")}


def _experts(config: HfConfig) -> dict[str, Any]:
    """Dropless, with gates that add up to 1. Their loss has no z-term, so training it further has none either."""
    config.expect("router_jitter_noise", 0.0, default=0.0)
    config.get("output_router_logits")  # whether the balance is reported
    return {
        "kind": "moe",
        "experts": config.get("num_local_experts", 8),
        "top_k": config.get("num_experts_per_tok", 2),
        "width": config.need("intermediate_size"),
        "load_balance_weight": config.get("router_aux_loss_coef", 0.001),
        "z_loss_weight": 0.0,
    }


def _kv_heads(config: HfConfig, family: str, heads: int) -> int:
    """Absent, it is the number of heads for Llama, and a number of its own for the others."""
    value = config.get("num_key_value_heads")
    if value is None and family != "llama":
        return int(config.need("num_key_value_heads"))
    return int(value or heads)


def _llama(config: HfConfig) -> dict[str, Any]:
    return {"bias": bool(config.get("attention_bias", False))}


def _mistral(config: HfConfig) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)  # explicit null: none
    _same_layers(config, "sliding_attention" if window else "full_attention")
    return {"window": window}


def _mixtral(config: HfConfig) -> dict[str, Any]:
    return {"window": config.get("sliding_window")}


def _qwen2(config: HfConfig) -> dict[str, Any]:
    _no_window(config)
    return {"bias": "qkv"}


def _qwen3(config: HfConfig) -> dict[str, Any]:
    _no_window(config)
    config.expect("attention_bias", False, default=False)
    return {"qk_norm": True}


_FORMS: dict[str, Callable[[HfConfig], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _no_window(config: HfConfig) -> None:
    config.expect("use_sliding_window", False, default=False)
    config.get("sliding_window")  # without effect, as it is not used
    _same_layers(config, "full_attention")


def _same_layers(config: HfConfig, kind: str) -> None:
    layers = config.get("layer_types")
    if layers is not None and set(layers) != {kind}:
        raise config.refused("layer_types", layers)


def _rope(config: HfConfig, *, theta: float) -> dict[str, Any]:
    """Transformers 5 writes rope_parameters, transformers 4 rope_theta and rope_scaling; files may have both.

    `theta` holds where a file has neither.
    """
    older = dict(config.get("rope_scaling") or {})
    given = dict(config.get("rope_parameters") or older)
    thetas = {float(theta) for theta in (config.get("rope_theta"), given.pop("rope_theta", None)) if theta is not None}
    if len(thetas) > 1:
        raise config.refused("rope_theta", " and ".join(map(str, sorted(thetas))))
    kind = given.pop("rope_type", None) or given.pop("type", "default")
    given.pop("type", None)
    config.expect("partial_rotary_factor", None, 1.0)
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise config.refused("partial_rotary_factor", "less than 1")
    rope: dict[str, Any] = {"theta": thetas.pop() if thetas else theta}
    if kind not in _SCALINGS:
        raise config.refused("rope_type", kind)
    names = _SCALINGS[kind]
    if set(given) != set(names.values()):
        raise config.refused("rope_parameters", given)
    if names:
        rope["scaling"] = {"kind": kind, **{ours: given[theirs] for ours, theirs in names.items()}}
    return rope


_SCALINGS: dict[str, dict[str, str]] = {  # our name of each setting -> transformers'
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_frequency": "low_freq_factor",
        "high_frequency": "high_freq_factor",
        "original_context": "original_max_position_embeddings",
    },
}


def _gpt2(config: HfConfig) -> tuple[int, dict[str, Any]]:
    width, std = config.need("n_embd"), config.get("initializer_range", 0.02)
    context = config.need("n_positions")
    config.expect("n_ctx", None, context)
    config.expect("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
    config.expect("scale_attn_weights", True, default=True)
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        config.expect(key, False, default=False)
    config.expect("tie_word_embeddings", True, default=True)
    norm = {"eps": config.get("layer_norm_epsilon", 1e-5)}
    dropped = config.get("embd_pdrop", 0.1)
    block = {
        "kind": "transformer_block",
        "in": "drop" if dropped else "positions",
        "repeat": config.need("n_layer"),
        "attention": {"heads": config.need("n_head"), "bias": True, "dropout": config.get("attn_pdrop", 0.1)},
        "ffn": {"kind": "gelu", "width": config.get("n_inner") or 4 * width, "bias": True},
        "norm": {"kind": "layer", **norm},
        "dropout": config.get("resid_pdrop", 0.1),
        "init_std": std,
    }
    embed = {"kind": "embedding", "in": "tokens", "vocab": config.need("vocab_size"), "width": width, "init_std": std}
    drop = {"drop": {"kind": "dropout", "in": "positions", "rate": dropped}} if dropped else {}
    return context, {
        "embed": embed,
        "positions": {"kind": "learned_positions", "in": "embed", "length": context, "init_std": std},
        **drop,
        "blocks": block,
        "norm": {"kind": "layer_norm", "in": "blocks", **norm},
        "logits": {"kind": "unembed", "in": "norm", "tied": True, "init_std": std},
        "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
    }


_FAMILIES: dict[str, Callable[[HfConfig], tuple[int, dict[str, Any]]]] = {
    **dict.fromkeys(_FORMS, _llama_family),
    "gpt2": _gpt2,
}
