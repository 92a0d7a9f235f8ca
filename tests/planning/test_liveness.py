"""What a traced program holds and moves, on programs small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest

from affinage.planning.liveness import measure, trace

N, M, LAYERS = 256, 64, 5
SQUARE = N * N * 4  # bytes


def of(function, *shapes, dtype=jnp.float32, shares=None, platform="tpu"):
    first, *others = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return measure(trace(function, first, *others), shares or {}, platform)


def element_wise(w, x):
    return (jnp.tanh(x @ w) * 2 + 1) @ w  # computed inside the second product


def read_late(w, x):
    y = jnp.tanh(x @ w)
    for _ in range(3):
        x = x @ w
    return x @ y  # what y is made from lives until here, beside two of the chain at a time


def barred(w, x):
    y, z = jax.lax.optimization_barrier((x @ w, w))
    return y @ z  # nothing is copied that is stored already


@pytest.mark.parametrize(("function", "squares"), [(element_wise, 2), (read_late, 3), (barred, 2)])
def test_what_products_make_is_stored_and_what_is_element_wise_is_not(function, squares):
    assert of(function, (N, N), (N, N)).total == squares * SQUARE


def test_the_gradient_of_a_weight_is_whole_until_it_is_summed_over_the_devices():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    for share in (0.25, 1.0):
        # Beside the gradient, or this device's part and the others': the product that its factor is computed from.
        assert of(jax.grad(loss), (N, N), (M, N), shares={(N, N): share}).total == SQUARE + M * N * 4


def test_products_of_groups_of_rows_are_a_kernel_on_a_tpu():
    def layer(x, w):
        y = jax.lax.ragged_dot(jnp.tanh(x), w, jnp.full((4,), N // 4))
        return x + y, y  # which the loop keeps

    def function(w, x):
        return jax.lax.scan(layer, x, w)[1] * 2

    tpu, gpu = (
        of(function, (LAYERS, 4, M, M), (N, M), dtype=jnp.bfloat16, platform=name).held for name in ("tpu", "gpu")
    )
    # Rows of 64 numbers are filled up to 128 where it reads and writes them; what it reads is made before it, and what
    # it makes is float32 until it is read.
    assert (tpu["activations"], tpu["working"]) == (LAYERS * N * 128 * 2, N * 128 * (2 + 4))
    assert gpu["activations"] == LAYERS * N * M * 2


@pytest.mark.parametrize("ticks", [1, 7])
def test_a_loop_keeps_what_its_gradient_reads_once_for_each_turn(ticks):
    def stage(x, w):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)

    def loss(w, x):
        return jnp.sum((stage(x, w) if ticks == 1 else jax.lax.scan(lambda x, _: stage(x, w), x, length=ticks))[0])

    # The input of each layer and the cosine of its product, and one value that goes from layer to layer; of a loop
    # around them what the layers of every tick keep, and of the tick at hand once more.
    for share in (1.0, 0.25):
        held = of(jax.grad(loss), (LAYERS, N, N), (M, N), shares={(LAYERS, N, N): share}).held
        kept = 2 * LAYERS * (ticks + (ticks > 1)) + 1
        assert held["activations"] == kept * M * N * 4
        if ticks == 1:  # a device has the part of the gradients that it has of the weights
            assert held["gradients"] == LAYERS * SQUARE * share


def test_recomputation_keeps_only_the_input_of_each_turn():
    def held(remat):
        def loss(w, x):
            return jnp.sum(jax.lax.scan(remat(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None)), x, w)[0])

        return of(jax.grad(loss), (LAYERS, N, N), (N, N)).total

    assert held(jax.checkpoint) < held(lambda f: f) - 2 * LAYERS * SQUARE


def test_bytes_moved_are_reads_and_writes():
    assert of(lambda w, x: x @ w, (N, N), (N, N)).moved == 3 * SQUARE
    scanned = of(lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0], (LAYERS, N, N), (N, N))
    assert scanned.moved == LAYERS * 3 * SQUARE
