"""Traces of steps, and what the machine says of itself."""

import gzip
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import psutil
import pytest
import tiny

from affinage.cli.options import Walking
from affinage.training import TrainJob, train
from affinage.training.metrics import MetricsLog
from affinage.training.readings import Readings

TRACED = """
import sys
from pathlib import Path
from types import SimpleNamespace

import tiny

from affinage.training import TrainJob, train

settings = tiny.settings(8, profile="4-5", validate_every=99)
job = dict(graph=tiny.graph(layers=1), settings=settings, mesh={"data": 1}, seed=1, feed=tiny.RandomFeed())
train(TrainJob(folder=Path(sys.argv[1]), **job))
"""


def test_a_trace_has_the_steps_asked_for_and_the_program_of_the_step(tmp_path: Path):
    # In a process of its own: JAX's profiler crashes where libtpu was loaded for its compiler alone.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", TRACED, str(tmp_path)]
    subprocess.run(command, check=True, timeout=550, env={**os.environ, "PYTHONPATH": path})
    [perfetto] = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "train"}
    assert {int(step) for step in steps} == {4, 5}
    [xplane] = (tmp_path / "profile").rglob("*.xplane.pb")  # what TensorBoard's profiler opens
    data = jax.profiler.ProfileData.from_file(str(xplane))
    modules = {
        str(value)
        for plane in data.planes
        for line in plane.lines
        for event in line.events
        for name, value in event.stats
        if name == "hlo_module"
    }
    assert any("step" in module for module in modules), modules


def test_the_memory_and_load_of_a_cpu_are_those_that_the_system_tells():
    readings = Readings(jax.local_devices())
    held = np.ones(25_000_000)  # 200 MB
    found = readings.read()
    assert found["memory_gigabytes"] == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.05)
    assert found["memory_gigabytes"] > held.nbytes / 1e9
    assert 0 < found["utilisation"] <= 1 and set(found) == {"memory_gigabytes", "utilisation"}
    before = os.times()
    while os.times().user - before.user < 0.2:
        sum(range(1000))
    assert readings.read()["utilisation"] > 0


@pytest.mark.parametrize(
    ("visible", "ordinals", "load"),
    [
        (None, [1], 0.2),
        (None, [0, 1, 2, 3], 0.25),
        ("2,3", [0], 0.3),
        ("3, 1", [0, 1], 0.3),
        ("GPU-c0", [0], 0.3),
        ("MIG-c0", [0], None),  # a part of a GPU, whose load the driver does not tell
    ],
)
def test_the_load_is_of_the_gpus_that_the_process_computes_on(monkeypatch, visible, ordinals, load):
    """A stand-in for the driver of four GPUs with loads of 10, 20, 30 and 40 %."""
    driver = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{'abcd'[handle]}0ffee",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=10 * (handle + 1)),
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    devices = [SimpleNamespace(platform="gpu", local_hardware_id=n, memory_stats=dict) for n in ordinals]
    assert Readings(devices).read().get("utilisation") == load


TPU = """
class tpumonitoring:
    @staticmethod
    def get_metric(name):
        assert name == "duty_cycle_pct"
        tpumonitoring.asked = getattr(tpumonitoring, "asked", 0) + 1
        if tpumonitoring.asked == 1:
            raise RuntimeError("the runtime does not answer yet")
        return tpumonitoring

    @staticmethod
    def data():
        return ["45.00", "55.00", "35.00", "45.00"]
"""


def test_the_load_of_tpus_is_what_libtpu_tells_in_a_process_that_ends_with_the_readings(tmp_path: Path, monkeypatch):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    (tmp_path / "libtpu" / "sdk.py").write_text(TPU)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("affinage.training.readings._FRESH", 0.0)
    before = set(psutil.Process().children())
    readings = Readings([SimpleNamespace(platform="tpu", memory_stats=dict)])
    [process] = set(psutil.Process().children()) - before
    assert readings.read() == {}  # nothing is waited for
    until = time.monotonic() + 60
    while "utilisation" not in (found := readings.read()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert found == {"utilisation": 0.45}
    process.kill()
    while readings.read():  # a process that is gone is no failure, and its last word is not repeated
        assert time.monotonic() < until
    del readings
    assert not process.is_running()


def test_steps_that_are_not_to_come_are_told_not_to_be_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def fail(step: int, state: object) -> None:
        if step == 7:
            raise RuntimeError("the machine fails")

    job: dict[str, Any] = {"graph": tiny.graph(layers=1), "mesh": {"data": 1}, "seed": 1, "feed": tiny.RandomFeed()}
    with pytest.raises(RuntimeError):
        train(TrainJob(folder=tmp_path, settings=tiny.settings(8, profile=9), on_step=(fail,), **job))
    train(TrainJob(folder=tmp_path, settings=tiny.settings(8, profile="3-4"), **job))
    first, second = [line for line in capsys.readouterr().out.splitlines() if "profile:" in line]
    assert "profile: 9 begins after the last of 8 steps: nothing is traced" in first
    assert "profile: 3-4 ends before step 6, the next one: nothing is traced" in second


def test_every_training_line_has_readings_and_profile_is_an_option_of_runs():
    assert "profile" in Walking.__dataclass_fields__
    with pytest.raises(ValueError, match="pattern"):
        tiny.settings(8, profile="5 to 6")
    with pytest.raises(ValueError, match="say 20-25"):
        tiny.settings(8, profile="25-20")
    assert tiny.settings(8, profile=20).traced == (20, 20) and tiny.settings(8, profile="20-25").traced == (20, 25)


def test_a_trace_of_steps_that_do_not_come_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings, feed = tiny.settings(5, profile="20"), tiny.RandomFeed()
    train(TrainJob(graph=tiny.graph(layers=1), settings=settings, mesh={"data": 1}, seed=1, feed=feed, folder=tmp_path))
    out, err = capsys.readouterr()
    assert "profile: 20 begins after the last of 5 steps" in out + err and not (tmp_path / "profile").exists()


def test_a_validation_that_is_not_finite_is_written_as_null(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write({"step": 1, "validation": {"en": {"loss": math.nan, "bits_per_byte": math.inf}}})
    log.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["validation"] == {"en": {"loss": None, "bits_per_byte": None}}
