"""Layers that are updated one by one are updated as together, wherever the mathematics is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.errors import UserError
from affinage.model import parse
from affinage.parallel import make_mesh
from affinage.recipe.load import load_recipe
from affinage.recipe.parallel import ParallelSettings
from affinage.recipe.training import PretrainSettings
from affinage.training.job import TrainJob
from affinage.training.program import Program

ROWS, LENGTH, STEPS = 8, 16, 4
BLOCK = {
    "kind": "transformer_block",
    "in": "embed",
    "repeat": 3,
    "attention": {"heads": 4, "rope": {"theta": 10000}},
    "ffn": {"kind": "swiglu", "width": 64},
    "norm": {"kind": "rms"},
}
SPLIT_SEQUENCE = {"sharding": {"batch": ["data"], "sequence": ["fsdp"], "residual": ["fsdp", "tensor"]}}


def graph(tied, **block):
    return parse(
        {
            "inputs": ["tokens"],
            "nodes": {
                "embed": {"kind": "embedding", "in": "tokens", "vocab": 128, "width": 32},
                "blocks": BLOCK | block,
                "norm": {"kind": "rms_norm", "in": "blocks"},
                "logits": {"kind": "unembed", "in": "norm", "tied": tied},
                "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
            },
        }
    )


def trained(folder, update, mesh, parallel=None, tied=False, block=None, clip=1e9, **changed):
    """Metrics of each step, and the last state."""
    settings = PretrainSettings.model_validate(
        {
            "steps": 10,
            "batch": ROWS,
            "update": update,
            "schedule": {"peak": 1e-2, "floor": 0.0},
            "optimizer": {"clip_norm": clip, **changed.pop("optimizer", {})},
            **changed,
        }
    )
    draw = np.random.default_rng(0)
    batches = [{"tokens": draw.integers(0, 128, (ROWS, LENGTH), np.int32)} for _ in range(STEPS)]
    job = TrainJob(
        graph=graph(tied, **(block or {})),
        settings=settings,
        mesh=mesh,
        seed=0,
        feed=None,
        folder=folder,
        parallel=ParallelSettings.model_validate(parallel or {}),
    )
    program = Program(job, make_mesh(mesh, jax.devices()), batches[0])
    step, state, told = program.compile_training(), program.begin(), []
    for batch in batches:
        state, metrics = step(state, program.put(batch))
        told.append({name: float(value) for name, value in metrics.items()})
    return told, state


@pytest.mark.parametrize(
    ("mesh", "parallel", "changed"),
    [
        ({"data": 1}, {}, {}),
        ({"data": 1}, {}, {"tied": "embed", "block": {"dropout": 0.1}, "optimizer": {"name": "lion"}}),
        ({"fsdp": 2, "tensor": 4}, SPLIT_SEQUENCE, {"optimizer": {"moments": "bfloat16"}}),
    ],
    ids=["alone", "tied, dropout, lion", "split over eight"],
)
def test_it_is_the_plain_step_where_nothing_is_clipped(mesh, parallel, changed, tmp_path):
    plain, before = trained(tmp_path, "whole", mesh, parallel, **dict(changed))
    ours, after = trained(tmp_path, "layerwise", mesh, parallel, **dict(changed))
    for one, other in zip(plain, ours, strict=True):
        assert other.pop("torn") == 0.0 and one.keys() == other.keys()
        for name in one:
            assert other[name] == pytest.approx(one[name], rel=2e-5), name
    assert jax.tree.structure(before) == jax.tree.structure(after)
    if changed.get("optimizer") != {"name": "lion"}:  # a sign turns rounding into a whole step
        for one, other in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
            np.testing.assert_allclose(other, one, atol=2e-4 if changed else 1e-5)
            assert other.sharding == one.sharding


SHRUNK = (
    "rows.context=32",
    # Vectors of a usual length: with the short ones of width 64, norms make forty times as much of rounding.
    "model.nodes.embed={width: 64, vocab: 128, init_std: 0.5}",
    "model.nodes.blocks={repeat: 4, attention: {heads: 4}, ffn: {width: 128}}",
    "pretrain.steps=20",
    "pretrain.schedule={peak: 3.0e-3, floor: 1.0e-3, warmup_steps: 2}",
)


FLOAT32 = ("pretrain.precision={params: float32, compute: float32}", "pretrain.optimizer.moments=float32")


@pytest.mark.parametrize(
    ("precision", "of_losses", "of_norms"),
    [((), 1e-3, 2e-3), (FLOAT32, 1e-5, 1e-5)],  # bfloat16 has three digits
    ids=["bfloat16", "float32"],
)
def test_all_that_makes_room_trains_over_eight_devices_as_on_one(precision, of_losses, of_norms, tmp_path):
    """The recipe of the capacities: one row whose sequence is split, layers one by one; its bfloat16, and float32."""
    recipe = load_recipe("capacity", SHRUNK + precision).recipe
    batch = {"tokens": np.random.default_rng(0).integers(0, 128, (1, 32), np.int32)}
    seen = []
    for mesh in ({"data": 1}, {"fsdp": 4, "tensor": 2}):
        job = TrainJob(
            graph=parse(recipe.model),
            settings=recipe.pretrain,
            mesh=mesh,
            seed=0,
            feed=None,
            folder=tmp_path,
            parallel=recipe.parallel,
        )
        program = Program(job, make_mesh(mesh, jax.devices()), batch)
        step, state, told = program.compile_training(), program.begin(), []
        for _ in range(20):
            state, metrics = step(state, program.put(batch))
            told.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        seen.append(np.array(told).T)
    for leaf in jax.tree.leaves(state.params["blocks"]):
        assert leaf.dtype == (jnp.float32 if precision else jnp.bfloat16)
        if leaf.ndim > 2:  # of the matrices every device holds an eighth, in all layers
            assert leaf.addressable_shards[0].data.size == leaf.size // 8
    (losses, norms), (split_losses, split_norms) = seen
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_allclose(split_losses, losses, rtol=of_losses)
    np.testing.assert_allclose(split_norms, norms, rtol=of_norms)


def test_each_layer_is_clipped_by_its_own_norm(tmp_path):
    (one, *_), _ = trained(tmp_path, "layerwise", {"data": 1}, clip=1e-3)
    (whole, *_), _ = trained(tmp_path, "whole", {"data": 1}, clip=1e-3)
    assert one["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)  # before clipping
    assert trained(tmp_path, "layerwise", {"data": 1}, clip=1e-3)[0][-1]["loss"] < one["loss"] + 0.1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"micro_batches": 2}, "micro_batches is 2"),
        ({"optimizer": {"name": "muon"}}, "the optimizer is muon"),
        ({"block": {"ffn": {"kind": "moe", "experts": 4, "top_k": 2, "width": 16}}}, "mixture of experts"),
        ({"parallel": {"remat": "dots"}}, "whatever `dots` would keep"),
    ],
)
def test_what_it_does_not_go_with_is_said(changed, why, tmp_path):
    with pytest.raises(UserError, match=why):
        trained(tmp_path, "layerwise", {"data": 1}, **changed)
