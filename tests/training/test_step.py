"""One step is the same step on any mesh, with any accumulation, and leaves sick numbers out."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from affinage.parallel import make_mesh
from affinage.training import TrainJob
from affinage.training.program import Program
from affinage.training.state import TrainState


def _program(mesh: dict[str, int], **changes: object) -> Program:
    job = TrainJob(
        graph=tiny.graph(dropout=0.1),
        settings=tiny.settings(**changes),
        mesh=mesh,
        seed=3,
        feed=tiny.RandomFeed(),
        folder=Path("unused"),
    )
    return Program(job, make_mesh(mesh, jax.devices()), tiny.RandomFeed().batch(0))


def _run(program: Program, steps: int) -> tuple[TrainState, list[dict[str, float]]]:
    state, step, feed, seen = program.begin(), program.compile_training(), tiny.RandomFeed(), []
    for number in range(steps):
        state, metrics = step(state, program.put(feed.batch(number)))
        seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen


@pytest.fixture(scope="module")
def one_device() -> tuple[TrainState, list[dict[str, float]]]:
    return _run(_program({"data": 1}), 20)


@pytest.mark.parametrize(
    "mesh",
    [{"data": 8}, {"fsdp": 8}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.items()),
)
def test_twenty_steps_on_any_mesh_equal_those_on_one_device(mesh: dict[str, int], one_device):
    _, expected = one_device
    _, got = _run(_program(mesh), 20)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in got], [m[name] for m in expected], rtol=1e-5)


def test_accumulation_over_uneven_masks_changes_nothing():
    # One step: later ones amplify rounding. Dropout is on, so the rows must keep their random numbers.
    whole, (expected,) = _run(_program({"data": 1}), 1)
    parts, (got,) = _run(_program({"data": 1}, micro_batches=4), 1)
    for name in expected:
        assert got[name] == pytest.approx(expected[name], rel=1e-6)
    # Adam's first step is a sign: where a gradient is nearly 0, rounding moves the weight by up to its rate.
    for a, b in zip(jax.tree.leaves(whole.opt_state), jax.tree.leaves(parts.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_accumulation_on_a_mesh_is_the_same_step(one_device):
    _, expected = one_device
    _, got = _run(_program({"data": 2}, micro_batches=4), 20)
    np.testing.assert_allclose([m["loss"] for m in got], [m["loss"] for m in expected], rtol=1e-5)


def test_an_update_that_is_not_finite_is_skipped_bit_for_bit():
    program = _program({"data": 1})
    step, batch = program.compile_training(), program.put(tiny.RandomFeed().batch(0))
    state, _ = step(program.begin(), batch)
    weight = state.params["norm"]["scale"]
    params = {**state.params, "norm": {"scale": weight.at[0].set(jnp.nan)}}
    sick = TrainState(state.step, params, state.opt_state)
    before = jax.device_get(sick)
    after, metrics = step(sick, batch)
    assert float(metrics["skipped"]) == 1
    assert int(after.step) == int(before.step) + 1
    for a, b in zip(jax.tree.leaves(before[1:]), jax.tree.leaves(jax.device_get(after)[1:]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_batch_without_targets_has_a_loss_of_zero_and_does_no_harm():
    program = _program({"data": 1})
    batch = tiny.RandomFeed().batch(0)
    batch["loss_mask"][:] = 0
    state, metrics = program.compile_training()(program.begin(), program.put(batch))
    assert float(metrics["loss"]) == 0 and float(metrics["skipped"]) == 0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))


def test_bfloat16_weights_moments_and_products_train():
    changes = {"precision": {"compute": "bfloat16", "params": "bfloat16"}, "optimizer": {"moments": "bfloat16"}}
    program = _program({"fsdp": 2}, **changes)
    state, seen = _run(program, 20)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert np.mean([m["loss"] for m in seen[-5:]]) < seen[0]["loss"] - 0.2


def test_dropout_depends_on_the_step_alone(one_device):
    program = _program({"data": 1})
    step, batch = program.compile_training(), program.put(tiny.RandomFeed().batch(0))
    begin = program.begin()
    later = TrainState(begin.step + 7, jax.tree.map(jnp.copy, begin.params), jax.tree.map(jnp.copy, begin.opt_state))
    loss = float(step(begin, batch)[1]["loss"])
    assert loss == one_device[1][0]["loss"]
    assert float(step(later, batch)[1]["loss"]) != loss


def test_the_feed_must_yield_the_batch_that_the_settings_say():
    program = _program({"data": 1})
    with pytest.raises(ValueError, match="8 rows"):
        dataclasses.replace(program, job=dataclasses.replace(program.job, settings=tiny.settings(batch=16)))
