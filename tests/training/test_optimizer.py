"""AdamW, clipping, decay and moments against PyTorch and against arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from affinage.recipe.training import OptimizerSettings, ScheduleSettings
from affinage.training.optimizer import make_optimizer
from affinage.training.schedule import learning_rate

SHAPES = {"weight": (16, 8), "norm": (8,)}
DECAYED = {"weight": True, "norm": False}


def _gradients(steps: int) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    scales = draw.choice([0.01, 1.0, 30.0], steps)  # some are clipped, some are not
    return [{k: (s * draw.normal(size=v)).astype(np.float32) for k, v in SHAPES.items()} for s in scales]


def _ours(settings: OptimizerSettings, params: dict, gradients: list[dict], rate: float) -> tuple[dict, object]:
    optimizer = make_optimizer(settings, DECAYED)
    state = optimizer.init(params)
    for grads in gradients:
        direction, state = optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
    return params, state


def test_twenty_steps_equal_torch_adamw_with_clipping_and_decay_on_matrices_only():
    rate, gradients = 3e-3, _gradients(20)
    settings = OptimizerSettings(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0)
    start = {k: np.random.default_rng(1).normal(size=v).astype(np.float32) for k, v in SHAPES.items()}
    theirs = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in start.items()}
    groups = [
        {"params": [theirs["weight"]], "weight_decay": 0.1},
        {"params": [theirs["norm"]], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    for grads in gradients:
        for name, parameter in theirs.items():
            parameter.grad = torch.from_numpy(grads[name].copy())
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        adamw.step()
    ours, _ = _ours(settings, jax.tree.map(jnp.asarray, start), gradients, rate)
    for name, parameter in theirs.items():
        # torch divides by norm + 1e-6, Optax by the norm: a relative 1e-6 per clipped step.
        np.testing.assert_allclose(ours[name], parameter.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_bfloat16_moments_are_stored_small_and_follow_the_float32_ones():
    params = {k: jnp.ones(v) for k, v in SHAPES.items()}
    gradients = _gradients(50)
    exact, _ = _ours(OptimizerSettings(), params, gradients, 1e-3)
    rounded, state = _ours(OptimizerSettings(moments="bfloat16"), params, gradients, 1e-3)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("bfloat16")}
    moved = jnp.abs(exact["weight"] - 1).mean()
    assert jnp.abs(exact["weight"] - rounded["weight"]).mean() < 0.01 * moved


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_cosine_warms_up_to_the_peak_and_ends_on_the_floor(warmup: int):
    schedule = learning_rate(ScheduleSettings(peak=1e-2, floor=1e-3, warmup_steps=warmup), 100)
    rates = np.array([schedule(jnp.int32(step)) for step in range(100)])
    top = max(warmup - 1, 0)
    np.testing.assert_allclose(rates[: top + 1], 1e-2 * np.arange(1, top + 2) / max(warmup, 1), rtol=1e-5)
    progress = (np.arange(top, 100) - top) / (99 - top)
    np.testing.assert_allclose(rates[top:], 1e-3 + 9e-3 * (1 + np.cos(np.pi * progress)) / 2, rtol=1e-4)
    np.testing.assert_allclose(rates[99], 1e-3, rtol=1e-5)


def test_a_share_of_the_steps_warms_up_as_so_many_steps_do():
    by_share = learning_rate(ScheduleSettings(peak=1e-2, floor=1e-3, warmup_share=0.1), 100)
    by_steps = learning_rate(ScheduleSettings(peak=1e-2, floor=1e-3, warmup_steps=10), 100)
    assert [float(by_share(step)) for step in range(100)] == [float(by_steps(step)) for step in range(100)]
    with pytest.raises(ValueError, match="give either"):
        ScheduleSettings(peak=1.0, floor=0.1, warmup_share=0.1, warmup_steps=10)


def test_constant_stays_at_the_peak_after_warm_up():
    schedule = learning_rate(ScheduleSettings(name="constant", peak=2.0, floor=0.1, warmup_steps=4), 10)
    assert [float(schedule(jnp.int32(s))) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ["cosine", "constant"])
def test_a_run_of_one_step_takes_it_at_the_peak(name: str):
    schedule = learning_rate(ScheduleSettings(name=name, peak=1e-2, floor=1e-3), 1)
    assert float(schedule(jnp.int32(0))) == pytest.approx(1e-2)
