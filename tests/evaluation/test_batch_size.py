"""Rows of a forward pass are as many as fit, by the planner's estimate, which is near the compiler's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from affinage.evaluation import batch_size
from affinage.evaluation.batch_size import MOST, bytes_of_a_row, rows_that_fit, shorter_rows_that_fit
from affinage.generation.model import logits_of
from affinage.hardware.chips import named
from affinage.parallel import MeshLayout, make_mesh, table_with
from tiny_models import tiny_gpt2, tiny_llama


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_the_estimate_of_a_row_is_near_the_compiler_s(make):
    model, rows = make(), 64

    def hidden(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return logits_of(model.graph, params, tokens, positions, model.compute_dtype)[0].hidden

    tokens = jax.ShapeDtypeStruct((rows, model.context), jnp.int32)
    compiled = jax.jit(hidden).lower(model.params, tokens).compile().memory_analysis()
    found = compiled.temp_size_in_bytes / rows
    assert found / 2 < bytes_of_a_row(model, "cpu") < found


def test_as_many_rows_as_the_memory_holds(monkeypatch):
    model = tiny_llama()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    row = bytes_of_a_row(model, "cpu")

    def rows_in(capacity: float, of=model) -> int:
        chip = replace(named("TPU v4"), usable_bytes=int(capacity))
        monkeypatch.setattr(batch_size, "present", lambda devices: chip)
        return rows_that_fit(of)

    row /= batch_size.ROOM
    assert rows_in(weights + 9 * row) == rows_in(weights + 15.5 * row) == 8
    assert rows_in(weights + 16.5 * row) == 16 and rows_in(weights + 1000 * row) == MOST
    assert rows_in(weights + row / 2) == rows_in(weights / 2) == 1, "it is tried, and the device says what it has not"
    split = replace(model, layout=MeshLayout(make_mesh({"data": 4}, jax.devices()[:4]), table_with({})))
    assert rows_in(weights + 9 * row, split) == 4 * 8


def test_shorter_rows_are_as_many_as_take_the_memory_of_whole_ones():
    model = tiny_llama()  # of 96 tokens
    assert [shorter_rows_that_fit(2, longest, model) for longest in (96, 49, 48, 24, 13, 2)] == [2, 2, 4, 8, 8, 64]
    assert shorter_rows_that_fit(3, 96, model) == 3 and shorter_rows_that_fit(100, 4, model) == 100
    split = replace(model, layout=MeshLayout(make_mesh({"data": 4}, jax.devices()[:4]), table_with({})))
    assert [shorter_rows_that_fit(8, longest, split) for longest in (96, 48, 2)] == [8, 16, 4 * 64]
    assert shorter_rows_that_fit(1, 96, split) == 4
