"""Position-wise feed-forward layers."""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from pydantic import Field

from affinage.config.settings import Settings
from affinage.model.layer import LayerContext
from affinage.model.layers.dense import dense, dense_flops, dense_parameters, dense_together
from affinage.model.parameter import PyTree
from affinage.registry import Registry, one_of

Elementwise = Callable[[Array], Array]


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)  # the tanh form, as in GPT-2 and Gemma


# Kinds with a gate have three matrices: down(activation(gate(x)) * up(x)) (Shazeer, 2020); the others two.
GATED: Registry[Elementwise] = Registry("activation", {"swiglu": jax.nn.silu, "geglu": _gelu})
PLAIN: Registry[Elementwise] = Registry("activation", {"gelu": _gelu, "relu2": lambda x: jnp.square(jax.nn.relu(x))})
Activation = Annotated[str, one_of(GATED, PLAIN)]


def activation(name: str, *, gated: bool = False) -> Callable[[Elementwise], Elementwise]:
    """Registers a function of every element as the feed-forward layer's `kind: name`, with a gate or without."""

    return (GATED if gated else PLAIN).register(name)


class FfnSettings(Settings):
    """The feed-forward half of a block."""

    kind: Activation
    """Gated (swiglu, geglu ...) has a third matrix."""
    width: int = Field(ge=1)
    """Of the hidden layer."""
    bias: bool = False
    """On each matrix."""

    def parameters(self, width: int, std: float) -> PyTree:
        """Kernels [D, F] and [F, D]."""
        inward = dense_parameters((width,), (self.width,), ("embed", "ffn"), bias=self.bias, std=std)
        tree: PyTree = {"up": inward}
        if self.kind in GATED:
            tree["gate"] = inward
        outward = ((self.width,), (width,), ("ffn", "embed"))
        tree["down"] = dense_parameters(*outward, bias=self.bias, std=std, residual=True)
        return tree

    def apply(self, params: PyTree, x: Float[Array, "B S D"], context: LayerContext) -> Float[Array, "B S D"]:
        """The hidden layer is sharded over its width."""
        if self.kind in GATED:
            both = (params["up"], params["gate"])
            up, gate = dense_together(both, x, context, ("ffn_up", "ffn_gate"))
            hidden = GATED[self.kind](gate) * up
        else:
            hidden = PLAIN[self.kind](dense(params["up"], x, context, name="ffn_up"))
        hidden = context.config.constrain(hidden, ("batch", "sequence", "ffn"))
        return dense(params["down"], checkpoint_name(hidden, "ffn_hidden"), context)

    def flops(self, width: int, rows: int, length: int) -> int:
        """Of the two or three products."""
        return dense_flops(width, self.width, rows * length) * (3 if self.kind in GATED else 2)
