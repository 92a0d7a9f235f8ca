"""Losses that stand out of those before: scored as numpy does it, seen on the devices, and none in a clean run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.config.training import HealthSettings
from affinage.training.spikes import LossWindow, judged


def series(steps: int, seed: int) -> np.ndarray:
    """Losses as of a training: a fall from 10 to 3, noise that has heavy tails and shrinks, and slow waves."""
    draw, at = np.random.default_rng(seed), np.arange(steps)
    level = 3 + 7 * (1 + at / 200) ** -0.5 + 0.02 * np.sin(at / 3000)
    return (level * (1 + 0.01 * draw.standard_t(8, steps))).astype(np.float32)


@jax.jit
def _scores(losses: jax.Array) -> jax.Array:
    def step(window: LossWindow, loss: jax.Array) -> tuple[LossWindow, jax.Array]:
        return window.with_loss(loss), window.score(loss)

    def of_run(losses: jax.Array) -> jax.Array:
        return jax.lax.scan(step, LossWindow.empty(128), losses)[1]

    return jax.vmap(of_run)(losses)


def scores(losses: np.ndarray) -> np.ndarray:
    """Of one run or many at once."""
    return np.asarray(_scores(np.atleast_2d(losses))).reshape(losses.shape)


def expected_score(before: list[float], loss: float) -> float:
    """The larger one of two, in the order of the losses, as `LossWindow` has them."""
    if not before:
        return 0.0
    window, last = np.array(before[-128:], np.float64), np.array(before[-33:], np.float64)
    median = np.median(window)
    least = 0.002 if len(before) >= 16 else 0.25
    above = (loss - median) / max(1.4826 * np.median(np.abs(window - median)), least * median)
    if len(before) < 8:
        return above
    steps, level = np.diff(last), np.median(last[-8:])
    noise = np.quantile(np.abs(steps - np.median(steps)), 0.75) / 1.1503 / np.sqrt(2)
    return max(above, (loss - level) / max(1.75 * noise, 0.03 * level))


@pytest.mark.parametrize(("fall", "noise"), [(1, 0.1), (12, 0.01)])
def test_the_score_is_that_of_numpy(fall: float, noise: float):
    draw, at = np.random.default_rng(0), np.arange(300)
    losses = ((1 + 9 * np.exp(-at / fall)) * (1 + noise * draw.standard_normal(300))).astype(np.float32)
    losses[[30, 41, 45]] = np.nan, np.inf, 20.0
    got, seen = scores(losses), []
    for step, loss in enumerate(losses):
        np.testing.assert_allclose(got[step], expected_score(seen, loss), rtol=2e-3, atol=1e-3)
        if np.isfinite(loss):
            seen.append(loss)


def test_many_clean_steps_do_not_stop_a_run_and_every_spike_is_seen():
    clean = series(10_000, 1)
    spikes = scores(clean) > 6
    assert spikes.mean() < 1e-3
    assert np.convolve(spikes, np.ones(3), "valid").max() < 3  # the limits of the breaker
    assert np.convolve(spikes, np.ones(100), "valid").max() < 5
    at = np.arange(5_000, 10_000, 497)
    sick = clean.copy()
    sick[at] *= 1.15  # thirteen deviations
    assert (scores(sick)[at] > 6).all()


def test_what_is_not_finite_is_no_spike_and_is_not_sound():
    window = LossWindow.empty(8)
    for loss in np.linspace(3.0, 2.9, 8, dtype=np.float32):
        window = window.with_loss(loss)
    for loss, sound, spike in ((jnp.inf, False, False), (jnp.float32(9.0), True, True)):
        _, is_sound, told = judged(window, loss, HealthSettings(spike_window=8, on_spike="log"))
        assert (bool(is_sound), bool(told["spike"])) == (sound, spike)
