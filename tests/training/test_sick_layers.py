"""What is not finite, in the values or the gradients of any layer, and spikes: the update is left out bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from sick_layers import INJECTIONS, graph, sick_kind

from affinage.training.spikes import LossWindow
from affinage.training.state import TrainState


class Sickroom:
    """A compiled step, and batches that are sick in one row as they are told to be."""

    def __init__(self) -> None:
        health = {"window": 16, "on_spike": "skip"}
        of = {"graph": graph(), "feed": self, "health": health}
        self.program, self.step = tiny.compiled(tiny.job(Path("unused"), precision={"params": "bfloat16"}, **of))
        self._first = jax.device_get(self.program.begin())

    def begin(self) -> TrainState:
        return tiny.placed(self._first, self.program.abstract)

    def iterate(self, start_step: int) -> Iterator[dict[str, np.ndarray]]:
        return iter([self.batch(start_step)])

    def batch(self, step: int, code: int = 0) -> dict[str, np.ndarray]:
        batch = tiny.RandomFeed().batch(step)
        sick = np.zeros(len(batch["rows"]), np.int32)
        sick[step % len(sick)] = code
        return {**batch, "sick": sick}

    def run(self, state: TrainState, step: int, code: int = 0) -> tuple[TrainState, dict[str, float]]:
        state, metrics = self.step(state, self.program.put(self.batch(step, code)))
        return state, {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope="module")
def sickroom() -> Iterator[Sickroom]:
    with sick_kind():
        yield Sickroom()


def bits(state: TrainState) -> list[bytes]:
    return tiny.bits((state.params, state.opt_state))


def test_anywhere_in_the_network_and_at_any_step(sickroom: Sickroom):
    state = sickroom.begin()
    codes = list(range(1, len(INJECTIONS) + 1))
    np.random.default_rng(0).shuffle(codes)
    plan = [code for sick in codes for code in (0, sick)]
    for step, code in enumerate(plan):
        before = bits(state)
        state, seen = sickroom.run(state, step, code)
        assert seen["skipped"] == bool(code), (step, INJECTIONS[code - 1], seen)
        assert (bits(state) == before) == bool(code), (step, INJECTIONS[code - 1])
    assert int(state.step) == len(plan)
    # The same steps without the sick ones: a batch that is passed over leaves nothing behind.
    well = sickroom.begin()
    for step, code in enumerate(plan):
        well = sickroom.program.pass_over(well) if code else sickroom.run(well, step)[0]
    assert bits(well) == bits(state)


@pytest.mark.parametrize(("deviations", "skipped"), [(5.95, False), (6.05, True)])
def test_a_loss_of_more_than_six_deviations_is_left_out_bit_for_bit(
    sickroom: Sickroom, deviations: float, skipped: bool
):
    _, seen = sickroom.run(sickroom.begin(), 0)
    # A window whose median lies so many deviations below: the median absolute deviation of -2, -1, 0, 1, 2 is 1.
    spread = 0.02
    median = seen["loss"] - deviations * 1.4826 * spread
    losses = median + spread * np.resize(np.arange(-2.0, 3.0), 15)
    window = LossWindow(np.append(losses, median).astype(np.float32), np.int32(16))
    state = sickroom.begin()._replace(window=tiny.placed(window, sickroom.program.abstract.window))
    before = bits(state)
    state, seen = sickroom.run(state, 0)
    assert seen["loss_z"] == pytest.approx(deviations, rel=1e-3)
    assert seen["skipped"] == skipped and (bits(state) == before) == skipped
