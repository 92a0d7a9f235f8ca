"""Computing activations again changes the memory of a step and not its numbers."""

import meshes
import pytest

from affinage.errors import UserError

MODEL = meshes.graph("dense", layers=2)


def temporary(step) -> int:
    return step.memory_analysis().temp_size_in_bytes


REMATS = ["block", {"keep": ["query", "ffn_up"]}, pytest.param("dots", marks=pytest.mark.full)]


@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_the_step_is_the_same_with_less_memory(remat):
    plain, one = (meshes.program(MODEL, {"data": 1}, parallel=parallel) for parallel in ({}, {"remat": remat}))
    step = meshes.compiled(one)
    meshes.assert_same_as_on_one_device(one, 3, step)
    assert temporary(step) < temporary(meshes.compiled(plain))


def test_an_option_that_xla_does_not_have_is_refused():
    with pytest.raises(UserError, match="'xla_cpu_faster'") as refused:
        meshes.program(MODEL, {"data": 1}, parallel={"xla_flags": {"xla_cpu_faster": True}}).compile_training()
    assert refused.value.fix
