"""Programs that are read back from JAX's cache compute what they did when they were compiled."""

import os
import subprocess
from pathlib import Path

import pytest

from affinage.hardware.kept_programs import loses_order
from affinage.launch.process import reserved_port

HERE = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from affinage.hardware.devices import acquire

over = None
def whole(weights):
    return jax.lax.with_sharding_constraint(weights, NamedSharding(over, P()))

def placed(array, *axes):
    return jax.make_array_from_callback(array.shape, NamedSharding(over, P(*axes)), lambda index: array[index])
"""
MESH = """
acquire()
over = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
"""
ONE_PROCESS = f"""{HERE}{MESH}
x = jnp.ones((2, 8, 8))
def alone(x): return jax.lax.scan(lambda c, w: (c @ w, None), x[0], x)[0]
def outside(x): return whole(x) * 2
def inside(x): return jax.lax.scan(lambda c, w: (c @ whole(w), None), whole(x)[0], x)[0]
for step, array in ((alone, x), (outside, placed(x, None, "fsdp")), (inside, placed(x, None, "fsdp"))):
    jax.block_until_ready(jax.jit(step)(array))
"""
# The gathers of `late` do not depend on the loop, whose layers are gathered within it.
TWO_HOSTS = f"""{HERE}
import hashlib
import numpy as np

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
{MESH}
@jax.jit
def step(x, layers, late):
    x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ whole(layer)), None), x, layers)
    for layer in late:
        x = jnp.tanh(x @ whole(layer))
    return x

draw, width = np.random.default_rng(0), 256
def normal(*shape):
    return draw.normal(size=shape).astype(np.float32) / 16

x, layers = placed(normal(64, width), "fsdp"), placed(normal(24, width, width), None, "fsdp")
late = [placed(normal(width, width), "fsdp") for _ in range(12)]
seen = {{np.asarray(step(x, layers, late).addressable_shards[0].data).tobytes() for _ in range(100)}}
print("".join(sorted(hashlib.sha256(one).hexdigest() for one in seen)))
"""


def started(python: list[str], script: str, cache: Path, devices: int, *args: str) -> subprocess.Popen[str]:
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*python, "-c", script, *args], env=env, text=True, **pipes)  # type: ignore[call-overload]


def said(process: subprocess.Popen[str]) -> str:
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return said


def test_programs_with_collectives_in_loops_are_compiled_at_each_start(warm_python: list[str], tmp_path: Path):
    said(started(warm_python, ONE_PROCESS, tmp_path, 2))
    kept = {name for name in ("alone", "outside", "inside") if any(tmp_path.glob(f"jit_{name}-*"))}
    assert kept == {"alone", "outside"}, sorted(entry.name for entry in tmp_path.iterdir())


def test_a_collective_loses_its_order_outside_of_the_main_computation_alone():
    gather = "  g = f32[2] all-gather(x), dimensions={0}\n"
    assert not loses_order(f"ENTRY main {{\n{gather}}}\n")
    assert loses_order(f"body {{\n{gather}}}\n\nENTRY main {{\n  x = f32[] while(y), body=body\n}}\n")
    assert not loses_order("body {\n  g = f32[2] add(x, y)\n}\n")


@pytest.mark.full
def test_hosts_that_start_again_have_the_numbers_of_the_first_start(warm_python: list[str], tmp_path: Path):
    found = []
    for _ in range(2):
        held, address = reserved_port()
        with held:
            hosts = [started(warm_python, TWO_HOSTS, tmp_path, 1, address, str(process)) for process in range(2)]
            found.append([said(host).rsplit(maxsplit=1)[-1] for host in hosts])
    assert [len(one) for one in found[0]] == [64, 64]  # one result of each host in all of its steps
    assert found[0] == found[1]
