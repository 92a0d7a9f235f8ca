"""Experts that lie on several devices are planned as one of these computes them."""

import math

import jax
import jax.extend
import jax.numpy as jnp
import pytest

import tiny_graphs
from affinage.config.parallel import ParallelSettings
from affinage.config.training import PretrainSettings
from affinage.hardware.slices import find_slice
from affinage.model import ApplyConfig, abstract_params, apply, parse
from affinage.parallel import MeshLayout, make_mesh
from affinage.planning.estimate import step_memory
from affinage.planning.per_device import per_device, sent_per_token

EXPERTS, CHOICES, WIDTH, HIDDEN, ROWS, LENGTH = 4, 2, 32, 64, 8, 32
SETTINGS = PretrainSettings.model_validate(
    {
        "steps": 10,
        "batch_size": ROWS,
        "schedule": {"peak_lr": 1e-3, "min_lr": 0.0},
        "precision": {"compute": "bfloat16"},
    }
)


def graph(capacity_factor=None, experts=EXPERTS):
    return parse(tiny_graphs.moe(capacity_factor=capacity_factor, experts=experts, top_k=CHOICES, width=HIDDEN))


def products(jaxpr):
    """Shapes of what experts multiply, in the order of a program."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("ragged_dot"):
            found.append([atom.aval.shape for atom in equation.invars[:2]])
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found += products(getattr(inner, "jaxpr", inner))
    return found


def forward(graph, layout, rows, axes=()):
    tokens = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)
    call = ApplyConfig(platform="tpu", attention="xla", layout=layout)
    run = jax.make_jaxpr(lambda params, tokens: apply(graph, params, {"tokens": tokens}, call).values, axis_env=axes)
    return run(abstract_params(graph), tokens).jaxpr


def divided(graph, mesh):
    settings = SETTINGS.model_copy(update={"attention": "xla"})
    return per_device(graph, settings, mesh, LENGTH, find_slice("v4-16"), ParallelSettings())


def test_the_products_are_those_of_each_device_of_a_run():
    owners = 2
    mesh = {"data": 8 // owners, "expert": owners}
    run = products(forward(graph(), MeshLayout(make_mesh(mesh, jax.devices())), ROWS))
    sent = ROWS // 8 * LENGTH * CHOICES
    assert run[0] == [(owners * sent, WIDTH), (EXPERTS // owners, WIDTH, HIDDEN)]
    # Of a product of groups every row is multiplied with one of them.
    counted = sum(2 * rows * math.prod(kernel[1:]) for (rows, _), kernel in run)
    ops = [op for op in divided(graph(), mesh).traced.ops if op.kind == "ragged_dot_general"]
    assert len(ops) == 3 * len(run)
    assert sum(op.flops * op.times for op in ops if "transpose" not in op.scope) >= counted


def test_slots_of_a_capacity_take_the_same_memory_wherever_the_experts_are():
    def activations(mesh):
        return step_memory(divided(graph(1.0, experts=8), mesh)).activations

    assert activations({"expert": 8}) == pytest.approx(activations({"data": 8}), rel=0.01)


@pytest.mark.parametrize(("capacity_factor", "rows"), [(1.0, CHOICES), (2.0, EXPERTS), (None, 4 * CHOICES)])
def test_between_owners_goes_what_their_buffers_hold(capacity_factor, rows):
    ffn = graph(capacity_factor)["blocks"].layer.ffn
    assert sent_per_token(ffn, LENGTH, owners=4) == rows
