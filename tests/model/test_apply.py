"""The same function however it is computed: packed or alone, cached or at once, scanned or unrolled."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tiny_graphs
from affinage.errors import UserError
from affinage.model import (
    Call,
    Model,
    abstract_params,
    apply,
    decayed,
    init_cache,
    init_params,
    logical_axes,
    parse,
)
from affinage.model.layout import Layout

LLAMA = parse(tiny_graphs.llama(attention={"kv_heads": 2}))
GPT2 = parse(tiny_graphs.gpt2())
GRAPHS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "scanned": parse(tiny_graphs.llama(attention={"kv_heads": 2}, scan=True)),
    "windowed, capped, partly turned, parallel": parse(
        tiny_graphs.llama(
            layers=2, attention={"window": 5, "softcap": 2.0, "rope": {"fraction": 0.5}}, placement="parallel"
        )
    ),
    "experts": parse(tiny_graphs.moe(shared_experts=1, load_balance_weight=0.0)),
    "norms after": parse(tiny_graphs.llama(layers=2, placement="post")),
}


def random_tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, tiny_graphs.VOCABULARY, shape), jnp.int32)


@partial(jax.jit, static_argnums=0)
def logits(graph, params, batch, **call):
    outputs = apply(graph, params, batch, Call(until=graph.logits, **call))
    return outputs.values[graph.logits].array(), outputs.cache


@partial(jax.jit, static_argnums=0)
def loss_of(graph, params, batch, **call):
    return apply(graph, params, batch, Call(**call)).values[graph.loss]


@pytest.mark.parametrize("name", GRAPHS)
def test_packed_documents_are_the_documents_one_by_one(name):
    graph, lengths = GRAPHS[name], [7, 1, 7, 1, 7]
    params, tokens = tiny_graphs.random_params(graph), random_tokens(1, sum(lengths))
    packed = {
        "tokens": tokens,
        "segment_ids": jnp.asarray(np.repeat(np.arange(5), lengths)[None], jnp.int32),
        "positions": jnp.asarray(np.concatenate([np.arange(n) for n in lengths])[None], jnp.int32),
    }
    together, _ = logits(graph, params, packed)
    loss = loss_of(graph, params, packed)
    start, total = 0, 0.0
    for length in lengths:
        part = {"tokens": tokens[:, start : start + length]}
        alone, _ = logits(graph, params, part)
        np.testing.assert_allclose(together[:, start : start + length], alone, atol=2e-5)
        total += float(loss_of(graph, params, part).sum)
        start += length
    assert float(loss.count) == sum(lengths) - len(lengths)
    assert float(loss.sum) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("name", GRAPHS)
def test_cached_decoding_is_the_full_pass(name):
    graph, length = GRAPHS[name], 14
    params, tokens = tiny_graphs.random_params(graph), random_tokens(3, length)
    full, _ = logits(graph, params, {"tokens": tokens})
    prompts = jnp.asarray([5, 8, 2])
    column = jnp.arange(8)[None]
    # Prompts of different lengths, filled up on the right with tokens that are not there (position -1).
    positions = jnp.where(column < prompts[:, None], column, -1)
    prefilled, cache = logits(
        graph, params, {"tokens": tokens[:, :8], "positions": positions}, cache=init_cache(graph, 3, length + 3)
    )
    for row, prompt in enumerate(np.asarray(prompts)):
        np.testing.assert_allclose(prefilled[row, :prompt], full[row, :prompt], atol=2e-5)
    for step in range(6):
        at = (prompts + step)[:, None]
        new, cache = logits(
            graph, params, {"tokens": jnp.take_along_axis(tokens, at, axis=1), "positions": at}, cache=cache
        )
        np.testing.assert_allclose(new[:, 0], jnp.take_along_axis(full, at[..., None], axis=1)[:, 0], atol=2e-5)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("name", GRAPHS)
def test_of_some_tokens_alone_the_logits_are_the_same(name, parts):
    """Of a whole batch, of both halves, and of so few in every row that the others do not even ask."""
    graph, tokens = GRAPHS[name], random_tokens(4, 11)
    params = tiny_graphs.random_params(graph)
    batch = {"tokens": tokens, "positions": jnp.broadcast_to(jnp.arange(11), tokens.shape)}
    at = {1: [[0, 3, 10, 10, 43]], 2: [[0, 3, 10, 10, 21], [7, 21, 11, 20, 0]], 4: [[0, 5], [10, 10], [7, 3], [4, 1]]}
    at = jnp.asarray(at[parts], jnp.int32)
    some, _ = logits(graph, params, batch, at=at)
    all_of_them, _ = logits(graph, params, batch)
    expected = jnp.take_along_axis(all_of_them.reshape(parts, -1, all_of_them.shape[-1]), at[:, :, None], axis=1)
    np.testing.assert_allclose(some, expected, atol=2e-5)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_scan_is_unrolled(rate):
    models = [tiny_graphs.llama(scan=s, layers=2, attention={"dropout": rate}, dropout=rate) for s in (True, False)]
    graphs = [parse(model) for model in models]
    params, batch = tiny_graphs.random_params(graphs[0]), {"tokens": random_tokens(2, 20)}
    call = {} if rate == 0 else {"key": jax.random.key(7)}
    gradient = jax.jit(jax.grad(lambda p, graph: loss_of(graph, p, batch, **call).sum), static_argnums=1)
    scanned, unrolled = (gradient(params, graph) for graph in graphs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), scanned, unrolled)


def test_a_scanned_program_does_not_grow_with_depth():
    def program(layers):
        graph = parse(tiny_graphs.llama(layers=layers, scan=True))

        def loss(params, batch):
            return apply(graph, params, batch, Call()).values[graph.loss].sum

        batch = {"tokens": jax.ShapeDtypeStruct((2, 8), jnp.int32)}
        return jax.jit(jax.grad(loss)).lower(abstract_params(graph), batch).as_text().count("\n")

    assert program(18) == program(72)


def test_dropout_of_a_row_is_the_same_in_any_part_of_the_batch():
    graph = parse(tiny_graphs.gpt2(dropout=0.3))
    params, tokens = tiny_graphs.random_params(graph), random_tokens(4, 10)
    call = partial(logits, graph, params, key=jax.random.key(1))
    whole, _ = call({"tokens": tokens, "rows": jnp.arange(4)})
    half, _ = call({"tokens": tokens[jnp.array([3, 1])], "rows": jnp.array([3, 1])})
    np.testing.assert_allclose(half, whole[jnp.array([3, 1])], atol=1e-5)
    still, _ = logits(graph, params, {"tokens": tokens})
    assert np.abs(np.asarray(still - whole)).max() > 0.1
    same_tokens, _ = call({"tokens": jnp.repeat(tokens[:1], 2, axis=0), "rows": jnp.arange(2)})
    assert np.abs(np.asarray(same_tokens[0] - same_tokens[1])).max() > 0.1


def test_dropout_zeroes_as_often_as_it_should_and_keeps_the_mean():
    model = {
        "inputs": ["tokens"],
        "nodes": {
            "embed": {"kind": "embedding", "in": "tokens", "vocab": 3, "width": 64, "scale": 0.0},
            "ones": {"kind": "layer_norm", "in": "embed"},
            "drop": {"kind": "dropout", "in": "ones", "rate": 0.25},
            "logits": {"kind": "unembed", "in": "drop"},
            "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
        },
    }
    graph = parse(model)
    params = init_params(graph, jax.random.key(0))
    params["ones"]["bias"] += 1.0
    call = Call(key=jax.random.key(3), until="drop")
    dropped = np.asarray(apply(graph, params, {"tokens": jnp.zeros((8, 64), jnp.int32)}, call).values["drop"])
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    assert np.mean(dropped == 0) == pytest.approx(0.25, abs=0.01)


def test_a_batch_counts_only_what_its_mask_says():
    tokens = random_tokens(2, 12)
    params = tiny_graphs.random_params(LLAMA)
    mask = jnp.zeros((2, 12)).at[0, 5].set(1.0).at[1, 0].set(1.0)  # the first token of a row is never a target
    loss = loss_of(LLAMA, params, {"tokens": tokens, "loss_mask": mask})
    array, _ = logits(LLAMA, params, {"tokens": tokens})
    assert float(loss.count) == 1
    assert float(loss.sum) == pytest.approx(-float(jax.nn.log_softmax(array[0, 4])[tokens[0, 5]]), rel=1e-5)


def test_bfloat16_is_near_float32_and_its_loss_is_float32():
    params, batch = tiny_graphs.random_params(LLAMA), {"tokens": random_tokens(2, 16)}
    exact = loss_of(LLAMA, params, batch)
    rounded = jax.jit(lambda p: apply(LLAMA, p, batch, Call(compute_dtype=jnp.bfloat16)).values[LLAMA.loss])(params)
    assert rounded.sum.dtype == jnp.float32
    assert float(rounded.sum) == pytest.approx(float(exact.sum), rel=0.02)


def test_declared_trees_agree_with_the_arrays():
    for graph in GRAPHS.values():
        params = jax.eval_shape(lambda key: init_params(graph, key, jnp.bfloat16), jax.random.key(0))  # noqa: B023
        abstract = abstract_params(graph, jnp.bfloat16)
        jax.tree.map(lambda a, b: None if (a.shape, a.dtype) == (b.shape, b.dtype) else pytest.fail(), params, abstract)
        axes = logical_axes(graph)
        jax.tree.map(lambda a, x: None if a.ndim == len(x) else pytest.fail(), params, axes)
        matrices = jax.tree.map(
            lambda x: [name for name in x if name != "layers"], axes, is_leaf=lambda x: isinstance(x, tuple)
        )
        jax.tree.map(
            lambda d, m: None if d or m else pytest.fail(),
            decayed(graph),
            matrices,
            is_leaf=lambda x: isinstance(x, bool),
        )
        assert decayed(graph)["embed"]["embedding"]
        assert not decayed(graph)["norm"]["scale"]


def test_residual_projections_begin_smaller():
    params = init_params(parse(tiny_graphs.llama(layers=8)), jax.random.key(0))["blocks"]
    assert float(params["attention"]["query"]["kernel"].std()) == pytest.approx(0.02, rel=0.03)
    for half, name in (("attention", "out"), ("ffn", "down")):
        assert float(params[half][name]["kernel"].std()) == pytest.approx(0.02 / 4, rel=0.03)


def test_only_what_is_needed_is_computed():
    outputs = apply(LLAMA, tiny_graphs.random_params(LLAMA), {"tokens": random_tokens(1, 4)}, Call(until="blocks"))
    assert set(outputs.values) == {"tokens", "embed", "blocks"}


def test_learned_positions_refuse_a_longer_row():
    with pytest.raises(UserError, match="41 tokens are longer than the 40 positions"):
        apply(GPT2, tiny_graphs.random_params(GPT2), {"tokens": random_tokens(1, 41)}, Call())


def test_an_unknown_attention_implementation_is_refused():
    with pytest.raises(UserError, match="'flash' is not known"):
        apply(LLAMA, tiny_graphs.random_params(LLAMA), {"tokens": random_tokens(1, 4)}, Call(attention="flash"))


def test_remat_and_constraints_change_nothing():
    seen = []

    class Watched(Layout):
        def constrain(self, x, axes):
            seen.append((x.ndim, axes))
            return x

    batch, params = {"tokens": random_tokens(1, 8)}, tiny_graphs.random_params(LLAMA)

    def loss(params, call):
        return apply(LLAMA, params, batch, call).values[LLAMA.loss].sum

    plain = jax.jit(jax.grad(partial(loss, call=Call())))(params)
    pinned = jax.jit(
        jax.grad(partial(loss, call=Call(remat=jax.checkpoint_policies.nothing_saveable, layout=Watched())))
    )(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain, pinned)
    assert all(ndim == len(axes) for ndim, axes in seen)
    assert {name for _, axes in seen for name in axes} >= {
        "batch",
        "sequence",
        "residual",
        "keys",
        "width",
        "heads",
        "kv_heads",
        "ffn",
    }


def test_the_nnx_module_is_the_same_function():
    model = Model(LLAMA, rngs=nnx.Rngs(0))
    batch = {"tokens": random_tokens(2, 6)}
    expected = apply(LLAMA, model.pure(), batch, Call()).values[LLAMA.loss]
    assert float(model(batch).values[LLAMA.loss].sum) == float(expected.sum)
    grads = nnx.grad(lambda m: m(batch).values[LLAMA.loss].sum)(model)
    plain = jax.grad(lambda p: apply(LLAMA, p, batch, Call()).values[LLAMA.loss].sum)(model.pure())
    np.testing.assert_allclose(
        nnx.to_pure_dict(grads)["params"]["embed"]["embedding"], plain["embed"]["embedding"], atol=1e-6
    )
