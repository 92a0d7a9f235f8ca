"""The line of a step that people read."""

import pytest

from affinage.training.progress import StepDisplay, step_line

ROW = {"step": 10, "loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-3, "mfu": None, "skipped": 0.0}


@pytest.mark.parametrize(("unit", "shown"), [("tokens", "tok/s"), ("images", "images/s")])
def test_it_counts_what_the_model_sees(unit, shown):
    line = step_line({**ROW, unit: 640, f"{unit}_per_second": 32.0}, steps=100)
    assert f"32 {shown}" in line
    assert "ETA 3 min 00 s" in line  # 90 steps of 64 at 32 a second


def test_a_short_training_has_lines_between_its_first_and_its_last(capsys):
    with StepDisplay("pretrain", 120, 0) as display:
        for step in (1, *range(10, 121, 10)):
            display.training({**ROW, "step": step, "tokens": 64 * step, "tokens_per_second": 32.0})
    steps = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1/120", "30/120", "60/120", "90/120", "120/120"]
