"""A pipeline whose matrices are multiplied in bfloat16: on CPUs XLA ended the process over it."""

from dataclasses import replace

import meshes
import numpy as np

from affinage.recipe.training import PrecisionSettings
from affinage.training.program import Program


def test_it_computes_what_one_device_does():
    def in_bfloat16(sizes: dict[str, int]) -> Program:
        program = meshes.program(meshes.graph("dense", layers=2), sizes, parallel={})
        changed = {"precision": PrecisionSettings(compute="bfloat16")}
        return replace(program, job=replace(program.job, settings=program.job.settings.model_copy(update=changed)))

    one, two = (meshes.run(in_bfloat16(sizes), 5) for sizes in ({"data": 1}, {"pipeline": 2}))
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, rtol=2e-2, err_msg=name)
