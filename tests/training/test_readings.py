"""Traces of steps, what the machine says of itself, and the lines that people read."""

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import psutil
import pytest

from affinage.config.runtime import RuntimeSettings
from affinage.training.metrics import MetricsLog
from affinage.training.progress import StepDisplay, step_line
from affinage.training.readings import Readings

TRACED = """
import sys
from pathlib import Path

import tiny

from affinage.training import train

train(tiny.job(Path(sys.argv[1]), profile="4-5"))
"""


def test_a_trace_has_the_steps_asked_for(tmp_path: Path, warm_python: list[str]):
    # In a process of its own: JAX's profiler crashes where libtpu was loaded for its compiler alone.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [*warm_python, "-c", TRACED, str(tmp_path)]
    subprocess.run(command, check=True, timeout=550, env={**os.environ, "PYTHONPATH": path})
    [perfetto] = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "train"}
    assert {int(step) for step in steps} == {4, 5}
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))  # what TensorBoard's profiler opens


def test_the_memory_and_load_of_a_cpu_are_those_that_the_system_tells():
    readings = Readings(jax.local_devices())
    held = np.ones(25_000_000)  # 200 MB
    found = readings.read()
    assert found["memory_gigabytes"] == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.05)
    assert found["memory_gigabytes"] > held.nbytes / 1e9
    assert 0 < found["utilisation"] <= 1 and set(found) == {"memory_gigabytes", "utilisation"}


@pytest.mark.parametrize(("visible", "load"), [("", 0.25), ("3, 1,GPU-c0", 0.3), ("MIG-c0", None)])
def test_the_load_is_of_the_gpus_that_the_process_computes_on(monkeypatch, visible: str, load: float | None):
    """A stand-in for the driver of four GPUs with loads of 10, 20, 30 and 40 %, which tells none of a part of one."""
    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{'abcd'[handle]}0ffee",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=10 * (handle + 1)),
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    ordinals = range(len(visible.split(",")) if visible else 4)
    devices = [SimpleNamespace(platform="gpu", local_hardware_id=n, memory_stats=dict) for n in ordinals]
    assert Readings(devices).read().get("utilisation") == load


def test_which_steps_are_traced_is_a_step_or_a_range():
    for wrong in ("5 to 6", "25-20"):
        with pytest.raises(ValueError, match=r"pattern|before"):
            RuntimeSettings(profile=wrong)
    assert RuntimeSettings(profile=20).profiled == (20, 20) and RuntimeSettings(profile="20-25").profiled == (20, 25)


def test_a_validation_that_is_not_finite_is_written_as_null(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write({"step": 1, "validation": {"en": {"loss": math.nan, "bits_per_byte": math.inf}}})
    log.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["validation"] == {"en": {"loss": None, "bits_per_byte": None}}


ROW = {"step": 10, "loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-3, "mfu": None, "skipped": 0.0}


@pytest.mark.parametrize(("unit", "shown"), [("tokens", "tok/s"), ("images", "images/s")])
def test_a_line_counts_what_the_model_sees(unit: str, shown: str):
    line = step_line({**ROW, unit: 640, f"{unit}_per_second": 32.0, "mfu": 0.25}, steps=100)
    assert f"32 {shown}" in line and "25" in line
    assert "ETA 3 min 00 s" in line  # 90 steps of 64 at 32 a second


def test_a_short_training_has_lines_between_its_first_and_its_last(capsys: pytest.CaptureFixture[str]):
    with StepDisplay("pretrain", 120, 0) as display:
        for step in (1, *range(10, 121, 10)):
            display.training({**ROW, "step": step, "tokens": 64 * step, "tokens_per_second": 32.0})
    steps = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["1/120", "30/120", "60/120", "90/120", "120/120"]
