"""What people and programs meet at the terminal: pipes, signals, completion, live lines, and what is imported."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from affinage.errors import EXIT_INTERRUPTED
from affinage.hardware.devices import accelerator_is_here
from waiting import until

PROGRAM = [sys.executable, "-m", "affinage"]
SCHEMA = [*PROGRAM, "config", "schema"]
TINY = str(Path(__file__).parents[1] / "recipes" / "tiny.yaml")


def test_a_full_disk_is_a_mistake_and_a_closed_pipe_is_none():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(SCHEMA, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ended.returncode == 2 and "no space left on device" in ended.stderr and "Traceback" not in ended.stderr
    process = subprocess.Popen(SCHEMA, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, said = process.communicate(timeout=300)
    assert "Traceback" not in said and "BrokenPipe" not in said


def test_an_interrupted_verb_ends_with_its_status_and_leaves_nothing_behind(tmp_path: Path):
    command = [*PROGRAM, "world", "mine", "--megabytes", "200"]
    started = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: (tmp_path / "mine").exists() or started.poll() is not None)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=300)
    assert started.returncode == EXIT_INTERRUPTED and "Traceback" not in said
    assert not list(tmp_path.iterdir())


IMPORTED = f"""
import os, sys
from affinage.cli import main
def run(*words):
    try: main(list(words))
    except SystemExit: return [name for name in sys.argv[1:] if name in sys.modules]
told = {{"--help": run("--help"), "modules": len(sys.modules), "data": run("data", {TINY!r}, "--dry-run")}}
told["wrong"] = run("plan", "quickstrat", "--on", "v4-8") + run("plan", "quickstart", "--on", "v9-8")
told["no model"] = run("chat", "nobody") + run("serve", "nobody") + run("checkpoint", "show", "nobody")
told["no run"] = run("eval", "quickstart", "--tasks", "x") + run("compare", "a", "b") + run("report", "quickstart")
sys.modules |= dict.fromkeys(["libtpu", "jax_cuda12_plugin"])  # importing them is an ImportError
told["plan"] = run("plan", "quickstart", "--on", "v4-8", "--set", "mesh.data=4")
told["platforms"] = os.environ.get("JAX_PLATFORMS")
print(told, file=sys.stderr)
"""


@pytest.mark.skipif(accelerator_is_here(), reason="JAX then looks for what is here")
def test_nothing_heavy_is_imported_before_it_is_needed_and_no_tpu_is_looked_for(tmp_path: Path):
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    heavy = ["jax", "numpy", "pyarrow", "pydantic", "lm_eval", "transformers", "torch"]
    command = [sys.executable, "-c", IMPORTED, *heavy]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    told = ast.literal_eval(shown.stderr.splitlines()[-1])
    assert told.pop("--help") == [] and told.pop("modules") < 500
    assert told.pop("platforms") == "cpu" and "jax" in told.pop("plan") and "quickstart on v4-8" in shown.stdout
    assert not [words for words, found in told.items() if "jax" in found], "mistakes are told before JAX is imported"
