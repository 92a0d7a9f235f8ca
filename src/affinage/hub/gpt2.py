"""Weights and configuration of GPT-2. Its Conv1D stores kernels as [inputs, outputs], like ours."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from affinage.errors import UserError
from affinage.hub.decoder import Decoder
from affinage.hub.llama import find_tensor, fit_tensor
from affinage.model.graph import Graph
from affinage.model.kinds.norm import LayerNorm
from affinage.model.parameter import Tree

PREFIX = "transformer."
LEAVES = {"kernel": "weight", "bias": "bias"}
NORMS = {"attention_norm": "ln_1", "ffn_norm": "ln_2"}
NORM_LEAVES = {"scale": "weight", "bias": "bias"}
PROJECTIONS = {("attention", "out"): "attn.c_proj", ("ffn", "up"): "mlp.c_fc", ("ffn", "down"): "mlp.c_proj"}


def to_hf(params: Tree, graph: Graph) -> dict[str, NDArray[Any]]:
    """Tensors under GPT2LMHeadModel's names, in the dtype of the parameters."""
    decoder = _checked(graph)
    tensors = {
        f"{PREFIX}wte.weight": np.asarray(params[decoder.embed_name]["embedding"]),
        f"{PREFIX}wpe.weight": np.asarray(params[str(decoder.positions_name)]["embedding"]),
    }
    for ours, theirs in NORM_LEAVES.items():
        tensors[f"{PREFIX}ln_f.{theirs}"] = np.asarray(params[decoder.norm_name][ours])
    blocks = params[decoder.blocks_name]
    for layer in range(decoder.layers):
        index = layer if decoder.repeated else ...
        name = f"{PREFIX}h.{layer}."
        for norm, their_norm in NORMS.items():
            for ours, theirs in NORM_LEAVES.items():
                tensors[f"{name}{their_norm}.{theirs}"] = np.asarray(blocks[norm][ours])[index]
        for (half, projection), their_projection in PROJECTIONS.items():
            arrays = blocks[half][projection]
            bias = np.asarray(arrays["bias"])[index]
            tensors[f"{name}{their_projection}.weight"] = np.asarray(arrays["kernel"])[index].reshape(-1, bias.size)
            tensors[f"{name}{their_projection}.bias"] = bias
        for ours, theirs in LEAVES.items():
            parts = [np.asarray(blocks["attention"][part][ours])[index] for part in ("query", "key", "value")]
            flat = [part.reshape(*part.shape[:-2], -1) for part in parts]
            tensors[f"{name}attn.c_attn.{theirs}"] = np.concatenate(flat, axis=-1)
    return tensors


def from_hf(tensors: Mapping[str, NDArray[Any]], graph: Graph) -> Tree:
    """The parameters of the graph from such tensors, with or without the `transformer.` prefix."""
    decoder = _checked(graph)
    prefix = PREFIX if f"{PREFIX}wte.weight" in tensors else ""
    declared = graph.parameters[decoder.blocks_name]

    def stacked(name: str, shape: tuple[int, ...], part: int | None = None) -> NDArray[Any]:
        layers = []
        for layer in range(decoder.layers):
            array = find_tensor(tensors, f"{prefix}h.{layer}.{name}")
            if part is not None:
                array = np.split(array, 3, axis=-1)[part]
            layers.append(fit_tensor(array, shape[1:] if decoder.repeated else shape, name))
        return np.stack(layers) if decoder.repeated else layers[0]

    blocks: Tree = {"attention": {}, "ffn": {}}
    for norm, their_norm in NORMS.items():
        blocks[norm] = {o: stacked(f"{their_norm}.{t}", declared[norm][o].shape) for o, t in NORM_LEAVES.items()}
    for (half, name), their_name in PROJECTIONS.items():
        shapes = declared[half][name]
        blocks[half][name] = {o: stacked(f"{their_name}.{t}", shapes[o].shape) for o, t in LEAVES.items()}
    for part, name in enumerate(("query", "key", "value")):
        shapes = declared["attention"][name]
        blocks["attention"][name] = {o: stacked(f"attn.c_attn.{t}", shapes[o].shape, part) for o, t in LEAVES.items()}
    return {
        decoder.embed_name: {"embedding": find_tensor(tensors, f"{prefix}wte.weight")},
        str(decoder.positions_name): {"embedding": find_tensor(tensors, f"{prefix}wpe.weight")},
        decoder.blocks_name: blocks,
        decoder.norm_name: {o: find_tensor(tensors, f"{prefix}ln_f.{t}") for o, t in NORM_LEAVES.items()},
    }


def hf_config(graph: Graph, *, context: int | None = None) -> dict[str, Any]:
    """What config.json says of the architecture. The context is the number of learned positions."""
    decoder = _checked(graph)
    block = decoder.blocks
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": graph.vocabulary,
        "n_positions": decoder.positions.length if decoder.positions else context,
        "n_embd": decoder.width,
        "n_layer": decoder.layers,
        "n_head": block.attention.heads,
        "n_inner": block.ffn.width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": block.norm.eps,
        "resid_pdrop": block.dropout,
        "embd_pdrop": decoder.dropout,
        "attn_pdrop": block.attention.dropout,
        "tie_word_embeddings": True,
        "initializer_range": block.init_std,
    }


def _checked(graph: Graph) -> Decoder:
    decoder = Decoder.of(graph)
    block, attention = decoder.blocks, decoder.blocks.attention
    wrong: list[tuple[bool, str]] = [
        (decoder.positions is None, "no learned positions"),
        (attention.rope is not None, "rotary positions"),
        (attention.groups_of != attention.heads, "grouped queries"),
        (
            attention.heads * attention.head_width(decoder.width) != decoder.width,
            "heads that do not add up to the width",
        ),
        (attention.bias is not True or not block.ffn.bias, "projections without bias"),
        (attention.qk_norm, "QK norms"),
        (attention.window is not None or attention.softcap is not None, "windowed or capped attention"),
        (block.placement != "pre", f"{block.placement} norms"),
        (block.ffn.kind != "gelu", f"a {block.ffn.kind} feed-forward layer"),
        (block.norm.kind != "layer" or not isinstance(decoder.norm, LayerNorm), "RMS norms"),
        (block.norm.eps != decoder.norm.eps, "two different norm eps"),
        (not decoder.tied, "an unembedding of its own"),
        (decoder.embed.scale != 1.0, "scaled embeddings"),
        (decoder.unembed.softcap is not None, "capped logits"),
    ]
    found = [name for is_wrong, name in wrong if is_wrong]
    if found:
        raise UserError(f"the model is not a GPT-2: it has {', '.join(found)}")
    return decoder
