"""One step is the same step on any mesh, with any accumulation, and leaves sick numbers out."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from affinage.model import apply
from affinage.parallel import make_mesh
from affinage.training import TrainJob, breakdown
from affinage.training import step as step_module
from affinage.training.optimizer import Weights, make_optimizer
from affinage.training.program import Program
from affinage.training.state import Purpose, TrainState, random_key
from affinage.training.step import make_update


class Compiled:
    """A program with its compiled step, which many tests use."""

    def __init__(self, mesh: dict[str, int], changes: dict[str, object]) -> None:
        job = TrainJob(
            graph=tiny.graph(dropout=0.1),
            settings=tiny.settings(**changes),
            mesh=mesh,
            seed=3,
            feed=tiny.RandomFeed(),
            folder=Path("unused"),
        )
        self.program = Program(job, make_mesh(mesh, jax.devices()), tiny.RandomFeed().batch(0))
        self.step = self.program.compile_training()

    def begin(self) -> TrainState:
        """What `Program.begin` makes, without compiling that again for every mesh."""
        return jax.tree.map(
            lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding), first_state(), self.program.abstract
        )

    def run(self, steps: int) -> tuple[TrainState, list[dict[str, float]]]:
        state, feed, seen = self.begin(), tiny.RandomFeed(), []
        for number in range(steps):
            state, metrics = self.step(state, self.program.put(feed.batch(number)))
            seen.append({name: float(value) for name, value in metrics.items()})
        return state, seen


@functools.cache
def compiled(mesh: str, changes: str = "{}") -> Compiled:
    sizes = {axis.rstrip("0123456789"): int(axis.lstrip("abcdefghijklmnopqrstuvwxyz")) for axis in mesh.split("-")}
    return Compiled(sizes, json.loads(changes))


@functools.cache
def first_state() -> TrainState:
    return jax.device_get(compiled("data1").program.begin())


@pytest.fixture(scope="module")
def one_device() -> tuple[TrainState, list[dict[str, float]]]:
    return compiled("data1").run(20)


@pytest.mark.parametrize("mesh", ["data8", "fsdp8", "tensor4", "data2-fsdp2-tensor2"])
def test_twenty_steps_on_any_mesh_equal_those_on_one_device(mesh: str, one_device):
    _, expected = one_device
    _, got = compiled(mesh).run(20)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in got], [m[name] for m in expected], rtol=1e-5)


def test_the_gradient_is_that_of_the_mean_loss(one_device):
    program, state = compiled("data1").program, compiled("data1").begin()
    graph, batch = program.job.graph, program.put(tiny.RandomFeed().batch(0))
    call = dataclasses.replace(program.call, key=random_key(3, Purpose.DROPOUT, jnp.int32(0)))

    @jax.jit
    def mean(params):
        loss = apply(graph, params, batch, call).values[graph.loss]
        return loss.sum / loss.count

    first = one_device[1][0]
    assert first["loss"] == pytest.approx(float(mean(state.params)), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(float(optax.tree.norm(jax.grad(mean)(state.params))), rel=1e-5)


def test_a_run_begins_with_the_same_weights_on_any_mesh():
    got = compiled("data2-fsdp2-tensor2").program.begin()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(first_state()), strict=True):
        np.testing.assert_array_equal(a, b)


def test_accumulation_over_uneven_masks_changes_nothing():
    # One step: later ones amplify rounding. Dropout is on, so the rows must keep their random numbers.
    whole, (expected,) = compiled("data1").run(1)
    parts, (got,) = compiled("data1", '{"micro_batches": 4}').run(1)
    for name in expected:
        assert got[name] == pytest.approx(expected[name], rel=1e-6)
    # Adam's first step is a sign: where a gradient is nearly 0, rounding moves the weight by up to its rate.
    for a, b in zip(jax.tree.leaves(whole.opt_state), jax.tree.leaves(parts.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_accumulation_on_a_mesh_is_the_same_step(one_device):
    _, expected = one_device
    _, got = compiled("data2", '{"micro_batches": 4}').run(20)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in got], [m[name] for m in expected], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["muon", "adafactor", "lion"])
def test_any_optimizer_moves_the_same_on_a_mesh(name: str):
    settings = {"adafactor": {"smallest_factored": 8}}.get(name, {})
    optimizer = {"name": name, "settings": settings}
    changes = json.dumps({"optimizer": optimizer, "schedule": {"name": "constant", "peak": 1e-2, "floor": 0.0}})
    runs = []
    for mesh in ("data1", "fsdp2-tensor2"):
        of_mesh = compiled(mesh, changes)
        # Not `begin`: the state of another optimizer has another form.
        state, feed, losses = of_mesh.program.begin(), tiny.RandomFeed(), []
        for number in range(6):
            state, metrics = of_mesh.step(state, of_mesh.program.put(feed.batch(number)))
            losses.append(float(metrics["loss"]))
        runs.append(losses)
    assert runs[0][-1] < runs[0][0]
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-4)  # a sign may flip where a gradient is nearly 0


def test_an_update_that_is_not_finite_is_skipped_bit_for_bit():
    program, step = compiled("data1").program, compiled("data1").step
    batch = program.put(tiny.RandomFeed().batch(0))
    state, _ = step(compiled("data1").begin(), batch)
    weight = state.params["norm"]["scale"]
    params = {**state.params, "norm": {"scale": weight.at[0].set(jnp.nan)}}
    sick = state._replace(params=params)
    before = jax.device_get(sick)
    after, metrics = step(sick, batch)
    assert float(metrics["skipped"]) == 1
    assert int(after.step) == int(before.step) + 1
    for a, b in zip(jax.tree.leaves(before[1:]), jax.tree.leaves(jax.device_get(after)[1:]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_batch_without_targets_has_a_loss_of_zero_and_does_no_harm():
    one, batch = compiled("data1"), tiny.RandomFeed().batch(0)
    batch["loss_mask"][:] = 0
    state, metrics = one.step(one.begin(), one.program.put(batch))
    assert float(metrics["loss"]) == 0 and float(metrics["skipped"]) == 0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))


def test_bfloat16_weights_moments_and_products_train():
    changes = {"precision": {"compute": "bfloat16", "params": "bfloat16"}, "optimizer": {"moments": "bfloat16"}}
    state, seen = compiled("fsdp2", json.dumps(changes)).run(20)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert np.mean([m["loss"] for m in seen[-5:]]) < seen[0]["loss"] - 0.2


def test_dropout_depends_on_the_step_alone(one_device):
    one = compiled("data1")
    batch, begin = one.program.put(tiny.RandomFeed().batch(0)), one.begin()
    later = TrainState(jnp.int32(7), *one.begin()[1:])
    loss = float(one.step(begin, batch)[1]["loss"])
    assert loss == one_device[1][0]["loss"]
    assert float(one.step(later, batch)[1]["loss"]) != loss


def test_the_feed_must_yield_the_batch_that_the_settings_say():
    program = compiled("data1").program
    with pytest.raises(ValueError, match="8 rows"):
        dataclasses.replace(program, job=dataclasses.replace(program.job, settings=tiny.settings(batch=16)))


def test_weights_before_moments_are_the_same_bits_in_a_fraction_of_the_memory():
    program = compiled("data1").program
    shape = {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    settings = tiny.settings().optimizer
    adam = make_optimizer(settings, Weights({"kernel": True}, {"kernel": None}))
    draw = functools.partial(jax.random.normal, shape=(1024, 1024))
    ended, temporary = [], []
    for first in (False, True):
        update = make_update(program.job.graph, adam, lambda step: 0.1, seed=0, weights_first=first)
        params = {"kernel": draw(jax.random.key(0))}
        state = TrainState(jnp.zeros((), jnp.int32), params, adam.init(params))
        step = jax.jit(update, donate_argnums=0).lower(state, shape, 0.0, 0.0).compile()
        temporary.append(step.memory_analysis().temp_size_in_bytes / params["kernel"].nbytes)
        for number, norm in enumerate((2.0, 0.5, jnp.nan, 3.0)):
            state, _ = step(state, {"kernel": draw(jax.random.key(number + 1))}, 0.0, float(norm))
        ended.append(jax.device_get(state))
    assert jax.tree.all(jax.tree.map(np.array_equal, *ended))
    assert temporary[0] > 1.9 and temporary[1] < 0.1  # copies of both moments; not even a clipped gradient


@pytest.mark.parametrize("part", ["a run's step", "the optimizer's row of a breakdown"])
def test_a_training_on_one_cpu_copies_no_moments(part: str, monkeypatch: pytest.MonkeyPatch):
    feed = tiny.RandomFeed()
    job = TrainJob(
        graph=tiny.graph(layers=1, width=8192),
        settings=tiny.settings(),
        mesh={"data": 1},
        seed=3,
        feed=feed,
        folder=Path("unused"),
    )
    program = Program(job, make_mesh(job.mesh, jax.devices()), feed.batch(0))

    def temporary() -> float:
        """Of what is compiled, in sizes of the weights."""
        if part == "a run's step":
            compiled = program.compile_training()
        else:
            grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), program.abstract.params)
            update = jax.jit(breakdown._update(program), donate_argnums=0)
            compiled = update.lower(program.abstract, grads).compile()
        weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract.params))
        return compiled.memory_analysis().temp_size_in_bytes / weights

    without = temporary()
    for module in (step_module, breakdown):
        monkeypatch.setattr(module, "weights_come_first", lambda call: False)
    assert temporary() - without > 0.7
