"""A model sharded over a mesh scores and generates what it does on one device."""

from dataclasses import replace

import jax
import pytest

from affinage.evaluation.scoring import Scorer
from affinage.generation.decode import Generator, Request
from affinage.model.module import abstract_params, logical_axes
from affinage.parallel.mesh import make_mesh
from affinage.parallel.sharding import param_shardings
from tiny_models import tiny_llama


def test_scores_and_texts_are_those_of_one_device():
    model = tiny_llama(scale=3.0)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices())
    shardings = param_shardings(mesh, logical_axes(model.graph), abstract_params(model.graph))
    sharded = replace(model, params=jax.device_put(model.params, shardings), mesh=mesh)
    pairs = [([2, 270 + n, 280], [290 + n, 300]) for n in range(5)]
    expected = [value for value, _ in Scorer(model).score(pairs)]
    assert [value for value, _ in Scorer(sharded).score(pairs)] == pytest.approx(expected, abs=1e-4)
    prompts = [before for before, _ in pairs[:3]]
    request = Request(12, stop_ids=())
    assert Generator(sharded).generate(prompts, request) == Generator(model).generate(prompts, request)
    assert (
        "".join(Generator(sharded).stream(prompts[0], request))
        == Generator(model).generate(prompts[:1], request)[0].text
    )
