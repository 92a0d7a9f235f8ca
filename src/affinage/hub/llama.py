"""Weights and configuration of the Llama family: Llama, Mistral, Mixtral, Qwen 2 and 3, by what the graph says.

Our kernels are [inputs, outputs] with heads as an axis of their own, theirs nn.Linear's [outputs, inputs]. The rotary
layout is the same, see `affinage.model.kinds.rotary`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from affinage.errors import UserError
from affinage.hub.decoder import Decoder
from affinage.model.graph import Graph
from affinage.model.kinds.ffn import FfnSettings
from affinage.model.kinds.moe import MoeSettings
from affinage.model.kinds.norm import RmsNorm
from affinage.model.kinds.rotary import RopeSettings
from affinage.model.parameter import Parameter, Tree, map_parameters

# Where a block's parameter stands in a Llama layer, and how many leading axes of its kernel are inputs.
LAYER_NAMES: dict[tuple[str, ...], str] = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("ffn_norm", "scale"): "post_attention_layernorm.weight",
    ("attention", "query_norm", "scale"): "self_attn.q_norm.weight",
    ("attention", "key_norm", "scale"): "self_attn.k_norm.weight",
    **{
        ("attention", ours, leaf): f"self_attn.{theirs}_proj.{name}"
        for ours, theirs in {"query": "q", "key": "k", "value": "v", "out": "o"}.items()
        for leaf, name in {"kernel": "weight", "bias": "bias"}.items()
    },
    **{("ffn", name, "kernel"): f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    ("ffn", "router", "kernel"): "block_sparse_moe.gate.weight",
}
EXPERT_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}  # of a mixture's kernels, one tensor for each expert
INPUT_AXES = {"out": 2}  # of a kernel; the others have one


def to_hf(params: Tree, graph: Graph) -> dict[str, NDArray[Any]]:
    """Tensors under the names transformers' causal language models use, in the dtype of the parameters."""
    _config_name(decoder := Decoder.of(graph))
    tensors = {
        "model.embed_tokens.weight": np.asarray(params[decoder.embed_name]["embedding"]),
        "model.norm.weight": np.asarray(params[decoder.norm_name]["scale"]),
    }
    if not decoder.tied:
        tensors["lm_head.weight"] = np.asarray(params[decoder.unembed_name]["kernel"])

    def write(path: tuple[str, ...], _: Parameter) -> None:
        values = np.asarray(_leaf(params[decoder.blocks_name], path))
        for layer, array in enumerate(values if decoder.repeated else [values]):
            names = _names(path, decoder, layer)
            parts = [array] if len(names) == 1 else array
            tensors.update({name: _their_layout(path, part) for name, part in zip(names, parts, strict=True)})

    map_parameters(write, graph.parameters[decoder.blocks_name])
    return tensors


def from_hf(tensors: Mapping[str, NDArray[Any]], graph: Graph) -> Tree:
    """The parameters of the graph from such tensors; UserError names a tensor that is missing or of another shape."""
    decoder = Decoder.of(graph)

    def read(path: tuple[str, ...], parameter: Parameter) -> NDArray[Any]:
        layers = []
        for layer in range(decoder.layers):
            names = _names(path, decoder, layer)
            arrays = [find_tensor(tensors, name) for name in names]
            if path[-1] == "kernel":
                arrays = [array.T for array in arrays]
            shape = parameter.shape[1:] if decoder.repeated else parameter.shape
            layers.append(fit_tensor(arrays[0] if len(names) == 1 else np.stack(arrays), shape, names[0]))
        return np.stack(layers) if decoder.repeated else layers[0]

    declared = graph.parameters
    embedding = find_tensor(tensors, "model.embed_tokens.weight")
    embedding_shape = declared[decoder.embed_name]["embedding"].shape
    params: Tree = {
        decoder.embed_name: {"embedding": fit_tensor(embedding, embedding_shape, "model.embed_tokens.weight")},
        decoder.blocks_name: map_parameters(read, declared[decoder.blocks_name]),
        decoder.norm_name: {"scale": find_tensor(tensors, "model.norm.weight")},
    }
    if not decoder.tied:
        kernel = find_tensor(tensors, "lm_head.weight")
        params[decoder.unembed_name] = {"kernel": fit_tensor(kernel, embedding_shape, "lm_head.weight")}
    return params


def hf_config(graph: Graph, *, context: int | None = None) -> dict[str, Any]:
    """What config.json says of the architecture; `context` becomes max_position_embeddings."""
    decoder = Decoder.of(graph)
    name, model_type = _config_name(decoder)
    attention, block = decoder.blocks.attention, decoder.blocks
    assert attention.rope is not None
    config = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": graph.vocabulary,
        "hidden_size": decoder.width,
        "intermediate_size": block.ffn.width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups_of,
        "head_dim": attention.head_width(decoder.width),
        "hidden_act": "silu",
        "rms_norm_eps": block.norm.eps,
        **_rope_config(attention.rope),
        "tie_word_embeddings": decoder.tied,
        "attention_dropout": attention.dropout,
        "initializer_range": block.init_std,
    }
    if model_type == "llama":
        config |= {"attention_bias": bool(attention.bias), "mlp_bias": False}
    if model_type in ("mistral", "mixtral"):
        config["sliding_window"] = attention.window
    if isinstance(block.ffn, MoeSettings):
        config |= {"num_local_experts": block.ffn.experts, "num_experts_per_tok": block.ffn.top_k}
        config["router_aux_loss_coef"] = block.ffn.load_balance_weight
    if context is not None:
        config["max_position_embeddings"] = context
    return config


def _rope_config(rope: RopeSettings) -> dict[str, Any]:
    """Transformers 4 reads rope_theta and rope_scaling, transformers 5 rope_parameters."""
    if rope.scaling is None:
        parameters: dict[str, Any] = {"rope_type": "default"}
    else:
        parameters = {"rope_type": rope.scaling.kind, "factor": rope.scaling.factor}
        if rope.scaling.kind == "llama3":
            parameters |= {
                "low_freq_factor": rope.scaling.low_frequency,
                "high_freq_factor": rope.scaling.high_frequency,
                "original_max_position_embeddings": rope.scaling.original_context,
            }
    config: dict[str, Any] = {"rope_theta": rope.theta, "rope_parameters": parameters | {"rope_theta": rope.theta}}
    return config if rope.scaling is None else config | {"rope_scaling": parameters}


def _config_name(decoder: Decoder) -> tuple[str, str]:
    """The class and model_type whose forward pass this is; UserError where there is none."""
    block, attention = decoder.blocks, decoder.blocks.attention
    wrong: list[tuple[bool, str]] = [  # dropout is not among them: it is off in a released model
        (decoder.positions is not None, "learned positions"),
        (attention.rope is None, "no rotary positions"),
        (attention.rope is not None and attention.rope.fraction != 1.0, "partial rotary positions"),
        (block.placement != "pre", f"{block.placement} norms"),
        (attention.softcap is not None, "capped attention scores"),
        (
            attention.window is not None and (attention.qk_norm or bool(attention.bias)),
            "a window and QK norms or biases",
        ),
        *_wrong_ffn(block.ffn),
        (
            isinstance(block.ffn, MoeSettings) and (attention.qk_norm or bool(attention.bias)),
            "a mixture of experts and QK norms or biases",
        ),
        (block.norm.kind != "rms" or not isinstance(decoder.norm, RmsNorm), "layer norms"),
        (block.norm.eps != decoder.norm.eps, "two different norm eps"),
        (decoder.embed.scale != 1.0, "scaled embeddings"),
        (decoder.unembed.softcap is not None, "capped logits"),
        (attention.qk_norm and bool(attention.bias), "both QK norms and biases"),
    ]
    found = [name for is_wrong, name in wrong if is_wrong]
    if found:
        raise UserError(f"the model is not of the Llama family: it has {', '.join(found)}")
    if isinstance(block.ffn, MoeSettings):
        return "MixtralForCausalLM", "mixtral"
    if attention.qk_norm:
        return "Qwen3ForCausalLM", "qwen3"
    if attention.bias == "qkv":
        return "Qwen2ForCausalLM", "qwen2"
    if attention.window is not None:
        return "MistralForCausalLM", "mistral"
    return "LlamaForCausalLM", "llama"


def _wrong_ffn(ffn: FfnSettings | MoeSettings) -> list[tuple[bool, str]]:
    if isinstance(ffn, FfnSettings):
        return [
            (ffn.kind != "swiglu", f"a {ffn.kind} feed-forward layer"),
            (ffn.bias, "biases in the feed-forward layer"),
        ]
    return [  # a capacity is not among them: it holds in training only
        (ffn.activation != "swiglu", f"{ffn.activation} experts"),
        (ffn.shared_experts > 0, "shared experts"),
        (not ffn.normalise_gates, "gates that do not add up to 1"),
    ]


def _names(path: tuple[str, ...], decoder: Decoder, layer: int) -> list[str]:
    """Of the tensors that hold one layer of a parameter: one, or one for each expert."""
    ffn, prefix = decoder.blocks.ffn, f"model.layers.{layer}."
    if path[0] == "ffn" and path[1] in EXPERT_NAMES and isinstance(ffn, MoeSettings):
        experts = range(ffn.experts)
        return [f"{prefix}block_sparse_moe.experts.{e}.{EXPERT_NAMES[path[1]]}.weight" for e in experts]
    return [prefix + LAYER_NAMES[path]]


def _leaf(tree: Tree, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _their_layout(path: tuple[str, ...], array: NDArray[Any]) -> NDArray[Any]:
    if path[-1] == "bias":
        return array.reshape(-1)
    if path[-1] != "kernel":
        return array
    inputs = int(np.prod(array.shape[: INPUT_AXES.get(path[-2], 1)]))
    return np.ascontiguousarray(array.reshape(inputs, -1).T)


def find_tensor(tensors: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    """The tensor of that name, or a UserError."""
    if name not in tensors:
        raise UserError(f"the weights have no tensor {name!r}")
    return np.asarray(tensors[name])


def fit_tensor(array: NDArray[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """The tensor in our shape, which must have as many elements."""
    if array.size != np.prod(shape):
        raise UserError(f"tensor {name!r} has shape {array.shape}, which does not fit {shape}")
    return array.reshape(shape)
