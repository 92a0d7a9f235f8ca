"""The line of a step that people read."""

import pytest

from affinage.training.progress import step_line

ROW = {"step": 10, "loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-3, "mfu": None, "skipped": 0.0}


@pytest.mark.parametrize(("unit", "shown"), [("tokens", "tok/s"), ("images", "images/s")])
def test_it_counts_what_the_model_sees(unit, shown):
    line = step_line({**ROW, unit: 640, f"{unit}_per_second": 32.0}, steps=100)
    assert f"32 {shown}" in line
    assert "ETA 3 min 00 s" in line  # 90 steps of 64 at 32 a second
