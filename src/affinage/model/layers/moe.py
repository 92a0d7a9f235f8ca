"""Mixture of experts: a feed-forward layer of which every token uses a part."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field, model_validator

from affinage.config.settings import Settings
from affinage.model.apply_config import Layout
from affinage.model.layer import Batch, LayerContext, Pairs, ParamSpec, PyTree, Result
from affinage.model.layers.dense import GATED, Activation, activate
from affinage.model.layers.losses import next_tokens

Scores = Float[Array, "B S E"]  # of each expert for a token
Choices = Int[Array, "B S K"]  # the experts of a token


class Slots(NamedTuple):
    """Where every choice of a token lies in its row's buffer of M slots, and the way back."""

    of_choice: Int[Array, "B S K"]  # M: it has no slot
    choice_in: Int[Array, "B M"]  # t * K + k for choice k of token t; S * K: the slot is empty


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
    """In training an expert takes at most this many times its even share of a row's choices, the first ones; later
    tokens go without it. null: dropless, as everything else than training always is. Buffers of equal size make a
    capacity the faster one on CPUs."""
    load_balance_weight: float = Field(default=0.01, ge=0)
    """Of the loss that is 1 where all experts have equal shares; Switch's value. Added up over the layers."""
    z_loss_weight: float = Field(default=0.001, ge=0)
    """Of the squared log-denominator of the router; ST-MoE's value."""

    @model_validator(mode="after")
    def _enough_experts(self) -> "MoeSettings":
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} is more than the {self.experts} experts")
        return self

    def parameters(self, width: int, std: float) -> PyTree:
        """Router [D, E] and kernels [E, D, F] and [E, F, D]."""

        def kernel(shape: tuple[int, int], axes: tuple[str, str], *, residual: bool = False) -> PyTree:
            shapes, names = (self.experts, *shape), ("experts", *axes)
            return {"kernel": ParamSpec(shapes, names, std=std, residual=residual, used=self.top_k, inputs=(1,))}

        inward = kernel((width, self.width), ("embed", "ffn"))
        router = {"kernel": ParamSpec((width, self.experts), ("embed", None), std=std)}
        outward = kernel((self.width, width), ("ffn", "embed"), residual=True)
        gate = {"gate": inward} if self.activation in GATED else {}
        return {"router": router, "up": inward, "down": outward} | gate

    def apply(self, params: PyTree, x: Float[Array, "B S D"], context: LayerContext) -> Result:
        """The experts' answers weighted by their gates, with the losses and metrics of the router."""
        # The most probable experts of each token, all in float32 (Fedus et al., 2022, section 2.4).
        router = params["router"]["kernel"].astype(jnp.float32)
        logits = jnp.dot(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
        probabilities = jax.nn.softmax(logits, axis=-1)
        gates, experts = jax.lax.top_k(probabilities, self.top_k)
        if self.top_k > 1:  # the gates of several add up to 1 (Mixtral); of one the gate is its probability (Switch)
            gates = gates / jnp.sum(gates, axis=-1, keepdims=True)

        kernels = {name: tree["kernel"].astype(x.dtype) for name, tree in params.items() if name != "router"}
        drops, layout = self.capacity_factor is not None and context.key is not None, context.config.layout
        # XLA:CPU multiplies groups of any size by every expert, at a tenth of the speed of equal groups.
        if drops or context.config.platform == "cpu":
            capacity = self.capacity(x.shape[1]) if drops else x.shape[1]
            slots = slots_by_capacity(experts, self.experts, capacity)
            chosen, taken = self._buffered(kernels, x, slots, layout), slots.of_choice < self.experts * capacity
        else:
            chosen, taken = self._sorted(kernels, x, experts, layout), jnp.ones(gates.shape, bool)
        chosen = checkpoint_name(chosen, "experts_out")
        y = jnp.sum(gates[..., None] * chosen, axis=2).astype(x.dtype)
        losses, metrics = self._by_products(logits, probabilities, experts, taken, context.batch)
        return Result(y, losses=losses, metrics=metrics)

    def capacity(self, length: int) -> int:
        """Slots of an expert in a row of this many tokens; as many as tokens where nothing is dropped."""
        if self.capacity_factor is None:
            return length
        return min(length, math.ceil(self.capacity_factor * self.top_k * length / self.experts))

    def _buffered(
        self, kernels: PyTree, x: Float[Array, "B S D"], slots: Slots, layout: Layout
    ) -> Float[Array, "B S K D"]:
        """With a buffer of equal size for every expert and row."""
        of_rows, of_experts = ("batch", None, None, "width"), ("expert_rows", "experts", None, "width")
        buffers = to_slots(x, slots).reshape(x.shape[0], self.experts, -1, x.shape[2])
        # Filled where the row is, then sent to where the expert is, and back.
        buffers = layout.resplit(buffers, of_rows, of_experts)
        times = partial(jnp.einsum, "becd,edf->becf")
        pin = partial(layout.constrain, axes=("expert_rows", "experts", None, "ffn"))
        answers = layout.resplit(self._answers(kernels, buffers, times, pin), of_experts, of_rows)
        return from_slots(answers.reshape(x.shape[0], -1, x.shape[2]), slots)

    def _sorted(
        self, kernels: PyTree, x: Float[Array, "B S D"], experts: Choices, layout: Layout
    ) -> Float[Array, "B S K D"]:
        """With tokens sorted by expert (MegaBlocks: Gale et al., 2022): each device sorts those that it has."""

        def local(x: Array, experts: Array, kernels: PyTree) -> Array:
            def answer(tokens: Array, sizes: Array) -> Array:
                return self._answers(kernels, tokens, lambda values, w: jax.lax.ragged_dot(values, w, sizes))

            slots, sizes = slots_by_sorting(experts.reshape(1, -1, self.top_k), self.experts)
            tokens = to_slots(x.reshape(1, -1, x.shape[2]), slots)[0]
            answers = at_owners(tokens, sizes, answer, layout.mesh_axes("experts"), layout.parts("experts"))
            return from_slots(answers[None], slots).reshape(*x.shape[:2], self.top_k, x.shape[2])

        rows, of_kernels = ("batch", "sequence", None), dict.fromkeys(kernels, ("experts", None, None))
        mapped = layout.mapped(local, (rows, rows, of_kernels), (*rows, None), over=(*rows[:2], "experts"))
        return mapped(x, experts, kernels)

    def _answers(
        self, kernels: PyTree, values: Array, times: Callable[..., Array], pin: Callable[..., Array] = lambda x: x
    ) -> Array:
        """Every expert's answers to the values that lie with it, by `times`, which multiplies by each one's matrix."""
        up = checkpoint_name(times(values, kernels["up"]), "ffn_up")
        gate = checkpoint_name(times(values, kernels["gate"]), "ffn_gate") if "gate" in kernels else None
        return times(pin(activate(self.activation, up, gate)), kernels["down"])

    def _by_products(
        self, logits: Scores, probabilities: Scores, experts: Choices, taken: Bool[Array, "B S K"], batch: Batch
    ) -> tuple[Pairs, Pairs]:
        """Losses and metrics over the positions whose prediction counts."""
        ones = jnp.ones(taken.shape[:2], jnp.float32)
        weights = next_tokens(batch["tokens"], batch)[1] if "tokens" in batch else ones
        chosen = jnp.sum(jax.nn.one_hot(experts, self.experts), axis=2)
        choices, probability = (jnp.sum(weights[..., None] * v, axis=1) for v in (chosen, probabilities))
        positions, count = jnp.sum(weights, axis=1), jnp.sum(weights)
        # E times the sum over experts of (share of the choices) x (mean probability): 1 where every share is 1 / E
        # (Fedus et al., 2022, equations 4 to 6). The shares are of a row, so that micro-batches add up to the batch.
        products = jnp.sum(choices * probability, axis=1) / jnp.maximum(positions, 1.0)
        balance = self.experts * jnp.sum(products) / (self.top_k * jnp.maximum(count, 1.0))
        # The mean squared log-denominator of the router's softmax (ST-MoE: Zoph et al., 2022, equation 5).
        z = jnp.sum(weights * jnp.square(jax.nn.logsumexp(logits, axis=-1))) / jnp.maximum(count, 1.0)
        weighted = {"load_balance": self.load_balance_weight * balance, "router_z": self.z_loss_weight * z}
        losses = {name: (loss * count, count) for name, loss in weighted.items()}
        fullest = jnp.max(jnp.sum(choices, axis=0)) * self.experts / self.top_k  # its share over the even one
        dropped = jnp.sum(weights[..., None] * ~taken), count * self.top_k
        return losses, jax.lax.stop_gradient({"expert_load_max": (fullest, count), "dropped_share": dropped})

    def flops(self, width: int, rows: int, length: int) -> int:
        """Router and experts; the slots of a capacity whether filled or not, as they are computed."""
        choices = self.top_k * length if self.capacity_factor is None else self.experts * self.capacity(length)
        products = 3 if self.activation in GATED else 2
        return 2 * rows * width * (length * self.experts + products * choices * self.width)


def slots_by_capacity(experts: Choices, number: int, capacity: int) -> Slots:
    """Each of `number` experts takes the first `capacity` choices of a row that fall on it, the others get no slot.

    What a token gets depends on nothing after it, padding included, and on no other row.
    """
    rows, length, top_k = experts.shape
    flat = experts.reshape(rows, length * top_k)
    mine = jax.nn.one_hot(flat, number, dtype=jnp.int32)
    place = jnp.sum((jnp.cumsum(mine, axis=1) - 1) * mine, axis=-1)
    slots = jnp.where(place < capacity, flat * capacity + place, number * capacity)
    empty = jnp.full((rows, number * capacity), length * top_k)
    numbers = jnp.broadcast_to(jnp.arange(length * top_k)[None], slots.shape)
    choice_in = empty.at[jnp.arange(rows)[:, None], slots].set(numbers, mode="drop", unique_indices=True)
    return Slots(slots.reshape(experts.shape), choice_in)


def slots_by_sorting(experts: Int[Array, "1 N K"], number: int) -> tuple[Slots, Int[Array, "E"]]:
    """A slot for every choice, those of the first expert first, and how many each of `number` experts has."""
    flat = experts.reshape(-1)
    choice_in = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(jax.nn.one_hot(flat, number, dtype=jnp.int32), axis=0)
    return Slots(jnp.argsort(choice_in).reshape(experts.shape), choice_in[None]), sizes


def at_owners(
    tokens: Float[Array, "N D"],
    sizes: Int[Array, "E"],
    answer: Callable[[Array, Array], Array],
    mesh_axes: tuple[str, ...],
    owners: int,
) -> Float[Array, "N D"]:
    """`answer(tokens, sizes)` of tokens sorted by expert, where the experts lie on `owners` devices along a mesh axis.

    Nothing is dropped: a buffer for each owner holds all of a device's tokens. Two all-to-alls: there and back.
    """
    if owners == 1:
        return answer(tokens, sizes)
    number, width = tokens.shape
    of_owner = sizes.reshape(owners, -1)
    ends = jnp.cumsum(jnp.sum(of_owner, axis=1))
    starts = ends - jnp.sum(of_owner, axis=1)
    place = jnp.arange(number)
    index = starts[:, None] + place[None]
    sent = jnp.take(tokens, jnp.where(index < ends[:, None], index, number), axis=0, mode="fill", fill_value=0)
    got, got_sizes = (jax.lax.all_to_all(a, mesh_axes, 0, 0) for a in (sent, of_owner))

    # Every sender's tokens are sorted by expert, with nothing behind them; here they become one row sorted by expert.
    borders = jnp.cumsum(got_sizes, axis=1)
    expert = jnp.sum(place[None, :, None] >= borders[:, None, :], axis=-1)  # the number of experts: nothing
    slots, sizes_here = slots_by_sorting(expert.reshape(1, -1, 1), of_owner.shape[1] + 1)
    answers = answer(to_slots(got.reshape(1, -1, width), slots)[0], sizes_here[:-1])
    answers = from_slots(answers[None], slots).reshape(owners, number, width)
    answers = jnp.where((expert < of_owner.shape[1])[..., None], answers, jnp.zeros((), answers.dtype))

    back = jax.lax.all_to_all(answers, mesh_axes, 0, 0)
    owner = jnp.sum(place[:, None] >= ends[None, :], axis=-1)
    return back[owner, place - starts[owner]]


def _rows_at(x: Float[Array, "B N D"], index: Int[Array, "B ..."]) -> Float[Array, "B ... D"]:
    flat = index.reshape(index.shape[0], -1, 1)
    return jnp.take_along_axis(x, flat, axis=1, mode="fill", fill_value=0).reshape(*index.shape, x.shape[-1])


# Both moves are one-to-one, so each one's gradient is a gather by the other's index. JAX would scatter instead, which
# is slow on CPUs and, on GPUs, adds in another order every time.
@jax.custom_vjp
def to_slots(x: Float[Array, "B S D"], slots: Slots) -> Float[Array, "B M D"]:
    """Every choice's token in the choice's slot; zeros in empty ones."""
    return _rows_at(x, slots.choice_in // slots.of_choice.shape[2])


@jax.custom_vjp
def from_slots(y: Float[Array, "B M D"], slots: Slots) -> Float[Array, "B S K D"]:
    """What lies in the slot of every choice; zeros for those without one."""
    return _rows_at(y, slots.of_choice)


def _from_slots_backward(slots: Slots, gradient: Any) -> tuple[Array, None]:
    return _rows_at(gradient.reshape(len(gradient), -1, gradient.shape[-1]), slots.choice_in), None


to_slots.defvjp(
    lambda x, slots: (to_slots(x, slots), slots),
    lambda slots, gradient: (jnp.sum(_rows_at(gradient, slots.of_choice), axis=2), None),
)
from_slots.defvjp(lambda y, slots: (from_slots(y, slots), slots), _from_slots_backward)
