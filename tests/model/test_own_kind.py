"""A kind of node that a user writes in a file of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import Field

import tiny_graphs
from affinage.errors import UserError
from affinage.model import Call, apply, init_params, logical_axes, parse
from affinage.model.kind import KINDS, NodeKind, node_kind
from affinage.model.parameter import Parameter
from affinage.model.shape import expect_sequence, sequence_of


@pytest.fixture
def gate():
    @node_kind("test_gate")
    class Gate(NodeKind):
        """Two inputs, mixed by a learned weight per channel."""

        takes = ("first", "second")
        start: float = Field(default=0.5, ge=0, le=1)

        def shape(self, inputs):
            return sequence_of(expect_sequence(inputs[0]))

        def parameters(self, inputs):
            return {"mix": Parameter((inputs[0].width,), ("embed",), init="ones", decay=False)}

        def apply(self, params, inputs, context):
            mix = self.start * params["mix"][None, None]
            return mix * inputs[0] + (1 - mix) * inputs[1]

    yield Gate
    del KINDS["test_gate"]


def test_it_stands_in_a_graph_like_any_other(gate):
    model = tiny_graphs.llama(layers=1)
    model["nodes"]["mixed"] = {"kind": "test_gate", "in": ["blocks", "embed"], "start": 0.25}
    model["nodes"]["norm"]["in"] = "mixed"
    graph = parse(model)
    assert parse(graph.to_dict()) == graph
    params = init_params(graph, jax.random.key(0))
    assert logical_axes(graph)["mixed"] == {"mix": ("embed",)}
    values = apply(graph, params, {"tokens": jnp.zeros((1, 3), jnp.int32)}, Call()).values
    np.testing.assert_allclose(values["mixed"], 0.25 * values["blocks"] + 0.75 * values["embed"], rtol=1e-6)


def test_its_settings_are_checked_like_any_other(gate):
    model = tiny_graphs.llama()
    model["nodes"]["mixed"] = {"kind": "test_gate", "in": ["blocks", "embed"], "start": 2}
    with pytest.raises(UserError, match="at most 1"):
        parse(model)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="already registered"):

        @node_kind("rms_norm")
        class Mine(NodeKind):
            pass
