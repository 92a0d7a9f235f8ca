"""Programs that are read back from JAX's cache compute what they did when they were compiled."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def mesh():
    return jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

def whole(weights, mesh):
    return jax.lax.with_sharding_constraint(weights, NamedSharding(mesh, P()))

def placed(array, mesh, *axes):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(*axes)), lambda index: array[index])
"""

# The gathers of `late` do not depend on the loop, whose layers are gathered within it.
TWO_HOSTS = (
    HERE
    + """
import hashlib
import numpy as np
from affinage.hardware.devices import acquire

address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, process)
acquire()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
over, width = mesh(), 256

@jax.jit
def step(x, layers, late):
    x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ whole(layer, over)), None), x, layers)
    for layer in late:
        x = jnp.tanh(x @ whole(layer, over))
    return x

draw = np.random.default_rng(0)
def normal(*shape):
    return draw.normal(size=shape).astype(np.float32) / 16

x, layers = placed(normal(64, width), over, "fsdp"), placed(normal(24, width, width), over, None, "fsdp")
late = [placed(normal(width, width), over, "fsdp") for _ in range(12)]
seen = {np.asarray(step(x, layers, late).addressable_shards[0].data).tobytes() for _ in range(100)}
print("".join(sorted(hashlib.sha256(one).hexdigest() for one in seen)))
"""
)


def test_hosts_that_start_again_have_the_numbers_of_the_first_start(tmp_path):
    first, again = ([one.rsplit(maxsplit=1)[-1] for one in _two_hosts(tmp_path)] for _ in range(2))
    assert [len(one) for one in first] == [64, 64]  # one result of each host in all of its steps
    assert again == first


def _two_hosts(cache: Path) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = [_started(TWO_HOSTS, cache, 1, address, str(process)) for process in range(2)]
    return [_said(host) for host in hosts]


KEPT = (
    HERE
    + """
from affinage.hardware.devices import acquire
acquire()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
over, shown = mesh(), sys.argv[1]
x = jnp.ones((2, 8, 8))
if shown == "on one device":
    print(jax.jit(lambda x: jax.lax.scan(lambda c, w: (c @ w, None), x[0], x)[0])(x))
elif shown == "outside of loops":
    print(jax.jit(lambda x: whole(x, over) * 2)(placed(x, over, None, "fsdp")))
else:
    both = lambda x: jax.lax.scan(lambda c, w: (c @ whole(w, over), None), whole(x, over)[0], x)[0]
    print(jax.jit(both)(placed(x, over, None, "fsdp")))
"""
)


@pytest.mark.parametrize(("shown", "kept"), [("on one device", True), ("outside of loops", True), ("in a loop", False)])
def test_programs_with_collectives_in_loops_are_compiled_at_each_start(shown: str, kept: bool, tmp_path):
    _said(_started(KEPT, tmp_path, 2, shown))
    of_this = [entry.name for entry in tmp_path.iterdir() if "lambda" in entry.name]
    assert bool(of_this) is kept, sorted(entry.name for entry in tmp_path.iterdir())


def _started(script: str, cache: Path, devices: int, *args: str) -> subprocess.Popen[str]:
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script, *args], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _said(process: subprocess.Popen[str]) -> str:
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return said
