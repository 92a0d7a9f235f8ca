"""Steps have the same losses and gradient norms on every mesh as on one device.

The quick tier takes each axis alone over two devices, and what splits a step in a way of its own. `full` has every
axis over eight devices, and every pair of axes, with and without accumulation, over twenty steps.
"""

import functools
import itertools
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tiny_graphs
from affinage.model import abstract_params, apply, logical_axes, parse
from affinage.model.apply_config import ApplyConfig
from affinage.parallel.sharding import MeshLayout, make_mesh, serving_layout
from affinage.planning.compiled import collectives_in
from affinage.training.step import replicas_of
from run_affinage import refused

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "unequal_stages"))

from unequal_stages import Group, GroupedTraining

AXES = ("data", "fsdp", "tensor", "expert", "context", "pipeline")
# What eight devices divide, but for the layers: only the pipeline alone has eight stages, which take long to compile.
MODELS = {"dense": meshes.graph("dense", heads=8), "moe": meshes.graph("moe", heads=8, experts=8)}
STAGES = {"dense": meshes.graph("dense", 8), "moe": meshes.graph("moe", 8)}
SMALL = {"dense": meshes.graph("dense", 2), "moe": meshes.graph("moe", 2)}
ROWS = 16
RING = {"context_attention": "ring"}
ON_THE_SEQUENCE = {"batch": ["data"], "sequence": ["fsdp", "context"], "residual": ["fsdp", "context", "tensor"]}


@pytest.mark.parametrize(("kind", "sizes", "parallel", "sent"), [
    pytest.param("dense", {"data": 2}, {}, "all-reduce", marks=pytest.mark.full),
    ("dense", {"fsdp": 2}, {}, "all-gather all-reduce"),
    ("dense", {"tensor": 2}, {}, "all-reduce"),
    ("dense", {"context": 2}, {}, "all-gather all-reduce"),
    ("dense", {"context": 2}, RING, "all-reduce collective-permute"),
    ("moe", {"expert": 2}, {}, "all-gather all-reduce all-to-all"),
    ("dense", {"pipeline": 2}, {}, "all-gather all-reduce collective-permute"),
], ids=str)  # fmt: skip
def test_an_axis_of_two_sends_what_it_needs_and_computes_the_same(kind, sizes, parallel, sent):
    one = meshes.program(SMALL[kind], sizes, parallel=parallel)
    step = meshes.compiled(one)
    meshes.assert_same_as_on_one_device(one, 3, step)
    assert set(collectives_in(step.as_text())) == set(sent.split())
    # The gradient of looked-up vectors is added up where their rows are: embedding and head are not on every stage.
    assert not re.search(r" all-gather\(.*transpose\(jvp\(embed\)\)", step.as_text())
    # The new state is written where the old one is: memory is planned so.
    state = jax.tree.leaves(one.abstract)
    bytes_of_a_device = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in state)
    assert step.memory_analysis().alias_size_in_bytes >= bytes_of_a_device


def test_replicas_with_sums_of_their_own_are_one_training():
    """They add up the gradients of their own micro-batches, and nothing is sent in between."""
    described = SMALL["dense"].to_dict()
    nodes = described["nodes"] | {"blocks": {**described["nodes"]["blocks"], "dropout": 0.1}}
    one = meshes.program(parse({**described, "nodes": nodes}), {"data": 2}, micro_batches=2, parallel={})
    step = meshes.compiled(one)
    meshes.assert_same_as_on_one_device(one, 3, step)
    assert replicas_of(one.job.graph, one.apply_config) == 2
    assert not collectives_in(meshes.loops_of(step.as_text())) and collectives_in(step.as_text())["all-reduce"]


SPLITS: list[dict[str, int]] = [{axis: 8} for axis in AXES]
SPLITS += [dict(zip(axes, (4, 2), strict=True)) for axes in itertools.combinations(AXES, 2)]


@pytest.mark.full
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_every_axis_alone_and_every_pair(sizes: dict[str, int], kind: str):
    model = (STAGES if sizes == {"pipeline": 8} else MODELS)[kind]
    micro_batches = 1 + (SPLITS.index(sizes) + (kind == "moe")) % 2  # one model accumulates, the other does not
    one = meshes.program(model, sizes, micro_batches=micro_batches, rows=ROWS, parallel={})
    meshes.assert_same_as_on_one_device(one, 20)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "sizes", "parallel", "more"), [
    # A window of 10 over parts of 8 positions: two of the three turns of the ring.
    ("window", {"context": 4, "tensor": 2}, RING, {}),
    # One row: weights are split over devices that share no row of the batch.
    ("dense", {"fsdp": 2, "context": 2, "tensor": 2}, {"sharding": ON_THE_SEQUENCE}, {"rows": 1}),
    ("capacity", {"data": 2, "expert": 2}, {}, {"micro_batches": 4, "rows": ROWS}),
    ("dense", {"pipeline": 2, "context": 2, "data": 2}, RING, {}),
    ("moe", {"pipeline": 2}, {"pipeline_rounds": 2, "remat": "dots"}, {}),
    ("moe", {"pipeline": 2, "data": 2, "tensor": 2}, {"remat": "block"}, {"micro_batches": 2}),
], ids=str)  # fmt: skip
def test_what_is_split_in_other_ways(kind: str, sizes: dict, parallel: dict, more: dict):
    model = {"window": meshes.graph("dense", window=10), "capacity": meshes.graph("moe", capacity_factor=1.0)}
    one = meshes.program(model.get(kind, MODELS.get(kind)), sizes, parallel=parallel, **more)
    meshes.assert_same_as_on_one_device(one, 20)


@pytest.mark.full
def test_a_pipeline_in_bfloat16_computes_what_one_device_does():
    """On processors, XLA's compiler can end the process over a pipeline's sums in bfloat16."""
    low = {"parallel": {}, "precision": {"compute": "bfloat16"}}
    found, expected = (meshes.run(meshes.program(SMALL["dense"], sizes, **low), 5) for sizes in ({"pipeline": 2}, {}))
    np.testing.assert_allclose(found, expected, rtol=2e-2)


@pytest.mark.parametrize(("sizes", "parallel", "named"), [
    ({"pipeline": 3}, {}, r"4 layers of `blocks`.*3 stages.*`repeat: 3 or 6`"),
    ({"pipeline": 2}, {"pipeline_rounds": 4}, "2 stages of 4 rounds.*`repeat: 8`"),
    ({"pipeline": 2}, {"pipeline_micro_batches": 3}, "3 micro-batches.*2 or 4"),
    ({"context": 3}, {}, "context of 32.*30 or 33"),
    ({"fsdp": 3}, {}, "batch 8.*6 or 9"),
    ({"fsdp": 2}, {"sharding": {"sequence": ["fsdp"]}}, "`batch` and `sequence`"),
    ({"data": 16}, {}, "data 16 .* 8 devices"),
    ({"data": "auto", "tensor": 3}, {}, "divide the 8"),
    ({"data": "auto", "fsdp": "auto"}, {}, "one axis"),
    ({"data": 1}, {"xla_flags": {"xla_cpu_faster": True}}, "'xla_cpu_faster'"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(sizes: dict, parallel: dict, named: str):
    program = functools.partial(meshes.program, meshes.graph("dense"), sizes, parallel=parallel)
    call = program().compile_training if "xla_flags" in parallel else program  # XLA alone knows its options
    mistake = refused(call, match=f"(?s){named}")
    assert mistake.where and mistake.fix


REMATS = ["block", {"keep": ["query", "ffn_up"]}, pytest.param("dots", marks=pytest.mark.full)]


@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_the_step_is_the_same_with_less_memory(remat):
    plain, one = (meshes.program(SMALL["dense"], {"data": 1}, parallel=parallel) for parallel in ({}, {"remat": remat}))
    step = meshes.compiled(one)
    meshes.assert_same_as_on_one_device(one, 3, step)
    less, more = (program.memory_analysis().temp_size_in_bytes for program in (step, meshes.compiled(plain)))
    assert less < more


# ---- the sharding table: what is split, what wins a collision, where a model is served


def mesh(**sizes: int | str) -> jax.sharding.Mesh:
    return make_mesh(sizes, jax.devices())


def test_auto_takes_the_devices_that_are_left_and_one_host_may_leave_some():
    assert mesh(data="auto", tensor=2).shape["data"] == 4
    assert mesh(data=2).size == 2


@pytest.mark.parametrize(("axes", "expected"), [
    (("embed", "ffn"), P("fsdp", "tensor")),
    (("ffn", "embed"), P("tensor", "fsdp")),
    (("batch", "sequence", "embed"), P(("data", "fsdp"))),  # the rows have fsdp first
    (("layers", "embed", "heads", "head_dim"), P(None, "fsdp", "tensor")),
    (("vocab", "ffn"), P("tensor")),  # tensor splits once
    ((None, "head_dim"), P()),
], ids=str)  # fmt: skip
def test_the_table(axes: tuple, expected: P):
    assert MeshLayout(mesh(data=2, fsdp=2, tensor=2)).spec(axes) == expected
    assert MeshLayout(mesh(pipeline=1)).spec(axes) == P(), "axes of size one are left out"


def test_a_size_that_does_not_divide_names_the_nearest_that_do():
    weights = {"w": jax.ShapeDtypeStruct((16, 6), jnp.float32)}
    error = refused(MeshLayout(mesh(tensor=4)).param_shardings, {"w": ("embed", "heads")}, weights)
    for named in ("heads = 6 of w", "tensor = 4", "4 or 8"):
        assert named in str(error)
    assert "16 or 32" in str(refused(MeshLayout(mesh(data=2, fsdp=4)).check_rows, 20, 2, match="batch 20"))
    MeshLayout(mesh(data=2, fsdp=4)).check_rows(32, 2)
    refused(MeshLayout(mesh()).check_rows, 3, 2, match="batch 3 of all devices does not divide over 2 micro-batches")


def test_a_model_of_stages_is_served_with_its_weights_split_instead():
    graph = meshes.graph("dense", 1)
    params, batch = tiny_graphs.random_params(graph), {"tokens": jnp.asarray(meshes.Feed().batch(0)["tokens"])}
    sizes = {"pipeline": 2, "context": 2, "tensor": 2}
    layout, shardings = serving_layout(sizes, jax.devices(), logical_axes(graph), abstract_params(graph), {})
    assert {axis: size for axis, size in layout.mesh.shape.items() if size > 1} == {"fsdp": 4, "tensor": 2}
    call = ApplyConfig(until=graph.logits)
    run = jax.jit(lambda params: apply(graph, params, batch, call).values[graph.logits].array())
    np.testing.assert_allclose(run(jax.device_put(params, shardings)), run(params), atol=1e-5)


@pytest.mark.full
def test_steps_of_stages_of_unequal_shape_equal_those_of_one_program_and_a_sick_one_is_left_out_by_every_stage():
    """Two layers that differ, the first with dropout, on two devices and on one."""
    nodes, devices = meshes.graph("dense", 1).to_dict()["nodes"], jax.devices()
    early = nodes["blocks"] | {"dropout": 0.1, "ffn": {"kind": "swiglu", "width": 48}}
    nodes |= {"early": early, "blocks": nodes["blocks"] | {"in": "early"}}
    model = parse({"inputs": ["tokens"], "nodes": nodes})
    ends = ("early", make_mesh({"data": 2}, devices[:2])), ("loss", make_mesh({"data": 1}, devices[2:3]))
    settings = meshes.program(model, {"data": 1}, micro_batches=2, parallel={}).job.settings
    two = GroupedTraining(model, settings, [Group(*end) for end in ends], seed=3)
    states, expected = two.begin(), meshes.on_one_device(model, 2)
    for number in range(2):
        states, found = two.step(states, meshes.Feed().batch(number))
        np.testing.assert_allclose([found["loss"], found["grad_norm"]], expected[number], rtol=1e-5)
    assert len({device for each in states for device in each.step.sharding.device_set}) == 3

    scale = states[1].params["norm"]["scale"].at[0].set(np.inf)
    states[1] = states[1]._replace(params={**states[1].params, "norm": {"scale": scale}})
    before = [jax.device_get(state.params) for state in states]
    after, metrics = two.step(states, meshes.Feed().batch(0))
    assert float(metrics["skipped"]) == 1
    for old, new in zip(before, after, strict=True):
        jax.tree.map(np.testing.assert_array_equal, old, jax.device_get(new.params))
