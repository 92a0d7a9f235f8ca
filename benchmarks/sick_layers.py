"""A model that is made sick in one layer, by a code in its batch: what is not finite, or a loss that is a spike."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from affinage.model import Graph, parse
from affinage.model.kind import KINDS, Context, NodeKind, node_kind

SITES = 5  # after the embedding, after each of three blocks, after the last norm
BAD = {"NaN": np.nan, "Inf": np.inf, "-Inf": -np.inf}
INJECTIONS = [(site, way, name) for site in range(SITES) for way in ("value", "gradient") for name in BAD]
SPIKE = 1000  # and the site: its values are much too large, and of no use


@functools.partial(jax.custom_vjp)
def poisoned_gradient(x: jax.Array, code: jax.Array, site: int) -> jax.Array:
    return x


def _back(saved: tuple[jax.Array, int], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return poison(gradient, *saved, "gradient"), None, None


poisoned_gradient.defvjp(lambda x, code, site: (x, (code, site)), _back)


def poison(x: jax.Array, code: jax.Array, site: jax.Array | int, way: str) -> jax.Array:
    """One element of every row that has the code of this site."""
    for number, (at, how, name) in enumerate(INJECTIONS, 1):
        if how == way:
            hit = (code == number) & (jnp.asarray(site) == at)
            x = x.at[:, 1, 2].set(jnp.where(hit, jnp.asarray(BAD[name], x.dtype), x[:, 1, 2]))
    return x


def spoil(x: jax.Array, code: jax.Array, site: int) -> jax.Array:
    """Wrong values in every place, where the code asks for a spike at this site."""
    wrong = 1000 * jnp.sin(jnp.arange(x.size, dtype=jnp.float32) * 12.9898).reshape(x.shape).astype(x.dtype)
    return jnp.where((code == SPIKE + site).any(), wrong, x)


@contextlib.contextmanager
def sick_kind() -> Iterator[None]:
    """Inside, there is a node of this kind."""

    @node_kind("sick")
    class Sick(NodeKind):
        site: int

        def shape(self, inputs: tuple[Any, ...]) -> Any:
            return inputs[0]

        def apply(self, params: Any, inputs: tuple[Any, ...], context: Context) -> jax.Array:
            code = context.batch["sick"]
            wrong = spoil(poison(inputs[0], code, self.site, "value"), code, self.site)
            return poisoned_gradient(wrong, code, self.site)

    try:
        yield
    finally:
        del KINDS["sick"]


def graph() -> Graph:
    block = {"kind": "transformer_block", "ffn": {"kind": "swiglu", "width": 32}, "norm": {"kind": "rms", "eps": 1e-6}}
    nodes: dict[str, Any] = {
        "embed": {"kind": "embedding", "in": "tokens", "vocab": tiny.VOCABULARY, "width": 16},
        "sick0": {"kind": "sick", "in": "embed", "site": 0},
    }
    for at in (1, 2, 3):
        heads = {"heads": 2, "rope": {"theta": 10000}}
        nodes[f"block{at}"] = {**block, "in": f"sick{at - 1}", "attention": heads}
        nodes[f"sick{at}"] = {"kind": "sick", "in": f"block{at}", "site": at}
    nodes["norm"] = {"kind": "rms_norm", "in": "sick3"}
    nodes["sick4"] = {"kind": "sick", "in": "norm", "site": 4}
    nodes["logits"] = {"kind": "unembed", "in": "sick4", "vocab": tiny.VOCABULARY, "tied": False}
    nodes["loss"] = {"kind": "next_token_loss", "in": ["logits", "tokens"]}
    return parse({"inputs": ["tokens"], "nodes": nodes})
