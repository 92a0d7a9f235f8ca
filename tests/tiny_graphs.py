"""Model mappings of a few thousand parameters, one per family, for tests."""

from typing import Any

import jax
import numpy as np

from affinage.model import Graph, abstract_params

VOCABULARY = 97


def llama(
    *,
    layers: int = 3,
    tied: bool = False,
    scan: Any = "auto",
    attention: Any = None,
    vocabulary: int = VOCABULARY,
    **block,
) -> Any:
    """Width 32, 4 heads, SwiGLU 48; keyword arguments replace settings of the attention and the block."""
    return {
        "inputs": ["tokens"],
        "nodes": {
            "embed": {"kind": "embedding", "in": "tokens", "vocab": vocabulary, "width": 32},
            "blocks": {
                "kind": "transformer_block",
                "in": "embed",
                "repeat": layers,
                "scan": scan,
                "attention": {"heads": 4, "rope": {"theta": 10000}} | (attention or {}),
                "ffn": {"kind": "swiglu", "width": 48},
                "norm": {"kind": "rms", "eps": 1e-6},
            }
            | block,
            "norm": {"kind": "rms_norm", "in": "blocks"},
            "logits": {"kind": "unembed", "in": "norm", "tied": tied},
            "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
        },
    }


def moe(*, layers: int = 2, attention: Any = None, scan: Any = "auto", **ffn: Any) -> Any:
    """`llama` with 4 experts of width 24, 2 for each token; keyword arguments replace settings of the mixture."""
    experts = {"kind": "moe", "experts": 4, "top_k": 2, "width": 24} | ffn
    return llama(layers=layers, attention=attention, scan=scan, ffn=experts)


def gpt2(*, layers: int = 2, dropout: float = 0.0, vocabulary: int = VOCABULARY, context: int = 40) -> Any:
    """Width 32, 4 heads, `context` learned positions."""
    norm = {"kind": "layer", "eps": 1e-5}
    return {
        "inputs": ["tokens"],
        "nodes": {
            "embed": {"kind": "embedding", "in": "tokens", "vocab": vocabulary, "width": 32},
            "positions": {"kind": "learned_positions", "in": "embed", "length": context},
            "drop": {"kind": "dropout", "in": "positions", "rate": dropout},
            "blocks": {
                "kind": "transformer_block",
                "in": "drop",
                "repeat": layers,
                "attention": {"heads": 4, "bias": True, "dropout": dropout},
                "ffn": {"kind": "gelu", "width": 128, "bias": True},
                "norm": norm,
                "dropout": dropout,
            },
            "norm": {"kind": "layer_norm", "in": "blocks", "eps": 1e-5},
            "logits": {"kind": "unembed", "in": "norm", "tied": "embed"},
            "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
        },
    }


def random_params(graph: Graph, seed: int = 0, std: float = 0.1) -> Any:
    """Weights large enough that every part matters, none of them at a special value; drawn without compiling."""
    random = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return jax.numpy.asarray(random.normal(mean, std, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(graph))
