"""The same function however it is computed: packed or alone, cached or at once, scanned or unrolled."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tiny_graphs
from affinage.model import ApplyConfig, abstract_params, apply, decayed, init_params, logical_axes, parse
from affinage.model.forward import from_nnx, init_cache, to_nnx
from affinage.model.layers.dense import GATED, PLAIN, activate
from affinage.model.layers.losses import cross_entropy
from affinage.parallel.sharding import MeshLayout, make_mesh
from run_affinage import refused

LLAMA = parse(tiny_graphs.llama(layers=2, attention={"kv_heads": 2}, scan=True))
ONE = parse(tiny_graphs.llama(layers=1, attention={"kv_heads": 2}))
GPT2 = parse(tiny_graphs.gpt2(layers=1))
GRAPHS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "windowed": parse(tiny_graphs.llama(layers=1, attention={"window": 5})),
    "experts": parse(tiny_graphs.moe(layers=1, load_balance_weight=0.0)),
}


def random_tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, tiny_graphs.VOCABULARY, shape), jnp.int32)


@partial(jax.jit, static_argnums=0)
def logits(graph, params, batch, **call):
    outputs = apply(graph, params, batch, ApplyConfig(until=graph.logits, **call))
    return outputs.values[graph.logits].array(), outputs.cache


@partial(jax.jit, static_argnums=0)
def logits_and_loss(graph, params, batch):
    values = apply(graph, params, batch, ApplyConfig()).values
    return values[graph.logits].array(), values[graph.loss]


def some(*quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in GRAPHS]


@pytest.mark.parametrize("name", some("gpt2", "windowed", "experts"))
def test_packed_documents_are_the_documents_one_by_one(name):
    graph, lengths = GRAPHS[name], [6, 6, 6]
    params, tokens = tiny_graphs.random_params(graph), random_tokens(1, sum(lengths))
    segments = jnp.asarray(np.repeat(np.arange(3), lengths)[None], jnp.int32)
    positions = jnp.asarray(np.concatenate([np.arange(n) for n in lengths])[None], jnp.int32)
    packed = {"tokens": tokens, "segment_ids": segments, "positions": positions}
    together, loss = logits_and_loss(graph, params, packed)
    start, total = 0, 0.0
    for length in lengths:
        alone, of_one = logits_and_loss(graph, params, {"tokens": tokens[:, start : start + length]})
        np.testing.assert_allclose(together[:, start : start + length], alone, atol=2e-5)
        total += float(of_one.sum)
        start += length
    assert float(loss.count) == sum(lengths) - len(lengths) and float(loss.sum) == pytest.approx(total, rel=1e-5)
    # Other words in the first document change nothing in the others.
    other, _ = logits_and_loss(graph, params, packed | {"tokens": tokens.at[:, :6].set(3)})
    np.testing.assert_array_equal(other[:, 6:], together[:, 6:])
    assert np.abs(np.asarray(other - together)).max() > 0.01


@pytest.mark.parametrize("name", some("llama", "windowed"))
def test_cached_decoding_is_the_full_pass(name):
    graph, length = GRAPHS[name], 14
    params, tokens = tiny_graphs.random_params(graph), random_tokens(3, length)
    full, _ = logits(graph, params, {"tokens": tokens})
    prompts, column = jnp.asarray([5, 8, 2]), jnp.arange(8)[None]
    # Prompts of different lengths, filled up on the right with tokens that are not there (position -1).
    batch = {"tokens": tokens[:, :8], "positions": jnp.where(column < prompts[:, None], column, -1)}
    prefilled, cache = logits(graph, params, batch, cache=init_cache(graph, 3, length + 3))
    for row, prompt in enumerate(np.asarray(prompts)):
        np.testing.assert_allclose(prefilled[row, :prompt], full[row, :prompt], atol=2e-5)
    for step in range(3):
        at = (prompts + step)[:, None]
        batch = {"tokens": jnp.take_along_axis(tokens, at, axis=1), "positions": at}
        new, cache = logits(graph, params, batch, cache=cache)
        np.testing.assert_allclose(new[:, 0], jnp.take_along_axis(full, at[..., None], axis=1)[:, 0], atol=2e-5)


def test_a_scanned_program_does_not_grow_with_depth():
    def program(layers):
        graph = parse(tiny_graphs.llama(layers=layers, scan=True))

        def loss(params, batch):
            return apply(graph, params, batch, ApplyConfig()).values[graph.loss].sum

        batch = {"tokens": jax.ShapeDtypeStruct((2, 8), jnp.int32)}
        return jax.jit(jax.grad(loss)).lower(abstract_params(graph), batch).as_text().count("\n")

    assert program(18) == program(72)


def test_dropout_keeps_the_mean_and_is_of_the_key_and_the_row_in_any_part_of_the_batch():
    graph = parse(tiny_graphs.gpt2(layers=1, dropout=0.25))
    params, tokens = tiny_graphs.random_params(graph), random_tokens(8, 40)

    @jax.jit
    def dropped(tokens, rows, seed):
        call = ApplyConfig(key=jax.random.key(seed), until=graph.logits)
        values = apply(graph, params, {"tokens": tokens, "rows": rows}, call).values
        return values[graph.logits].array(), values["drop"] / values["positions"]

    rows, some = jnp.arange(8), jnp.array([3, 1])
    whole, kept = map(np.asarray, dropped(tokens, rows, 1))
    np.testing.assert_allclose(kept[kept != 0], 1 / 0.75, rtol=1e-6)
    assert np.mean(kept == 0) == pytest.approx(0.25, abs=0.02)
    np.testing.assert_allclose(dropped(tokens[some], some, 1)[0], whole[some], atol=1e-5)
    for other, _ in (dropped(tokens, rows + 8, 1), dropped(tokens, rows, 2)):
        assert np.abs(np.asarray(other) - whole).max() > 0.1


def test_a_batch_counts_only_what_its_mask_says():
    tokens, params = random_tokens(2, 12), tiny_graphs.random_params(LLAMA)
    mask = jnp.zeros((2, 12)).at[0, 5].set(1.0).at[1, 0].set(1.0)  # the first token of a row is never a target
    array, loss = logits_and_loss(LLAMA, params, {"tokens": tokens, "loss_mask": mask})
    assert float(loss.count) == 1
    assert float(loss.sum) == pytest.approx(-float(jax.nn.log_softmax(array[0, 4])[tokens[0, 5]]), rel=1e-5)


@pytest.mark.parametrize("name", GRAPHS)
def test_declared_trees_agree_with_the_arrays(name):
    graph = GRAPHS[name]
    params = jax.eval_shape(lambda key: init_params(graph, key, jnp.bfloat16), jax.random.key(0))
    abstract = abstract_params(graph, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    axes, decays = (dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, (tuple, bool))))
                    for tree in (logical_axes(graph), decayed(graph)))  # fmt: skip
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert len(axes[path]) == leaf.ndim
        matrix = len([axis for axis in axes[path] if axis != "layers"]) > 1
        assert decays[path] == (matrix and path[-1].key != "bias"), path


def test_residual_projections_begin_smaller():
    params = jax.jit(partial(init_params, parse(tiny_graphs.llama(layers=8))))(jax.random.key(0))["blocks"]
    assert float(params["attention"]["query"]["kernel"].std()) == pytest.approx(0.02, rel=0.03)
    for half, name in (("attention", "out"), ("ffn", "down")):
        assert float(params[half][name]["kernel"].std()) == pytest.approx(0.02 / 4, rel=0.03)


def test_gradients_of_many_places_are_added_up_in_float32_in_any_precision():
    """Of three tokens, 32 positions and biases: sums of thousands of numbers in bfloat16 stand still."""
    graph, batch = parse(tiny_graphs.gpt2(layers=1)), {"tokens": random_tokens(256, 32) % 3}

    @partial(jax.jit, static_argnums=1)
    def gradient(params, dtype):
        return jax.grad(lambda p: apply(graph, p, batch, ApplyConfig(dtype)).values[graph.loss].sum)(params)

    params = optax.tree.cast(tiny_graphs.random_params(graph), jnp.bfloat16)
    exact, found = (gradient(optax.tree.cast(params, dtype), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    far = jax.tree.map(lambda got, want: float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)), found, exact)
    far["blocks"]["attention"]["key"].pop("bias")  # is zero but for rounding
    assert max(jax.tree.leaves(far)) < 0.05, far


def test_activations_are_rounded_once():
    parts = [jax.random.normal(jax.random.key(seed), (4000,), jnp.bfloat16) * 4 for seed in range(2)]
    for kind in (*PLAIN, *GATED):
        up, gate = parts if kind in GATED else (parts[0], None)
        exact = activate(kind, *optax.tree.cast((up, gate), jnp.float32))
        np.testing.assert_array_equal(activate(kind, up, gate), exact.astype(jnp.bfloat16))


def test_a_row_longer_than_the_learned_positions_is_refused():
    params, batch = tiny_graphs.random_params(GPT2), {"tokens": random_tokens(1, 41)}
    refused(apply, GPT2, params, batch, ApplyConfig(), match=r"41 .* 40")


def test_training_by_nnx_on_two_devices_is_the_same_function():
    mesh, params = make_mesh({"fsdp": 2}, jax.devices()[:2]), tiny_graphs.random_params(ONE)
    shardings = MeshLayout(mesh).param_shardings(logical_axes(ONE), abstract_params(ONE))
    module = to_nnx(ONE, jax.device_put(params, shardings), mesh)
    assert module.nodes["embed"]["embedding"].get_metadata()["logical_axes"] == ("vocab", "embed")
    optimizer, batch = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param), {"tokens": random_tokens(2, 6)}

    @nnx.jit
    def step(module, optimizer, batch):
        loss, gradients = nnx.value_and_grad(lambda m: m(batch).values[ONE.loss].mean())(module)
        optimizer.update(module, gradients)
        return loss

    def loss(params):
        return apply(ONE, params, batch, ApplyConfig()).values[ONE.loss].mean()

    expected, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert float(step(module, optimizer, batch)) == pytest.approx(float(expected), rel=1e-5)
    moved, split = from_nnx(module), module.nodes["embed"]["embedding"][...].sharding
    jax.tree.map(lambda new, p, g: np.testing.assert_allclose(new, p - 0.1 * g, atol=1e-5), moved, params, gradients)
    assert split.is_equivalent_to(shardings["embed"]["embedding"], 2) and not split.is_fully_replicated


TRAINED = {
    "llama": tiny_graphs.llama(layers=2, attention={"kv_heads": 2, "dropout": 0.2}, dropout=0.2),
    "gpt2": tiny_graphs.gpt2(dropout=0.2),
    "experts": tiny_graphs.moe(layers=1),
    "experts with a capacity": tiny_graphs.moe(layers=1, capacity_factor=0.8),
}


@cache
def with_gradients(name, platform, chunk):
    """The mean loss of two rows, as in training, with its metrics and gradients."""
    nodes = TRAINED[name]["nodes"]
    graph = parse({"inputs": ["tokens"], "nodes": nodes | {"loss": nodes["loss"] | {"chunk": chunk}}})
    batch = {"tokens": random_tokens(2, 7), "segment_ids": jnp.asarray([[0, 0, 1, 1, 1, 2, 2]] * 2)}
    call = ApplyConfig(platform=platform, capability=None, attention="xla", key=jax.random.key(7))

    def loss(params):
        outputs = apply(graph, params, batch, call)
        return outputs.values[graph.loss].mean(), outputs.metrics

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(tiny_graphs.random_params(graph))


@pytest.mark.parametrize(("name", "platform", "chunk"), [
    ("llama", "cpu", 4), ("llama", "gpu", "auto"), ("llama", "tpu", 4), ("gpt2", "gpu", "auto"),
    ("gpt2", "tpu", "auto"), ("experts", "tpu", "auto"), ("experts with a capacity", "tpu", "auto"),
])  # fmt: skip
def test_every_platforms_program_is_the_same_function_also_with_logits_in_parts(name, platform, chunk):
    """GPUs join projections and unroll, TPUs scan, accelerators pad the vocabulary and compute cheap values again."""
    expected, found = with_gradients(name, "cpu", "auto"), with_gradients(name, platform, chunk)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), found, expected)
    assert float(found[0][1]["accuracy"][1]) == 8 and all(jnp.any(leaf) for leaf in jax.tree.leaves(found[1]))


# ---- losses


@pytest.mark.parametrize(("on_cpu", "scale"), [(True, 3), (False, 3), (True, 1e4), (False, 1e4)])
def test_the_gradient_is_that_of_the_formula_also_of_extreme_logits(on_cpu, scale):
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(2, 5, 97)) * scale, jnp.float32)
    targets = jnp.asarray(rng.integers(0, 97, (2, 5)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 3, (2, 5)), jnp.float32)

    def formula(logits):
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        return -1.5 * jnp.sum(log_p * weights)

    def ours(logits):
        return 1.5 * cross_entropy(logits, targets, weights, on_cpu).cross_entropy

    expected, found = (jax.jit(jax.value_and_grad(function))(logits) for function in (formula, ours))
    assert all(np.isfinite(array).all() for array in expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), found, expected)
