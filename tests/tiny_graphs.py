"""Model mappings of a few thousand parameters, one per family, for tests."""

from typing import Any

import jax
import numpy as np

from affinage.model import Graph, abstract_params

VOCABULARY = 97


def _language_model(vocabulary: int, nodes: Any, norm: Any, tied: bool | str) -> Any:
    """The `nodes` from `embed` to `blocks` with what stands around them in every family."""
    nodes = {"embed": {"kind": "embedding", "in": "tokens", "vocab": vocabulary, "width": 32}} | nodes
    nodes |= {"norm": norm | {"in": "blocks"}, "logits": {"kind": "unembed", "in": "norm", "tied": tied}}
    return {"inputs": ["tokens"], "nodes": nodes | {"loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]}}}


def llama(*, layers=3, tied=False, scan="auto", attention=None, vocabulary=VOCABULARY, **block: Any) -> Any:
    """Width 32, 4 heads, SwiGLU 48; keyword arguments replace settings of the attention and the block."""
    blocks = {
        "kind": "transformer_block",
        "in": "embed",
        "repeat": layers,
        "scan": scan,
        "attention": {"heads": 4, "rope": {"theta": 10000}} | (attention or {}),
        "ffn": {"kind": "swiglu", "width": 48},
        "norm": {"kind": "rms", "eps": 1e-6},
    }
    return _language_model(vocabulary, {"blocks": blocks | block}, {"kind": "rms_norm"}, tied)


def moe(*, layers=2, attention=None, scan="auto", vocabulary=VOCABULARY, **ffn: Any) -> Any:
    """`llama` with 4 experts of width 24, 2 for each token; keyword arguments replace settings of the mixture."""
    experts = {"kind": "moe", "experts": 4, "top_k": 2, "width": 24} | ffn
    return llama(layers=layers, attention=attention, scan=scan, vocabulary=vocabulary, ffn=experts)


def gpt2(*, layers=2, dropout=0.0, vocabulary=VOCABULARY, context=40) -> Any:
    """Width 32, 4 heads, `context` learned positions."""
    blocks = {
        "kind": "transformer_block",
        "in": "drop",
        "repeat": layers,
        "attention": {"heads": 4, "bias": True, "dropout": dropout},
        "ffn": {"kind": "gelu", "width": 128, "bias": True},
        "norm": {"kind": "layer", "eps": 1e-5},
        "dropout": dropout,
    }
    nodes = {
        "positions": {"kind": "learned_positions", "in": "embed", "length": context},
        "drop": {"kind": "dropout", "in": "positions", "rate": dropout},
        "blocks": blocks,
    }
    return _language_model(vocabulary, nodes, {"kind": "layer_norm", "eps": 1e-5}, "embed")


def random_params(graph: Graph, seed: int = 0, std: float = 0.1) -> Any:
    """Weights large enough that every part matters, none of them at a special value; drawn without compiling."""
    random = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return jax.numpy.asarray(random.normal(mean, std, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(graph))
