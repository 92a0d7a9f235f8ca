"""Mixture of experts: a feed-forward layer of which every token uses a part."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from pydantic import Field, model_validator

from affinage.config.settings import Settings
from affinage.model.apply_config import Layout
from affinage.model.layer import LayerContext, Result
from affinage.model.layers.dense import dense_flops
from affinage.model.layers.ffn import GATED, PLAIN, Activation, FfnSettings
from affinage.model.layers.losses import next_tokens
from affinage.model.layers.routing import (
    Routing,
    Slots,
    at_owners,
    expert_load,
    from_slots,
    load_balance,
    route,
    router_z,
    slots_by_capacity,
    slots_by_sorting,
    to_slots,
)
from affinage.model.lora import LORA_A, LORA_B
from affinage.model.parameter import ParamSpec, PyTree


class MoeSettings(Settings):
    """The feed-forward half of a block as `experts` feed-forward layers, of which each token passes through `top_k`."""

    kind: Literal["moe"]
    """What makes it one."""
    experts: int = Field(ge=2)
    """That the router chooses from."""
    top_k: int = Field(ge=1)
    """Experts of a token."""
    width: int = Field(ge=1)
    """Of each expert's hidden layer."""
    activation: Activation = "swiglu"
    """Of each expert."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """In training (a config with a key) an expert takes at most this many times its even share of a row's choices, the
    first ones; later tokens go without it. null: dropless, as everything else than training always is. Buffers of equal
    size make a capacity the faster one on CPUs."""
    shared_experts: int = Field(default=0, ge=0)
    """Further experts that every token passes through (DeepSeekMoE)."""
    normalise_gates: bool = True
    """A token's gates add up to 1 (Mixtral); false: they are the probabilities (Switch)."""
    load_balance_weight: float = Field(default=0.01, ge=0)
    """Of the loss that is 1 where all experts have equal shares; Switch's value. Added up over the layers."""
    balance_over: Literal["row", "batch"] = "row"
    """Within what the shares are to be equal. row: every sequence, which does not depend on how a batch is cut into
    micro-batches; batch: the micro-batch, as in Switch, which leaves experts freer to specialise."""
    z_loss_weight: float = Field(default=0.001, ge=0)
    """Of the squared log-denominator of the router; ST-MoE's value."""

    @model_validator(mode="after")
    def _enough_experts(self) -> "MoeSettings":
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than the {self.experts} experts")
        return self

    @property
    def bias(self) -> bool:
        """Experts have none."""
        return False

    @property
    def shared(self) -> FfnSettings | None:
        """The shared experts, side by side in one wider layer, which is the same function."""
        if not self.shared_experts:
            return None
        return FfnSettings(kind=self.activation, width=self.shared_experts * self.width)

    def parameters(self, width: int, std: float) -> PyTree:
        """Router [D, E], kernels [E, D, F] and [E, F, D], and those of the shared experts."""
        shape, axes = (self.experts, width, self.width), ("experts", "embed", "ffn")
        inward = {"kernel": ParamSpec(shape, axes, std=std, used=self.top_k, inputs=(1,))}
        shape, axes = (self.experts, self.width, width), ("experts", "ffn", "embed")
        tree: PyTree = {
            "router": {"kernel": ParamSpec((width, self.experts), ("embed", None), std=std)},
            "up": inward,
            "down": {"kernel": ParamSpec(shape, axes, std=std, residual=True, used=self.top_k, inputs=(1,))},
        }
        if self.activation in GATED:
            tree["gate"] = inward
        if self.shared:
            tree["shared"] = self.shared.parameters(width, std)
        return tree

    def apply(self, params: PyTree, x: Float[Array, "B S D"], context: LayerContext) -> Result:
        """The experts' answers weighted by their gates, with the losses and metrics of the router."""
        routing = route(params["router"], x, self.top_k, normalise=self.normalise_gates)
        capacity = self._capacity(x.shape[1], context)
        if capacity is None:
            chosen, taken = self._sorted(params, x, routing, context), jnp.ones(routing.gates.shape, bool)
        else:
            slots = slots_by_capacity(routing.experts, self.experts, capacity)
            chosen, taken = self._buffered(params, x, slots, context), slots.of_choice < self.experts * capacity
        chosen = checkpoint_name(chosen, "experts_out")
        y = jnp.sum(routing.gates[..., None] * chosen, axis=2).astype(x.dtype)
        if self.shared:
            y = y + self.shared.apply(params["shared"], x, context)
        losses, metrics = self._by_products(routing, taken, context)
        return Result(y, losses=losses, metrics=metrics)

    def _capacity(self, length: int, context: LayerContext) -> int | None:
        """Slots of an expert in a row; None: sorted into groups of any size."""
        if self.capacity_factor is not None and context.key is not None:
            return self.capacity(length)
        # XLA:CPU multiplies groups of any size by every expert, at a tenth of the speed of equal groups.
        return length if context.config.platform == "cpu" else None

    def capacity(self, length: int) -> int:
        """Slots of an expert in a row of this many tokens; as many as tokens where nothing is dropped."""
        if self.capacity_factor is None:
            return length
        return min(length, math.ceil(self.capacity_factor * self.top_k * length / self.experts))

    def _buffered(
        self, params: PyTree, x: Float[Array, "B S D"], slots: Slots, context: LayerContext
    ) -> Float[Array, "B S K D"]:
        """With a buffer of equal size for every expert and row."""
        layout = context.config.layout
        of_rows, of_experts = ("batch", None, None, "width"), ("expert_rows", "experts", None, "width")
        buffers = to_slots(x, slots).reshape(x.shape[0], self.experts, -1, x.shape[2])
        # Filled where the row is, then sent to where the expert is, and back.
        buffers = layout.resplit(buffers, of_rows, of_experts)

        def times(values: Array, matrices: Array) -> Array:
            return jnp.einsum("becd,edf->becf", values, matrices.astype(x.dtype))

        def product(name: str, values: Array) -> Array:
            return _with_adapter(values, params[name], times)

        hidden = layout.constrain(self._activate(buffers, product), ("expert_rows", "experts", None, "ffn"))
        answers = layout.resplit(product("down", hidden), of_experts, of_rows)
        return from_slots(answers.reshape(x.shape[0], -1, x.shape[2]), slots)

    def _sorted(
        self, params: PyTree, x: Float[Array, "B S D"], routing: Routing, context: LayerContext
    ) -> Float[Array, "B S K D"]:
        """With tokens sorted by expert (MegaBlocks: Gale et al., 2022): each device sorts those that it has."""
        layout = context.config.layout if context.config.layout.may_map else Layout()

        def local(x: Array, experts: Array, kernels: dict[str, dict[str, Array]]) -> Array:
            def answer(tokens: Array, sizes: Array) -> Array:
                def times(values: Array, matrices: Array) -> Array:
                    return jax.lax.ragged_dot(values, matrices, sizes)

                def product(name: str, values: Array) -> Array:
                    return _with_adapter(values, kernels[name], times)

                return product("down", self._activate(tokens, product))

            slots, sizes = slots_by_sorting(experts.reshape(1, -1, self.top_k), self.experts)
            tokens = to_slots(x.reshape(1, -1, x.shape[2]), slots)[0]
            answers = at_owners(tokens, sizes, answer, layout.mesh_axes("experts"), layout.parts("experts"))
            return from_slots(answers[None], slots).reshape(*x.shape[:2], self.top_k, x.shape[2])

        kernels = {
            name: {part: matrices.astype(x.dtype) for part, matrices in params[name].items()}
            for name in ("up", "gate", "down")
            if name in params
        }
        rows = ("batch", "sequence", None)
        of_kernels = {name: dict.fromkeys(parts, ("experts", None, None)) for name, parts in kernels.items()}
        over = ("batch", "sequence", "experts")
        split = layout.mapped(local, (rows, rows, of_kernels), (*rows, None), over=over)
        chosen: Array = split(x, routing.experts, kernels)
        return chosen

    def _activate(self, values: Array, product: Callable[[str, Array], Array]) -> Array:
        up = checkpoint_name(product("up", values), "ffn_up")
        if self.activation in GATED:
            gate = checkpoint_name(product("gate", values), "ffn_gate")
            return checkpoint_name(GATED[self.activation](gate) * up, "ffn_hidden")
        return checkpoint_name(PLAIN[self.activation](up), "ffn_hidden")

    def _by_products(
        self, routing: Routing, taken: Array, context: LayerContext
    ) -> tuple[dict[str, tuple[Array, Array]], dict[str, tuple[Array, Array]]]:
        """Losses and metrics over the positions whose prediction counts."""
        weights = jnp.ones(taken.shape[:2], jnp.float32)
        if "tokens" in context.batch:
            _, weights = next_tokens(context.batch["tokens"], context.batch)
        weights = context.narrowed(weights)
        load = expert_load(routing, weights)
        balance, z = load_balance(load, self.balance_over), router_z(routing, weights)
        count, fullest = jnp.sum(weights), jnp.max(jnp.sum(load.choices, axis=0)) * self.experts / self.top_k
        metrics = {
            "load_balance": (balance * count, count),
            "router_z": (z * count, count),
            "expert_load_max": (fullest, count),  # the fullest expert's share over the even one
            "dropped_share": (jnp.sum(weights[..., None] * ~taken), count * self.top_k),
        }
        losses = {
            "load_balance": (self.load_balance_weight * balance * count, count),
            "router_z": (self.z_loss_weight * z * count, count),
        }
        return losses, jax.lax.stop_gradient(metrics)

    def flops(self, width: int, rows: int, length: int) -> int:
        """Router, experts and shared experts; the slots of a capacity whether filled or not, as they are computed."""
        choices = self.top_k * length if self.capacity_factor is None else self.experts * self.capacity(length)
        products = 3 if self.activation in GATED else 2
        router = dense_flops(width, self.experts, rows * length)
        experts = products * dense_flops(width, self.width, rows * choices)
        return router + experts + (self.shared.flops(width, rows, length) if self.shared else 0)


def _with_adapter(values: Array, parts: PyTree, times: Callable[[Array, Array], Array]) -> Array:
    """The experts' products, and what their adapters add to them."""
    y = times(values, parts["kernel"])
    return y + times(times(values, parts[LORA_A]), parts[LORA_B]) if LORA_A in parts else y
