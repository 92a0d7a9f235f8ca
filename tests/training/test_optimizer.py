"""AdamW, clipping, decay, moments and schedules against PyTorch, Optax and arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import tiny  # noqa: F401  # registers sgd
from affinage.config.training import OptimizerSettings, ScheduleSettings
from affinage.training.optimizer import clipped, learning_rate, make_optimizer
from affinage.training.step import stochastic_bfloat16, stored_like
from run_affinage import refused

SHAPES = {"weight": (16, 8), "norm": (8,)}
DECAYED = {"weight": True, "norm": False}


def _gradients(steps: int) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(0)
    scales = draw.choice([0.01, 1.0, 30.0], steps)  # some are clipped, some are not
    return [{k: (s * draw.normal(size=v)).astype(np.float32) for k, v in SHAPES.items()} for s in scales]


def _start() -> dict[str, np.ndarray]:
    return {k: np.random.default_rng(1).normal(size=v).astype(np.float32) for k, v in SHAPES.items()}


def _ours(settings: OptimizerSettings, params: dict, gradients: list[dict], rate: float) -> tuple[dict, object]:
    optimizer = make_optimizer(settings, DECAYED)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for grads in gradients:
        direction, state = update(clipped(grads, optax.tree.norm(grads), settings.max_grad_norm), state, params)
        params = jax.tree.map(lambda p, d: p - rate * d, params, direction)
    return params, state


def test_twenty_steps_equal_torch_adamw_with_clipping_and_decay_on_matrices_only():
    rate, gradients = 3e-3, _gradients(20)
    settings = OptimizerSettings(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
    theirs = {k: torch.nn.Parameter(torch.from_numpy(v)) for k, v in _start().items()}
    groups = [{"params": [theirs["weight"]], "weight_decay": 0.1}, {"params": [theirs["norm"]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
    for grads in gradients:
        for name, parameter in theirs.items():
            parameter.grad = torch.from_numpy(grads[name].copy())
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        adamw.step()
    ours, _ = _ours(settings, jax.tree.map(jnp.asarray, _start()), gradients, rate)
    for name, parameter in theirs.items():
        # torch divides by norm + 1e-6, Optax by the norm: a relative 1e-6 per clipped step.
        np.testing.assert_allclose(ours[name], parameter.detach().numpy(), rtol=2e-5, atol=2e-6)
    assert clipped(gradients[0], 9.0, None) is gradients[0]


def test_bfloat16_moments_are_stored_small_and_follow_the_float32_ones():
    params = {k: jnp.ones(v) for k, v in SHAPES.items()}
    gradients = _gradients(50)
    exact, _ = _ours(OptimizerSettings(), params, gradients, 1e-3)
    rounded, state = _ours(OptimizerSettings(state_dtype="bfloat16"), params, gradients, 1e-3)
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype("bfloat16")}
    assert jnp.abs(exact["weight"] - rounded["weight"]).mean() < 0.01 * jnp.abs(exact["weight"] - 1).mean()


def test_an_unknown_optimizer_or_setting_is_refused_with_the_nearest_one():
    refused(make_optimizer, OptimizerSettings(name="adamv"), DECAYED, match="`adamw`")
    for own in ({"momentun": 0.9}, {"momentum": "much"}):
        refused(make_optimizer, OptimizerSettings(name="sgd", settings=own), DECAYED, match="`momentum`")


def _rates(steps: int, **settings: object) -> np.ndarray:
    schedule = jax.jit(learning_rate(ScheduleSettings.model_validate(settings), steps))
    return np.array([schedule(jnp.int32(step)) for step in range(steps)])


def _cosine(steps: int) -> np.ndarray:
    return 0.6 + 0.4 * np.cos(np.pi * np.linspace(0, 1, steps))


@pytest.mark.parametrize(("name", "warmup", "own", "expected"), [
    ("cosine", 0, {}, _cosine(11)),
    ("cosine", 1, {}, _cosine(11)),
    ("cosine", 4, {}, [0.25, 0.5, 0.75, *_cosine(8)]),
    ("constant", 4, {}, [0.25, 0.5, 0.75, *[1.0] * 8]),
    ("linear", 2, {}, [0.5, *np.linspace(1.0, 0.2, 10)]),
    ("wsd", 1, {"decay_ratio": 0.5}, [*[1.0] * 5, *(0.2 + 0.8 * (1 - np.sqrt(np.arange(6) / 5)))]),
])  # fmt: skip
def test_schedules_warm_up_and_end_as_their_formulas(name: str, warmup: int, own: dict, expected: list[float]):
    rates = _rates(11, name=name, peak_lr=1.0, min_lr=0.2, warmup_steps=warmup, settings=own)
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_a_share_of_the_steps_warms_up_as_so_many_steps_do():
    by_share = _rates(30, peak_lr=1.0, min_lr=0.1, warmup_ratio=0.1)
    np.testing.assert_array_equal(by_share, _rates(30, peak_lr=1.0, min_lr=0.1, warmup_steps=3))
    with pytest.raises(ValueError, match="give either"):
        ScheduleSettings(peak_lr=1.0, min_lr=0.1, warmup_ratio=0.1, warmup_steps=10)


# ---- stochastic rounding to bfloat16


def test_the_mean_is_the_value_only_the_two_neighbours_occur_and_what_bfloat16_can_hold_stays():
    # Between -1 and -2 bfloat16 steps by 2^-7; this stands a quarter below -1.
    x = jnp.full(40_000, -(1 + 0.25 * 2**-7), jnp.float32)
    rounded = -np.asarray(stochastic_bfloat16(x, jax.random.key(0)), np.float32)
    assert set(np.unique(rounded)) == {1.0, 1 + 2**-7}
    assert abs((rounded > 1).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / x.size)
    exact = jnp.array([0.0, -0.0, 1.5, -3.0, 2.0**-100, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    for seed in range(5):
        np.testing.assert_array_equal(stochastic_bfloat16(exact, jax.random.key(seed)).astype(jnp.float32), exact)


def test_a_thousand_updates_that_are_each_too_small_add_up():
    start, update = jnp.ones(2000, jnp.bfloat16), 2.0**-12  # a 32nd of bfloat16's step at 1

    @jax.jit
    def moved(weights: jax.Array, key: jax.Array) -> jax.Array:
        return stored_like(weights, weights.astype(jnp.float32) + update, key)

    random = start
    for step in range(1000):
        random = moved(random, jax.random.key(step))
    assert (start.astype(jnp.float32) + update).astype(jnp.bfloat16)[0] == 1.0  # rounded to the nearest it stays
    assert abs(float(random.astype(jnp.float32).mean()) - (1 + 1000 * update)) < 0.01
