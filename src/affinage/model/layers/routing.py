"""Which experts a token goes to, and the moves of tokens to their experts' slots and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from affinage.model.parameter import PyTree


@dataclass(frozen=True)
class Routing:
    """The router's decision for every token."""

    logits: Float[Array, "B S E"]
    probabilities: Float[Array, "B S E"]
    experts: Int[Array, "B S K"]  # the most probable first
    gates: Float[Array, "B S K"]  # what each expert's answer is multiplied by


@dataclass(frozen=True)
class Slots:
    """Where every choice of a token lies in its row's buffer of M slots, and the way back.

    Choice k of token t has the number t * K + k. S * K stands for an empty slot, M for a choice without one.
    """

    of_choice: Int[Array, "B S K"]
    choice_in: Int[Array, "B M"]


def route(params: PyTree, x: Float[Array, "B S D"], top_k: int, *, normalise: bool) -> Routing:
    """The `top_k` most probable experts of each token, all in float32 (Fedus et al., 2022, section 2.4).

    `normalise` makes a token's gates add up to 1 (Mixtral); without it they are the probabilities (Switch).
    """
    kernel = params["kernel"].astype(jnp.float32)
    logits = jnp.dot(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
    probabilities = jax.nn.softmax(logits, axis=-1)
    gates, experts = jax.lax.top_k(probabilities, top_k)
    if normalise:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return Routing(logits, probabilities, experts, gates)


@dataclass(frozen=True)
class Load:
    """What falls on each expert in a row, over the positions that count."""

    choices: Float[Array, "B E"]  # how many; no gradient
    probability: Float[Array, "B E"]  # the sum of the router's probabilities
    positions: Float[Array, "B"]  # how many count
    top_k: int


def expert_load(routing: Routing, weights: Float[Array, "B S"]) -> Load:
    """The load of every row; `weights` are 1 at the positions that count and 0 elsewhere."""
    number, top_k = routing.probabilities.shape[-1], routing.experts.shape[-1]
    chosen = jnp.sum(jax.nn.one_hot(routing.experts, number), axis=2)
    choices, probability = (jnp.sum(weights[..., None] * values, axis=1) for values in (chosen, routing.probabilities))
    return Load(choices, probability, jnp.sum(weights, axis=1), top_k)


def load_balance(load: Load, over: Literal["row", "batch"]) -> Float[Array, ""]:
    """E times the sum over experts of (share of the choices) x (mean probability): 1 where every share is 1 / E.

    Switch Transformers (Fedus et al., 2022), equations 4 to 6; with several choices a token as in ST-MoE (Zoph et al.,
    2022). Rows are weighted by their positions.
    """
    choices, probability, positions = load.choices, load.probability, load.positions
    if over == "batch":
        choices, probability, positions = (jnp.sum(a, axis=0, keepdims=True) for a in (choices, probability, positions))
    products = jnp.sum(choices * probability, axis=1) / jnp.maximum(positions, 1.0)
    number = choices.shape[1]
    return number * jnp.sum(products) / (load.top_k * jnp.maximum(jnp.sum(positions), 1.0))


def router_z(routing: Routing, weights: Float[Array, "B S"]) -> Float[Array, ""]:
    """Mean squared log-denominator of the router's softmax (ST-MoE: Zoph et al., 2022, equation 5)."""
    z = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))
    return jnp.sum(weights * z) / jnp.maximum(jnp.sum(weights), 1.0)


def slots_by_capacity(experts: Int[Array, "B S K"], number: int, capacity: int) -> Slots:
    """Each of `number` experts takes the first `capacity` choices of a row that fall on it, the others get no slot.

    In order of the tokens, so that what a token gets depends on nothing after it and on no other row: padding at the
    end displaces nobody, and neither a mesh nor micro-batches change the result.
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

    Nothing is dropped, so a buffer for each owner holds all of a device's tokens in case they all go there. Two
    all-to-alls: there and back.
    """
    if owners == 1:
        return answer(tokens, sizes)
    number, width = tokens.shape
    of_owner = sizes.reshape(owners, -1)
    ends = jnp.cumsum(jnp.sum(of_owner, axis=1))
    starts = ends - jnp.sum(of_owner, axis=1)
    place = jnp.arange(number)
    index = jnp.where(starts[:, None] + place[None] < ends[:, None], starts[:, None] + place[None], number)
    sent = jnp.take(tokens, index, axis=0, mode="fill", fill_value=0)
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


def to_slots(x: Float[Array, "B S D"], slots: Slots) -> Float[Array, "B M D"]:
    """Every choice's token in the choice's slot; zeros in empty ones."""
    return _to_slots(x, slots.of_choice, slots.choice_in)


def from_slots(y: Float[Array, "B M D"], slots: Slots) -> Float[Array, "B S K D"]:
    """What lies in the slot of every choice; zeros for those without one."""
    return _from_slots(y, slots.of_choice, slots.choice_in)


def _rows_at(x: Float[Array, "B N D"], index: Int[Array, "B ..."]) -> Float[Array, "B ... D"]:
    flat = index.reshape(index.shape[0], -1, 1)
    return jnp.take_along_axis(x, flat, axis=1, mode="fill", fill_value=0).reshape(*index.shape, x.shape[-1])


# Both moves are one-to-one, so each one's gradient is a gather by the other's index. JAX would scatter instead, which
# is slow on CPUs and, on GPUs, adds in another order every time.
@jax.custom_vjp
def _to_slots(x: Array, of_choice: Array, choice_in: Array) -> Array:
    return _rows_at(x, choice_in // of_choice.shape[2])


def _to_slots_forward(x: Array, of_choice: Array, choice_in: Array) -> tuple[Array, Any]:
    return _to_slots(x, of_choice, choice_in), of_choice


def _to_slots_backward(of_choice: Array, gradient: Array) -> tuple[Array, None, None]:
    return jnp.sum(_rows_at(gradient, of_choice), axis=2), None, None


_to_slots.defvjp(_to_slots_forward, _to_slots_backward)


@jax.custom_vjp
def _from_slots(y: Array, of_choice: Array, choice_in: Array) -> Array:
    return _rows_at(y, of_choice)


def _from_slots_forward(y: Array, of_choice: Array, choice_in: Array) -> tuple[Array, Any]:
    return _from_slots(y, of_choice, choice_in), choice_in


def _from_slots_backward(choice_in: Array, gradient: Array) -> tuple[Array, None, None]:
    rows, length, top_k, width = gradient.shape
    return _rows_at(gradient.reshape(rows, length * top_k, width), choice_in), None, None


_from_slots.defvjp(_from_slots_forward, _from_slots_backward)
