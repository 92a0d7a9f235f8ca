"""Traces of steps, what the machine says of itself, and the lines that people read."""

import gzip
import json
import os
import subprocess
from pathlib import Path

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
