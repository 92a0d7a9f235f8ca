"""Losses that stand out of those before: scored as numpy does it, seen on the devices, and none in a clean run."""

import jax
import jax.numpy as jnp
import numpy as np

from affinage.config.training import HealthSettings
from affinage.training.state import LossWindow
from affinage.training.step import detect_spike


def series(steps: int, seed: int) -> np.ndarray:
    """Losses as of a training: a fall from 10 to 3, noise that has heavy tails and shrinks, and slow waves."""
    draw, at = np.random.default_rng(seed), np.arange(steps)
    level = 3 + 7 * (1 + at / 200) ** -0.5 + 0.02 * np.sin(at / 3000)
    return (level * (1 + 0.01 * draw.standard_t(8, steps))).astype(np.float32)


@jax.jit
def scores(losses: jax.Array) -> jax.Array:
    def step(window: LossWindow, loss: jax.Array) -> tuple[LossWindow, jax.Array]:
        return window.with_loss(loss), window.score(loss)

    return jax.lax.scan(step, LossWindow.empty(128), losses)[1]


def expected_score(before: list[float], loss: float) -> float:
    if len(before) < 16:
        return 0.0
    window = np.array(before[-128:], np.float64)
    median = np.median(window)
    return (loss - median) / max(1.4826 * np.median(np.abs(window - median)), 0.002 * median)


def test_the_score_is_that_of_numpy():
    draw, at = np.random.default_rng(0), np.arange(300)
    losses = ((1 + 9 * np.exp(-at / 12)) * (1 + 0.01 * draw.standard_normal(300))).astype(np.float32)
    losses[[30, 41, 45]] = np.nan, np.inf, 20.0
    got, seen = np.asarray(scores(losses)), []
    for step, loss in enumerate(losses):
        if np.isfinite(loss):
            np.testing.assert_allclose(got[step], expected_score(seen, loss), rtol=2e-3, atol=1e-3)
            seen.append(loss)


def test_many_clean_steps_do_not_stop_a_run_and_every_spike_is_seen():
    clean = series(10_000, 1)
    spikes = np.asarray(scores(clean)) > 6
    assert spikes.mean() < 1e-3
    limits = HealthSettings()
    assert np.convolve(spikes, np.ones(limits.window), "valid").max() < limits.max_skips
    at = np.arange(5_000, 10_000, 497)
    spiky = clean.copy()
    spiky[at] *= 1.15  # thirteen deviations
    assert (np.asarray(scores(spiky))[at] > 6).all()


def test_what_is_not_finite_is_no_spike_and_updates_nothing():
    window = LossWindow.empty(8)
    for loss in np.linspace(3.0, 2.9, 8, dtype=np.float32):
        window = window.with_loss(loss)
    for loss, finite, spike in ((jnp.inf, False, False), (jnp.float32(9.0), True, True)):
        _, is_finite, metrics = detect_spike(window, loss, HealthSettings(spike_window=8, on_spike="log"))
        assert (bool(is_finite), bool(metrics["spike"])) == (finite, spike)
