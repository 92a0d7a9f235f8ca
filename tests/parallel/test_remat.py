"""Computing activations again changes the memory of a step and not its numbers."""

import meshes
import pytest
from jax.experimental import topologies

from affinage.errors import UserError
from affinage.parallel import make_mesh
from affinage.training.trainer import Trainer

MODEL = meshes.graph("dense", layers=2)


def temporary(step) -> int:
    return step.memory_analysis().temp_size_in_bytes


REMATS = ["block", {"keep": ["query", "ffn_up"]}, *(pytest.param(r, marks=pytest.mark.full) for r in ("dots", "full"))]


@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_the_step_is_the_same_with_less_memory(remat):
    plain, one = (meshes.program(MODEL, {"data": 1}, parallel=parallel) for parallel in ({}, {"remat": remat}))
    step = meshes.compiled(one)
    meshes.assert_same_as_on_one_device(one, 3, step)
    assert temporary(step) < temporary(meshes.compiled(plain))


@pytest.mark.parametrize(
    ("parallel", "named"),
    [({"remat": {"offload": ["query"]}}, "memory"), ({"xla_flags": {"xla_cpu_faster": True}}, "'xla_cpu_faster'")],
    ids=str,
)
def test_what_a_cpu_cannot_do_is_refused(parallel, named):
    with pytest.raises(UserError, match=named) as refused:
        meshes.program(MODEL, {"data": 1}, parallel=parallel).compile_training()
    assert refused.value.fix


@pytest.mark.full
def test_a_tpu_offloads_by_name():
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    job = meshes.program(MODEL, {"data": 1}, parallel={"remat": {"offload": ["block_input"]}}).job
    program = Trainer(job, make_mesh({"data": 4}, devices), meshes.Feed().batch(0))
    memory = program.compile_training().memory_analysis()
    assert memory.host_temp_size_in_bytes >= 2 * 2 * 32 * 32 * 2  # layers, rows of a device, positions, width, bfloat16
