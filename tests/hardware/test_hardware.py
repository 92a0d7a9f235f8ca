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


@pytest.mark.skipif(accelerator_is_here(), reason="then JAX may have what is asked for")
def test_a_platform_that_jax_has_no_plugin_for_is_one_message(tmp_path: Path):
    env = {**os.environ, "JAX_PLATFORMS": "cuda"}
    done = subprocess.run(
        [sys.executable, "-m", "affinage", "run", "quickstart"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and "cuda" in done.stderr and "Traceback" not in done.stderr
