"""A step by its parts: together they are the gradient that the step takes, and they cover its time."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import tiny_graphs
from affinage.config.parallel import ParallelSettings
from affinage.model import apply, parse
from affinage.training.state import Purpose, random_key

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from step import PARTS, STEP, differentiated, measure, program_of, synthetic_batch


def program(graph, mesh, remat="none"):
    batch = tiny.RandomFeed().batch(0)
    made = program_of(graph, tiny.settings(), ParallelSettings(remat=remat), mesh, batch)
    return made, batch


@pytest.mark.parametrize(
    ("graph", "mesh", "remat"),
    [
        (tiny.graph(dropout=0.3, layers=1), {"fsdp": 2, "tensor": 2}, "block"),
        pytest.param(parse(tiny_graphs.moe(layers=1)), {"data": 1}, "none", marks=pytest.mark.full),
    ],
    ids=["dropout, split and recomputed", "experts"],
)
def test_the_parts_make_the_gradient_of_the_mean_loss(graph, mesh, remat):
    made, batch = program(graph, mesh, remat)
    params, put = made.begin().params, made.put(batch)
    forward, loss, backward = (jax.jit(part) for part in differentiated(made))
    values, pull = forward(params, put)
    grads = backward(pull, loss(values, params, put))
    call = dataclasses.replace(made.adapted_config, key=random_key(0, Purpose.DROPOUT))

    def mean(params):
        return apply(made.job.graph, params, put, call).values["loss"].mean()

    for ours, whole in zip(jax.tree.leaves(grads), jax.tree.leaves(jax.jit(jax.grad(mean))(params)), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_a_measurement_trains_and_has_as_many_repetitions_as_asked_for():
    made, batch = program(tiny.graph(layers=1), {"data": 1})
    found = measure(made, batch, 2)
    assert list(found) == [*PARTS, STEP]
    assert all(len(t.seconds) == 2 and t.mean > 0 and t.deviation >= 0 for t in found.values())


def test_a_synthetic_batch_is_rows_of_one_document_that_all_count():
    batch = synthetic_batch(tiny.graph(), 4, 16)
    assert batch["tokens"].shape == (4, 16) and 0 <= batch["tokens"].min() <= batch["tokens"].max() < tiny.VOCABULARY
    assert batch["loss_mask"].all() and not batch["segment_ids"].any()
    np.testing.assert_array_equal(batch["positions"][3], np.arange(16))
