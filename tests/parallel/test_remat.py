"""Computing activations again changes the memory of a step and not its numbers."""

import dataclasses

import jax
import jax.extend.core
import meshes
import pytest
from jax.experimental import topologies

from affinage.errors import UserError
from affinage.model.scans import parts_of_scan
from affinage.parallel import Spmd, make_mesh
from affinage.training.program import Program

MODEL = meshes.graph("dense", layers=2)


@pytest.mark.parametrize("remat", ["dots", "full", {"keep": ["query", "ffn_up"]}], ids=str)
def test_the_step_is_the_same(remat):
    meshes.assert_same_as_on_one_device(meshes.program(MODEL, {"data": 1}, parallel={"remat": remat}), 3)


class Traced(Spmd):
    """Traces a step in place of compiling it."""

    def compile_training(self, step, state, batch):
        return jax.make_jaxpr(step)(state, batch)


def kept(remat) -> int:
    """Bytes that the scan over the layers hands to the backward pass."""
    one = meshes.program(MODEL, {"data": 1}, parallel={"remat": remat})
    one = dataclasses.replace(one, job=dataclasses.replace(one.job, strategy=Traced()))
    scans = [eqn for eqn in _equations(one.compile_training().jaxpr) if eqn.primitive.name == "scan"]
    (forward,) = (eqn for eqn in scans if not eqn.params["reverse"])
    return sum(v.aval.size * v.aval.dtype.itemsize for v in forward.outvars[parts_of_scan(forward.params)[1] :])


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def test_less_is_kept_the_more_is_computed_again():
    sizes = [kept(remat) for remat in ("none", "dots", {"keep": ["query"]}, "block")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


def test_a_cpu_has_nowhere_to_offload_to():
    with pytest.raises(UserError, match="no other memory"):
        meshes.program(MODEL, {"data": 1}, parallel={"remat": {"offload": ["query"]}}).compile_training()


def test_options_for_xla_are_passed_on_and_wrong_ones_told():
    meshes.program(MODEL, {"data": 2}, parallel={"xla_flags": {"xla_cpu_enable_fast_min_max": True}}).compile_training()
    with pytest.raises(UserError, match="XLA has no option 'xla_cpu_faster'"):
        meshes.program(MODEL, {"data": 1}, parallel={"xla_flags": {"xla_cpu_faster": True}}).compile_training()


def test_a_tpu_offloads_by_name():
    pytest.importorskip("libtpu")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    job = meshes.program(MODEL, {"data": 1}, parallel={"remat": {"offload": ["block_input"]}}).job
    program = Program(job, make_mesh({"data": 4}, devices), meshes.Feed().batch(0))
    memory = program.compile_training().memory_analysis()
    assert memory.host_temp_size_in_bytes >= 2 * 2 * 32 * 32 * 2  # layers, rows of a device, positions, width, bfloat16
