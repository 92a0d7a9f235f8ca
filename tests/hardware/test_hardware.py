"""Chips, slices by the clouds' names (how many, how wired, how libtpu calls them), and platforms that JAX lacks."""

import os
from pathlib import Path

import pytest

from affinage.hardware.chips import GiB, chip, find_slice
from affinage.hardware.devices import accelerator_is_here
from run_affinage import refused
from waiting import python


def test_device_kinds_find_their_chip_and_the_peak_of_one_device():
    for kind, name, flops in (
        ("TPU v3", "TPU v3", 61.5e12), ("TPU v4", "TPU v4", 275e12), ("TPU v5 lite", "TPU v5e", 197e12),
        ("TPU v5", "TPU v5p", 459e12), ("TPU7x", "TPU7x", 1153.5e12), ("NVIDIA H100 PCIe", "H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312e12),
    ):  # fmt: skip
        assert (chip(kind).name, chip(kind).flops_per_device) == (name, flops)
    assert chip("cpu").flops_per_device is chip("Some GPU of tomorrow").flops_per_device is None


@pytest.mark.skipif(accelerator_is_here(), reason="then JAX may have what is asked for")
def test_a_platform_that_jax_has_no_plugin_for_is_one_message(tmp_path: Path):
    env = {**os.environ, "JAX_PLATFORMS": "cuda", "XDG_CACHE_HOME": os.devnull}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    said = python("from affinage.__main__ import main; main()", "run", "quickstart", cwd=tmp_path, env=env)
    assert said.returncode == 2 and "cuda" in said.stderr and "Traceback" not in said.stderr
    assert "Warning: compiled programs are not kept" in said.stderr


# name, chips, JAX devices, shape, hosts, libtpu's name. Google's own lists: cloud.google.com/tpu/docs.
KNOWN = [
    ("v4-32", 16, 16, (2, 2, 4), 4, "v4:2x2x4"), ("v4-512", 256, 256, (4, 8, 8), 64, "v4:4x8x8"),
    ("v4-8192", 4096, 4096, (16, 16, 16), 1024, "v4:16x16x16"), ("v5litepod-16", 16, 16, (4, 4), 4, "v5e:4x4"),
    ("v5e-8", 8, 8, (2, 4), 1, "v5e:2x4"), ("v5p-128", 64, 64, (4, 4, 4), 16, "v5:4x4x4"),
    ("v6e-64", 64, 64, (8, 8), 16, "v6e:8x8"), ("tpu7x-128", 64, 128, (4, 4, 4), 16, "tpu7x:4x4x4"),
    ("v3-8", 4, 8, (2, 2), 1, ""), ("h100x8", 8, 8, (1, 8), 1, ""), ("a100x16", 16, 16, (2, 8), 2, ""),
    ("l4", 1, 1, (1, 1), 1, ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "chips", "devices", "shape", "hosts", "topology"), KNOWN)
def test_a_name_means_these_chips(name, chips, devices, shape, hosts, topology):
    found = find_slice(name)
    assert (found.chips, found.devices, found.shape) == (chips, devices, shape)
    assert (found.hosts, found.topology) == (hosts, topology)


def test_rings_are_closed_from_whole_cubes_and_whole_pods_on():
    assert [find_slice(name).wrap for name in ("v4-64", "v4-128")] == [(False,) * 3, (True,) * 3]
    assert [find_slice(name).wrap for name in ("v5e-128", "v5e-256")] == [(False, True), (True, True)]


def test_a_program_may_take_what_the_compiler_says_or_the_environment_of_a_gpu(monkeypatch):
    sizes = {name: find_slice(name).chip.memory_per_device / GiB for name in ("v5e-8", "v4-8", "v6e-8", "v5p-8")}
    assert sizes == {"v5e-8": 15.75, "v4-8": 30.75, "v6e-8": 31.25, "v5p-8": pytest.approx(95.74)}
    assert find_slice("cpu").chip.memory_per_device > GiB
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    assert find_slice("l4").chip.memory_per_device == 12e9
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "most")
    assert "XLA_CLIENT_MEM_FRACTION" in refused(find_slice, "l4").where


def test_what_does_not_exist_is_refused_with_the_nearest_that_does():
    for name, nearest in (
        ("v4-31", ["v4-16", "v4-32"]), ("v4-33", ["v4-32", "v4-64"]), ("v5e-512", ["v5e-256"]), ("v4-0", ["v4-8"]),
        ("v9-8", ["Did you mean `v"]), *((name, ["h100x16"]) for name in ("h100x12", "12 x H100", "h100-12")),
        ("h1000", ["Did you mean `h100`?"]), ("h100x0", ["Did you mean `h100x8`?"]),
        *((name, ["Did you mean `h100x8`?"]) for name in ("8xh100", "8 x H100", "H100:8", "h100-8")),
    ):  # fmt: skip
        fix = refused(find_slice, name).fix
        assert all(each in fix for each in nearest), name
