"""The moving average of the weights: by the formula, split like them, skipped, saved and resumed with them."""

from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from affinage.training import train

EMA = {"decay": 0.75}


class SickFeed(tiny.RandomFeed):
    """The loss of the third batch is not finite."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        batch = super().batch(step)
        batch["loss_mask"] = batch["loss_mask"] * (np.nan if step == 2 else 1)
        return batch


@pytest.mark.parametrize("in_backward", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_step_moves_it_by_the_formula_and_a_skipped_one_leaves_it(in_backward: bool):
    job = tiny.job(
        Path("unused"),
        mesh={"fsdp": 2},
        feed=SickFeed(),
        ema=EMA,
        precision={"params": "bfloat16"},
        optimizer_in_backward=in_backward,
    )
    program, step = tiny.compiled(job)
    state = program.begin()
    expected = jax.tree.map(lambda p: np.asarray(p, np.float32), state.params)
    for number in range(4):
        state, metrics = step(state, program.put(job.feed.batch(number)))
        assert bool(metrics["skipped"]) == (number == 2)
        if number != 2:
            moved = jax.device_get(state.params)
            expected = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p.astype(np.float32), expected, moved)
        jax.tree.map(lambda got, e: np.testing.assert_allclose(got, e, rtol=1e-6), state.ema_params, expected)
    for average, weights in zip(jax.tree.leaves(state.ema_params), jax.tree.leaves(state.params), strict=True):
        assert average.dtype == np.float32 and average.sharding == weights.sharding


def test_it_is_saved_and_resumed_bit_for_bit_and_changes_nothing_else(tmp_path: Path):
    train(tiny.job(tmp_path / "whole", ema=EMA))
    with pytest.raises(RuntimeError):
        train(tiny.job(tmp_path / "resumed", hook=tiny.fails_at(7), ema=EMA))
    assert train(tiny.job(tmp_path / "resumed", ema=EMA))["resumed_at"] == [5]
    train(tiny.job(tmp_path / "without"))
    assert tiny.saved_bits(tmp_path / "resumed", 10) == tiny.saved_bits(tmp_path / "whole", 10)
    names = ("params", "opt_state")
    assert tiny.saved_bits(tmp_path / "without", 10, *names) == tiny.saved_bits(tmp_path / "whole", 10, *names)
    assert tiny.saved_bits(tmp_path / "whole", 10, "ema_params") != tiny.saved_bits(tmp_path / "whole", 10, "params")
