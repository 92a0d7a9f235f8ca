"""A model sharded over a mesh scores and generates what it does on one device."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from affinage.evaluation.scoring import Scorer
from affinage.generation.decode import Generator, Request
from affinage.model.module import abstract_params, logical_axes
from affinage.parallel import serving_layout
from tiny_models import tiny_llama

# The table as it is, and one with every line that generation reads moved to another axis of the mesh, in which the
# training's sequences are split.
SWAPPED = {
    "batch": ("data",),
    "sequence": ("fsdp", "context"),
    "residual": ("fsdp", "context"),
    "heads": ("fsdp",),
    "kv_heads": ("fsdp",),
    "ffn": ("fsdp",),
    "vocab": ("fsdp",),
    "embed": ("tensor",),
}


@pytest.mark.parametrize("replacements", [{}, SWAPPED], ids=["default", "swapped"])
def test_scores_and_texts_are_those_of_one_device(replacements):
    model = tiny_llama(scale=3.0)
    axes, abstract = logical_axes(model.graph), abstract_params(model.graph)
    layout, shardings = serving_layout({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices(), axes, abstract, replacements)
    sharded = replace(model, params=jax.device_put(model.params, shardings), layout=layout)
    up = sharded.params["blocks"]["ffn"]["up"]["kernel"].sharding.spec  # [layers, width, hidden]
    assert tuple(up) == ((None, "tensor", "fsdp") if replacements else (None, "fsdp", "tensor"))
    assert sharded.row_multiple == (2 if replacements else 4)
    assert sharded.place(np.zeros((4, 2), np.int32)).sharding.spec[0] == ("data" if replacements else ("data", "fsdp"))
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
