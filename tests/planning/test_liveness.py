"""What a traced program holds, on programs small enough to count by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from affinage.planning.liveness import measure, trace

N = 256
M = 64
SQUARE = N * N * 4  # bytes


def of(function, *shapes, dtype=jnp.float32, shares=None):
    first, *others = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return measure(trace(function, first, *others), shares or {}, "tpu")


def test_what_products_make_is_stored_and_what_is_element_wise_is_not():
    def function(w, x):
        y = x @ w
        return (jnp.tanh(y) * 2 + 1) @ w  # computed inside the second product

    assert of(function, (N, N), (N, N)).total == 2 * SQUARE


def test_what_is_computed_inside_a_reader_holds_what_it_was_made_from():
    def function(w, x):
        y = x @ w
        z = jnp.tanh(y)
        for _ in range(3):
            x = x @ w
        return x @ z

    # y lives until the last product, beside two of the chain at a time.
    assert of(function, (N, N), (N, N)).total == 3 * SQUARE


def test_what_a_barrier_holds_is_stored_in_the_dtype_that_all_its_readers_compute_in():
    def function(held, w, x):
        y = jnp.dot(x, w, preferred_element_type=jnp.float32)
        z = held(jnp.exp(y))  # float32 [N, N]
        first = jax.lax.dot(z, w, preferred_element_type=jnp.bfloat16)
        for _ in range(3):
            x = x @ w
        return first, jax.lax.dot(z, x, preferred_element_type=jnp.bfloat16)

    def total(held):
        return of(partial(function, held), (N, N), (N, N), dtype=jnp.bfloat16).total

    # Inside its readers it holds y, float32, beside two bfloat16 of the chain; by itself it is bfloat16.
    assert total(lambda x: x) == SQUARE + 2 * SQUARE / 2
    assert total(jax.lax.optimization_barrier) == SQUARE / 2 + 2 * SQUARE / 2


def test_a_barrier_around_what_is_stored_already_copies_nothing():
    def function(held, w, x):
        y, z = held((x @ w, w))
        return y @ z

    def total(held):
        return of(partial(function, held), (N, N), (N, N)).total

    assert total(jax.lax.optimization_barrier) == total(lambda x: x) == 2 * SQUARE


def test_the_gradient_of_a_weight_is_whole_until_it_is_summed_over_the_devices():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    def held(share):
        return of(jax.grad(loss), (N, N), (M, N), shares={(N, N): share}).total

    # Beside the gradient, or this device's part and the others': the product that its factor is computed from.
    assert held(0.25) == held(1.0) == SQUARE + M * N * 4


def test_rows_that_a_tpu_gathers_and_nothing_multiplies_are_kept_in_whole_lanes():
    layers = 5

    def kept(multiplied, platform):
        def layer(x, index):
            x, turn = x
            rows = x[index]  # [N, M], where M is half of a lane's width
            y = rows @ rows.T if multiplied else jnp.tanh(rows)
            return (x, turn + 1), (rows.astype(jnp.float32), jnp.sum(y))

        def function(w, index):
            return jax.lax.scan(layer, (w, 0), jnp.broadcast_to(index, (layers, N)))[1][0] * 2

        arrays = jax.ShapeDtypeStruct((N, M), jnp.bfloat16), jax.ShapeDtypeStruct((N,), jnp.int32)
        return measure(trace(function, *arrays), {}, platform).held["activations"]

    assert kept(False, "tpu") - kept(True, "tpu") == layers * N * M * 4
    assert kept(False, "gpu") == kept(True, "gpu")


def test_products_of_groups_of_rows_are_a_kernel_on_a_tpu():
    layers, groups = 5, 4

    def layer(x, w):
        y = jax.lax.ragged_dot(jnp.tanh(x), w, jnp.full((groups,), N // groups))
        return x + y, y  # which the loop keeps

    def function(w, x):
        return jax.lax.scan(layer, x, w)[1] * 2

    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((layers, groups, M, M), (N, M))]
    held = {name: measure(trace(function, *arrays), {}, name).held for name in ("tpu", "gpu")}
    # Rows of 64 numbers are filled up to 128 where it reads and writes them; what it reads is made before it, and what
    # it makes is float32 until it is read.
    assert held["tpu"]["activations"] == layers * N * 128 * 2
    assert held["tpu"]["working"] == N * 128 * (2 + 4)
    assert held["gpu"]["activations"] == layers * N * M * 2


def test_a_loop_keeps_for_the_backward_pass_what_its_gradient_reads_once_for_each_turn():
    layers = 5

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0])

    def held(share):
        return of(jax.grad(loss), (layers, N, N), (M, N), shares={(layers, N, N): share}).held

    # The input of each layer and the cosine of its product, and one value that goes from layer to layer.
    assert held(1.0)["activations"] == (2 * layers + 1) * M * N * 4
    # Of the gradients a device has the part that it has of the weights.
    assert held(1.0)["gradients"] == layers * SQUARE
    assert held(0.25)["gradients"] == layers * SQUARE / 4


def test_the_gradient_of_one_number_of_every_row_is_made_where_it_is_read():
    def loss(taken, w, x, index):
        rows = jax.nn.log_softmax(x @ w)
        return jnp.sum(jnp.take_along_axis(rows, index[:, None], axis=-1) if taken else rows[:, :1])

    def total(taken, platform):
        arrays = *(jax.ShapeDtypeStruct((N, N), jnp.float32) for _ in range(2)), jax.ShapeDtypeStruct((N,), jnp.int32)
        return measure(trace(jax.grad(partial(loss, taken)), *arrays), {}, platform).total

    assert total(True, "tpu") == pytest.approx(total(False, "tpu"), rel=0.02)
    assert total(True, "gpu") > total(True, "tpu") + 0.9 * SQUARE


def test_a_loop_in_a_loop_stacks_in_memory_of_its_own():
    layers, ticks = 5, 7

    def loss(w, x):
        def stage(x, _):
            return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)

        return jnp.sum(jax.lax.scan(stage, x, length=ticks)[0])

    held = of(jax.grad(loss), (layers, N, N), (M, N), shares={(layers, N, N): 1.0}).held
    # Of every tick what its layers keep, of the one at hand once more, and one value that goes from tick to tick.
    assert held["activations"] == (2 * layers * (ticks + 1) + 1) * M * N * 4


def test_recomputation_keeps_only_the_input_of_each_turn():
    layers = 5

    def loss(remat, w, x):
        body = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(remat(body), x, w)[0])

    def held(remat):
        return of(jax.grad(lambda w, x: loss(remat, w, x)), (layers, N, N), (N, N)).total

    assert held(jax.checkpoint) < held(lambda f: f) - 2 * layers * SQUARE


def test_weights_that_a_loop_reads_in_a_narrower_dtype_are_copied_once():
    layers = 5

    def loss(w, x):
        body = lambda x, w: (x @ w.astype(jnp.bfloat16), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x.astype(jnp.bfloat16), w)[0].astype(jnp.float32))

    shares = {(layers, N, N): 0.5}
    held = of(jax.grad(loss), (layers, N, N), (N, N), shares=shares).held
    assert held["weights"] >= layers * SQUARE / 2 * 0.5


def test_bytes_moved_are_reads_and_writes():
    assert of(lambda w, x: x @ w, (N, N), (N, N)).moved == 3 * SQUARE
    scanned = of(lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0], (5, N, N), (N, N))
    assert scanned.moved == 5 * 3 * SQUARE
