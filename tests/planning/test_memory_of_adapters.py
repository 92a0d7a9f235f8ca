"""What is planned for adapters, and for a reference that is held, are the bytes of the real state."""

import jax
import numpy as np
import pytest

from affinage.hardware.chips import named
from affinage.model import parse
from affinage.model.activations import batch_shapes
from affinage.model.preferred import preference_graph
from affinage.parallel import make_mesh
from affinage.planning.local import lay_out
from affinage.planning.memory import step_memory
from affinage.recipe.tuning import DpoSettings
from affinage.training.job import TrainJob
from affinage.training.program import Program
from tiny_models import LLAMA

LENGTH = 32


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_state_and_peak(lora: dict | None, tmp_path):
    told = {"steps": 1, "batch": 8, "sources": ["none"], "schedule": {"peak": 1, "floor": 0}, "reference": "held"}
    settings = DpoSettings.model_validate(told | {"lora": lora})
    graph, mesh = preference_graph(parse(LLAMA), settings, 2), {"fsdp": 2}
    planned = step_memory(lay_out(graph, settings, mesh, LENGTH, 2), settings, named("TPU v4"), "tpu")
    batch = {k: np.zeros(leaf.shape, leaf.dtype) for k, leaf in batch_shapes(graph, 8, LENGTH).items()}
    job = TrainJob(graph=graph, settings=settings, mesh=mesh, seed=0, feed=None, folder=tmp_path)
    state = Program(job, make_mesh(mesh, jax.devices()[:2]), batch).begin()

    def held(tree):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    found = (planned.weights, planned.frozen, planned.optimizer)
    assert found == (held(state.params), held(state.frozen), held(state.opt_state))
    if lora is not None:
        assert planned.optimizer < planned.frozen / 3 and planned.gradients < planned.frozen / 3
