"""Cross-entropy of logits, whole or a part of the sequence at a time, with gradients written by hand.

By hand, because autodiff keeps three arrays of the size of the logits where two do.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from affinage.model.call import multiply_out


class Objective(NamedTuple):
    """What is added to the plain cross-entropy; hashable, so that it can be static."""

    z_loss: float = 0.0  # times the squared log of the softmax's denominator (PaLM, section 5)
    label_smoothing: float = 0.0  # share of the target's probability that is spread over the vocabulary


class Sums(NamedTuple):
    """Weighted sums over tokens, float32. Only the first has a gradient."""

    objective: Float[Array, ""]
    cross_entropy: Float[Array, ""]  # in nats, without what the objective adds
    correct: Float[Array, ""]  # targets that have the largest logit


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    logits: Float[Array, "*N V"], targets: Int[Array, "*N"], weights: Float[Array, "*N"], objective: Objective
) -> Sums:
    """Sums over all tokens, each times its weight; logits are float32."""
    return _forward(logits, targets, weights, objective)[0]


def _forward(logits: Array, targets: Array, weights: Array, objective: Objective) -> tuple[Sums, tuple[Array, ...]]:
    largest = jnp.max(logits, axis=-1)
    log_z = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = plain = log_z - chosen
    if objective.label_smoothing:
        losses += objective.label_smoothing * (chosen - jnp.mean(logits, axis=-1))
    if objective.z_loss:
        losses += objective.z_loss * jnp.square(log_z)
    sums = (jnp.sum(values * weights) for values in (losses, plain, chosen >= largest))
    return Sums(*sums), (logits, targets, weights, log_z)


def _backward(objective: Objective, kept: tuple[Array, ...], gradient: Sums) -> tuple[Array, None, None]:
    logits, targets, weights, log_z = kept
    scale = (gradient.objective * weights)[..., None]
    hits = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits - log_z[..., None])
    if objective.z_loss:
        probabilities *= (1.0 + 2.0 * objective.z_loss * log_z)[..., None]
    wanted = (1.0 - objective.label_smoothing) * hits
    if objective.label_smoothing:
        wanted += objective.label_smoothing / logits.shape[-1]
    # The barrier keeps XLA:CPU from computing the exponentials once for each of the two products that follow.
    return jax.lax.optimization_barrier((probabilities - wanted) * scale), None, None


cross_entropy.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def chunked_cross_entropy(
    hidden: Float[Array, "B S D"],
    kernel: Float[Array, "V D"],
    targets: Int[Array, "B S"],
    weights: Float[Array, "B S"],
    softcap: float | None,
    objective: Objective,
    chunk: int,
) -> Sums:
    """The same from hidden vectors, `chunk` positions at a time: [B, S, V] is never stored.

    Differentiated, it computes the gradients together with the sums, so no product is done twice: they are linear in
    the one number that comes back.
    """

    def one(total: Sums, part: tuple[Array, Array, Array]) -> tuple[Sums, None]:
        h, t, w = part
        sums = cross_entropy(multiply_out(h, kernel, softcap), t, w, objective)
        return jax.tree.map(jnp.add, total, sums), None

    return jax.lax.scan(one, _no_sums(), _parts(chunk, hidden, targets, weights))[0]


def _chunked_forward(
    hidden: Array,
    kernel: Array,
    targets: Array,
    weights: Array,
    softcap: float | None,
    objective: Objective,
    chunk: int,
) -> tuple[Sums, tuple[Array, Array]]:
    def loss(h: Array, k: Array, t: Array, w: Array) -> tuple[Array, Sums]:
        sums = cross_entropy(multiply_out(h, k, softcap), t, w, objective)
        return sums.objective, sums

    def one(carry: tuple[Sums, Array], part: tuple[Array, Array, Array]) -> tuple[tuple[Sums, Array], Array]:
        total, kernel_gradient = carry
        (d_hidden, d_kernel), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(part[0], kernel, *part[1:])
        return (jax.tree.map(jnp.add, total, sums), kernel_gradient + d_kernel.astype(jnp.float32)), d_hidden

    start = (_no_sums(), jnp.zeros(kernel.shape, jnp.float32))
    (sums, d_kernel), d_hidden = jax.lax.scan(one, start, _parts(chunk, hidden, targets, weights))
    batch, length, width = hidden.shape
    d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(batch, -1, width)[:, :length]
    return sums, (d_hidden, d_kernel.astype(kernel.dtype))


def _chunked_backward(
    softcap: float | None, objective: Objective, chunk: int, kept: tuple[Array, Array], gradient: Sums
) -> tuple[Array, Array, None, None]:
    d_hidden, d_kernel = (part * gradient.objective.astype(part.dtype) for part in kept)
    return d_hidden, d_kernel, None, None


chunked_cross_entropy.defvjp(_chunked_forward, _chunked_backward)


def _no_sums() -> Sums:
    return Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields))


def _parts(chunk: int, hidden: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
    """[B, S, ...] as [S / chunk, B, chunk, ...]; the last part is filled with zeros, whose weight is zero."""

    def split(x: Array) -> Array:
        missing = -x.shape[1] % chunk
        x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    return split(hidden), split(targets), split(weights)


class TokenReadings(NamedTuple):
    """What is read of the logits at every position, float32. Only the first has a gradient."""

    log_probabilities: Float[Array, "B S"]  # of the targets
    mean_logits: Float[Array, "B S"]  # over the vocabulary


def token_readings(
    hidden: Float[Array, "B S D"],
    kernel: Float[Array, "V D"],
    targets: Int[Array, "B S"],
    softcap: float | None,
    chunk: int,
) -> TokenReadings:
    """The log-probability of every target, and the mean of the logits there, from hidden vectors.

    `chunk` positions have their logits at once (0: all); the backward pass makes them again instead of keeping them,
    so that [B, S, V] is never stored. Where nothing caps the logits, their mean is that of the kernel's rows times the
    hidden vector, and no logit is read for it.
    """
    fixed = jax.lax.stop_gradient
    row = None if softcap is not None else jnp.mean(fixed(kernel).astype(jnp.float32), axis=0)

    @jax.checkpoint
    def one(h: Array, t: Array) -> TokenReadings:
        logits = multiply_out(h, kernel, softcap)
        found = jnp.take_along_axis(logits, t[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
        if row is None:
            return TokenReadings(found, jnp.mean(fixed(logits), axis=-1))
        return TokenReadings(found, jnp.dot(fixed(h).astype(jnp.float32), row, precision=jax.lax.Precision.HIGHEST))

    batch, length = targets.shape
    if not 0 < chunk < length:
        return one(hidden, targets)
    h, t, _ = _parts(chunk, hidden, targets, targets)
    found = jax.lax.map(lambda part: one(*part), (h, t))
    return jax.tree.map(lambda parts: jnp.moveaxis(parts, 0, 1).reshape(batch, -1)[:, :length], found)
