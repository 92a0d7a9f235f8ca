"""Traces of steps, what the machine says of itself, and the lines that people read."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from affinage.errors import UserError
from affinage.training import train
from affinage.training.metrics import ConsoleWriter, step_line

TRACED = """
import sys
from pathlib import Path

import tiny

from affinage.training import train

train(tiny.job(Path(sys.argv[1]), profile="4-5"))
"""


def test_a_trace_has_the_steps_asked_for(tmp_path: Path):
    # In a process of its own: JAX's profiler crashes where libtpu was loaded for its compiler alone.
    path = os.pathsep.join([*map(str, Path(__file__).parents[:2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TRACED, str(tmp_path)]
    subprocess.run(command, check=True, timeout=550, env={**os.environ, "PYTHONPATH": path})
    [perfetto] = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "train"}
    assert {int(step) for step in steps} == {4, 5}
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))  # what TensorBoard's profiler opens


def test_lines_have_the_fields_names(tmp_path: Path):
    train(tiny.job(tmp_path, 4))
    line = tiny.lines(tmp_path)[-1]
    named = "loss loss_tokens grad_norm learning_rate tokens tokens_per_second mfu step_time data_time goodput"
    assert set(named.split()) <= set(line)
    assert line["step_time"] > 0 and 0 < line["goodput"] < 1 and line["tokens"] == 4 * 8 * tiny.CONTEXT


def test_a_training_whose_folder_is_deleted_ends_with_a_message(tmp_path: Path):
    folder = tmp_path / "run"
    delete = lambda step, _: shutil.rmtree(folder) if step == 4 else None  # noqa: E731
    with pytest.raises(UserError, match="deleted or moved") as ended:
        train(tiny.job(folder, 40, delete))
    assert str(folder) in ended.value.where and not folder.exists()


ROW = {"step": 10, "loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-3, "mfu": None, "skipped": 0.0}


def test_a_line_has_the_speed_and_the_time_left():
    line = step_line({**ROW, "tokens": 640, "tokens_per_second": 32.0, "mfu": 0.25}, steps=100)
    assert "32 tok/s" in line and "25" in line
    assert "ETA 3 min 00 s" in line  # 90 steps of 64 at 32 a second


def test_a_short_training_has_lines_between_its_first_and_its_last(capsys: pytest.CaptureFixture[str]):
    display = ConsoleWriter("pretrain", 120, 0)
    for step in (1, *range(10, 121, 10)):
        display.training({**ROW, "step": step, "tokens": 64 * step, "tokens_per_second": 32.0})
    steps = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1/120", "30/120", "60/120", "90/120", "120/120"]
