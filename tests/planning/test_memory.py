"""The plan's bytes against arrays that exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.errors import UserError
from affinage.hardware.chips import named
from affinage.model import parse
from affinage.model.activations import batch_shapes
from affinage.parallel import make_mesh
from affinage.planning.local import lay_out
from affinage.planning.memory import step_memory
from affinage.recipe.parallel import ParallelSettings
from affinage.recipe.training import PretrainSettings
from affinage.training.job import TrainJob
from affinage.training.program import Program

BLOCK = {
    "kind": "transformer_block",
    "in": "embed",
    "repeat": 4,
    "attention": {"heads": 4, "rope": {"theta": 10000}},
    "ffn": {"kind": "swiglu", "width": 64},
    "norm": {"kind": "rms"},
}
GRAPH = {
    "inputs": ["tokens"],
    "nodes": {
        "embed": {"kind": "embedding", "in": "tokens", "vocab": 128, "width": 32},
        "blocks": BLOCK,
        "norm": {"kind": "rms_norm", "in": "blocks"},
        "logits": {"kind": "unembed", "in": "norm", "tied": False},
        "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
    },
}
CONTEXT = 16


def settings(**changed):
    return PretrainSettings.model_validate(
        {"steps": 10, "batch": 16, "schedule": {"peak": 1e-3, "floor": 0.0}, "optimizer": {}} | changed
    )


@pytest.mark.parametrize(
    "mesh",
    [{"data": 8}, {"fsdp": 8}, {"tensor": 4, "data": 2}, {"fsdp": 4, "tensor": 2}, {"pipeline": 2, "fsdp": 4}],
    ids=str,
)
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_weights_and_moments_are_the_bytes_of_the_real_state(mesh, moments, tmp_path):
    chosen = settings(optimizer={"moments": moments}, precision={"params": moments})
    graph = parse(GRAPH)
    planned = step_memory(lay_out(graph, chosen, mesh, CONTEXT, 8), chosen, named("TPU v4"), "tpu")
    batch = {k: np.zeros(leaf.shape, leaf.dtype) for k, leaf in batch_shapes(graph, 16, CONTEXT).items()}
    job = TrainJob(graph=graph, settings=chosen, mesh=mesh, seed=0, feed=None, folder=tmp_path)
    state = Program(job, make_mesh(mesh, jax.devices()), batch).begin()

    def held(tree):
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == jax.devices()[-1]
        )

    assert planned.weights == held(state.params)
    assert planned.optimizer == held(state.opt_state)


@pytest.mark.parametrize("rest", [{}, {"pipeline": 2}], ids=str)
def test_of_split_rows_a_device_keeps_what_its_own_queries_see_of_all_keys(rest):
    chosen, graph, length = settings(attention="xla"), parse(GRAPH), 1024

    def kept(context, **parallel):
        mesh = {"data": 1, "context": context, **rest}
        split = lay_out(graph, chosen, mesh, length, context * rest.get("pipeline", 1), ParallelSettings(**parallel))
        return step_memory(split, chosen, named("TPU v4"), "tpu").activations

    probabilities = 16 * 4 * length * length * 4 * 2 // rest.get("pipeline", 1)  # rows, heads, pairs, layers, bfloat16
    assert kept(1) > probabilities
    assert kept(4) == pytest.approx(kept(1) / 4, rel=0.05)
    if not rest:
        assert kept(4, context_attention="ring") < kept(4) / 4


def test_an_adafactor_needs_less_than_two_moments():
    adam, adafactor = (settings(optimizer={"name": name}) for name in ("adamw", "adafactor"))
    graph = parse(GRAPH)

    def optimizer(chosen):
        return step_memory(lay_out(graph, chosen, {"data": 8}, CONTEXT, 8), chosen, named("TPU v4"), "tpu").optimizer

    assert optimizer(adafactor) < 0.6 * optimizer(adam)


def test_activations_shrink_with_what_is_split_and_with_accumulation():
    graph = parse(GRAPH)

    def kept(mesh, **changed):
        chosen = settings(**changed)
        memory = step_memory(lay_out(graph, chosen, mesh, CONTEXT, 8), chosen, named("TPU v4"), "tpu")
        return memory.transient

    one = kept({"data": 8})
    assert kept({"data": 8}, batch=32) > 1.8 * one
    assert kept({"data": 8}, batch=32, micro_batches=2) < 1.3 * one
    assert kept({"data": 4, "tensor": 2}, batch=8) < one  # the same rows a device, half of the hidden units
    assert kept({"data": 8}, precision={"compute": "float32"}) > one


@pytest.mark.parametrize("mesh", [{"data": 8}, {"tensor": 4, "context": 2}], ids=str)
def test_logits_are_whole_where_a_devices_part_of_them_is_small(mesh):
    rows, context, vocabulary = 8, 1024, 2**16  # logits of 2 GiB in all, of 256 MiB a device
    embed = GRAPH["nodes"]["embed"] | {"vocab": vocabulary}
    graph, chosen = parse({**GRAPH, "nodes": {**GRAPH["nodes"], "embed": embed}}), settings(batch=rows)

    def logits(mesh, devices):
        split = lay_out(graph, chosen, mesh, context, devices)
        return step_memory(split, chosen, named("TPU v4"), "tpu").logits

    assert logits(mesh, 8) >= 2**28
    assert logits({"data": 1}, 1) < 2**30  # 256 positions at a time


def test_bfloat16_is_what_a_tpu_computes_in():
    graph, chosen = parse(GRAPH), settings()
    layout = lay_out(graph, chosen, {"data": 8}, CONTEXT, 8)
    in_bfloat16 = step_memory(layout, chosen, named("TPU v4"), "tpu").activations
    assert in_bfloat16 < step_memory(layout, chosen, named("CPU"), "cpu").activations
    assert jnp.dtype(chosen.precision.params) == jnp.float32


@pytest.mark.parametrize(
    ("mesh", "changed", "what", "fix"),
    [
        ({"data": "auto"}, {"batch": 12}, "batch 12 does not divide", "8, 16"),
        ({"fsdp": 3}, {}, "3", ""),
        ({"tensor": 8}, {}, "heads = 4", "tensor = 4"),
        ({"data": 2}, {}, "2 devices, the slice 8", "auto"),
        ({"data": 2, "tensor": 2}, {}, "4 devices, the slice 8", "--set 'mesh={data: 4, tensor: 2}'"),
        ({"data": 2, "tensor": 2}, {}, "4 devices, the slice 8", "--set 'mesh={data: 2, fsdp: 2, tensor: 2}'"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_does(mesh, changed, what, fix):
    graph, chosen = parse(GRAPH), settings(**changed)
    with pytest.raises(UserError) as refused:
        layout = lay_out(graph, chosen, mesh, CONTEXT, 8)
        step_memory(layout, chosen, named("TPU v4"), "tpu")
    assert what in refused.value.what
    assert fix in refused.value.fix


@pytest.mark.parametrize(("stages", "rounds", "parts"), [(4, 1, 4), (2, 2, 4)])
def test_a_stage_keeps_its_layers_inputs_in_every_tick(stages, rounds, parts):
    parallel = ParallelSettings(remat="block", pipeline_rounds=rounds, pipeline_micro_batches=parts)
    chosen = settings(batch=64, precision={"compute": "bfloat16"})

    def kept(layers, context):
        nodes = {**GRAPH["nodes"], "blocks": {**BLOCK, "repeat": layers}}
        graph = parse({**GRAPH, "nodes": nodes})
        split = lay_out(graph, chosen, {"pipeline": stages, "data": 8 // stages}, context, 8, parallel)
        return step_memory(split, chosen, named("TPU v4"), "tpu").activations

    ticks, more_layers = rounds * parts + stages - 1, 8 // (stages * rounds)
    rows = 64 // (8 // stages) // parts
    # Of 8 layers more, what 16 positions more cost: the weights' part is not in it. The tick at hand has a copy.
    longer, shorter = (kept(16, context) - kept(8, context) for context in (32, 16))
    assert longer - shorter == (ticks + 1) * more_layers * rows * 16 * 32 * 2


@pytest.mark.parametrize("remat", ["none", "block"])
def test_the_weights_of_a_round_are_not_kept_in_every_tick(remat):
    wide = {**BLOCK, "ffn": {"kind": "swiglu", "width": 2048}}
    graph = parse({**GRAPH, "nodes": {**GRAPH["nodes"], "blocks": wide}})

    def of_four_more_micro_batches(rounds):
        held = []
        for parts in (4, 8):
            chosen = settings(batch=parts)
            parallel = ParallelSettings(remat=remat, pipeline_rounds=rounds, pipeline_micro_batches=parts)
            split = lay_out(graph, chosen, {"pipeline": 2}, 4, 2, parallel)
            held.append(step_memory(split, chosen, named("TPU v4"), "tpu").transient)
        return held[1] - held[0]

    assert of_four_more_micro_batches(2) < 1.1 * of_four_more_micro_batches(1)
