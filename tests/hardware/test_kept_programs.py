"""Only programs that read back as they were compiled are kept in JAX's cache."""

import os
import subprocess
from pathlib import Path

from affinage.hardware.kept_programs import loses_order

COMPILES = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from affinage.hardware.devices import acquire

acquire()
over = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
def whole(weights): return jax.lax.with_sharding_constraint(weights, NamedSharding(over, P()))
x = jnp.ones((2, 8, 8))
split = jax.device_put(x, NamedSharding(over, P(None, "fsdp")))
def alone(x): return jax.lax.scan(lambda c, w: (c @ w, None), x[0], x)[0]
def outside(x): return whole(x) * 2
def inside(x): return jax.lax.scan(lambda c, w: (c @ whole(w), None), whole(x)[0], x)[0]
for step, array in ((alone, x), (outside, split), (inside, split)):
    jax.block_until_ready(jax.jit(step)(array))
"""


def test_programs_with_collectives_in_loops_are_compiled_at_each_start(warm_python: list[str], tmp_path: Path):
    two = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "XLA_FLAGS": two}
    subprocess.run([*warm_python, "-c", COMPILES], env=environment, check=True, timeout=300)
    kept = {name for name in ("alone", "outside", "inside") if any(tmp_path.glob(f"jit_{name}-*"))}
    assert kept == {"alone", "outside"}, sorted(entry.name for entry in tmp_path.iterdir())


def test_a_collective_loses_its_order_outside_of_the_main_computation_alone():
    gather = "  g = f32[2] all-gather(x), dimensions={0}\n"
    assert not loses_order(f"ENTRY main {{\n{gather}}}\n")
    assert loses_order(f"body {{\n{gather}}}\n\nENTRY main {{\n  x = f32[] while(y), body=body\n}}\n")
    assert not loses_order("body {\n  g = f32[2] add(x, y)\n}\n")
