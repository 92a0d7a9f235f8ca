"""The chip table, and what is set before JAX comes up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from affinage.hardware.chips import chip
from affinage.hardware.devices import accelerator_is_here


@pytest.mark.parametrize(
    ("kind", "name", "flops"),
    [
        ("TPU v3", "TPU v3", 61.5e12),
        ("TPU v4", "TPU v4", 275e12),
        ("TPU v5 lite", "TPU v5e", 197e12),
        ("TPU v5", "TPU v5p", 459e12),
        ("TPU7x", "TPU7x", 1153.5e12),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756e12),
    ],
)
def test_device_kinds_find_their_chip_and_the_peak_of_one_device(kind: str, name: str, flops: float):
    assert chip(kind).name == name
    assert chip(kind).flops_per_device == flops


@pytest.mark.parametrize("kind", ["cpu", "Some GPU of tomorrow"])
def test_chips_without_a_known_peak_show_no_mfu(kind: str):
    assert chip(kind).flops_per_device is None and not chip(kind).multiplies_bfloat16


ACQUIRES = """
from affinage.hardware.devices import acquire
print(len(acquire()))
import os, jax
print(jax.config.jax_compilation_cache_dir, "JAX_COMPILATION_CACHE_DIR" in os.environ)
"""


@pytest.mark.parametrize("chosen", [True, False])
def test_compiled_steps_are_kept_where_each_process_is_told(chosen: bool, warm_python: list[str], tmp_path: Path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    env["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "chosen")
    if not chosen:
        del env["JAX_COMPILATION_CACHE_DIR"]
    done = subprocess.run([*warm_python, "-c", ACQUIRES], env=env, capture_output=True, text=True, check=True)
    count, folder, handed_on = done.stdout.split()
    assert int(count) == 8
    assert Path(folder).parent == (tmp_path if chosen else tmp_path / "affinage")
    assert (Path(folder).name == "chosen") is chosen
    assert chosen or Path(folder).stat().st_mode & 0o777 == 0o700
    assert handed_on == str(chosen)  # what it starts has its own XDG_CACHE_HOME, else it would have this one's


@pytest.mark.skipif(accelerator_is_here(), reason="then JAX may have what is asked for")
def test_a_platform_that_jax_has_no_plugin_for_is_one_message(tmp_path: Path):
    env = {**os.environ, "JAX_PLATFORMS": "cuda"}
    done = subprocess.run(
        [sys.executable, "-m", "affinage", "run", "quickstart"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and "cuda" in done.stderr and "Traceback" not in done.stderr
