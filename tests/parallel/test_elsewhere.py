"""What a pipeline trained goes on, and is used, on other meshes."""

import contextlib
import dataclasses
import itertools
import json

import jax
import meshes
import numpy as np
import pytest

from affinage.checkpoint import CheckpointStore
from affinage.model import abstract_params, apply, logical_axes
from affinage.model.call import Call
from affinage.parallel import serving_layout
from affinage.training import train


class HeldOut:
    bytes = 1000

    def __iter__(self):
        return iter([meshes.Feed().batch(90), meshes.Feed().batch(91)])


def trained(folder, sizes, steps, until=None):
    """Lines of metrics.jsonl of a run to `until`, whose schedule is one of `steps`."""
    job = meshes.program(meshes.graph("moe"), sizes, parallel={}).job
    settings = job.settings.model_copy(update={"steps": steps, "validate_every": 2, "log_every": 1})
    settings = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"every_steps": 2})})

    def stop(step, state):
        if step == until:
            raise KeyboardInterrupt

    job = dataclasses.replace(
        job, settings=settings, folder=folder, validation={"held": HeldOut()}, on_step=(stop,), mesh=sizes
    )
    with contextlib.suppress(KeyboardInterrupt):
        train(job)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_and_is_used_on_another_mesh(tmp_path):
    expected = trained(tmp_path / "one", {"data": 1}, 4)
    trained(tmp_path / "moved", {"pipeline": 2, "data": 2}, 4, until=3)
    found = trained(tmp_path / "moved", {"fsdp": 2, "expert": 2}, 4)
    for a, b in itertools.zip_longest(found, expected):
        assert a["step"] == b["step"]
        if "validation" in b:
            assert a["validation"]["held"]["loss"] == pytest.approx(b["validation"]["held"]["loss"], rel=1e-5)
        else:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)

    graph = meshes.graph("moe")
    axes, abstract = logical_axes(graph), abstract_params(graph)
    logits = []
    for sizes in ({"data": 1}, {"pipeline": 2, "context": 2, "tensor": 2}):
        layout, shardings = serving_layout(sizes, jax.devices(), axes, abstract)
        like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
        )
        params = CheckpointStore(tmp_path / "moved" / "checkpoints").restore_params(None, like)
        batch = {"tokens": meshes.Feed().batch(0)["tokens"]}
        outputs = apply(graph, params, jax.tree.map(jax.numpy.asarray, batch), Call(until=graph.logits))
        logits.append(np.asarray(outputs.values[graph.logits].array()))
    used = {"fsdp": 4, "tensor": 2, "pipeline": 1, "context": 1}
    assert dict(layout.mesh.shape) | used == dict(layout.mesh.shape)
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
