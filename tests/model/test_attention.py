"""Attention by products, by kernels and on parts of a row: the numbers and gradients of the plain formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from affinage.model import ApplyConfig
from affinage.model.layers.attention import choose, xla_attention
from affinage.model.layers.kernels import cudnn_attention, splash_attention, splash_on_parts
from affinage.parallel.sharding import MeshLayout, make_mesh
from run_affinage import refused

LENGTH = 150  # more than one block of a kernel, and no whole number of them
SEGMENTS = jnp.asarray(np.stack([np.repeat(range(3), n) for n in ([3, 87, 60], [128, 1, 21])]), jnp.int32)
WORK = {"dtype": jnp.bfloat16, "head_dim": 64, "length": 2048}


def chosen(name, platform="tpu", capability=None, **change):
    return choose(ApplyConfig(attention=name, platform=platform, capability=capability), **WORK | change)


def heads(kv_heads, rows=2, length=LENGTH):
    """Query, key, value and weights of the result, of 4 query heads."""
    random, counts = np.random.default_rng(0), (4, kv_heads, kv_heads, 4)
    return [jnp.asarray(2 * random.normal(size=(rows, length, count, 8)), jnp.float32) for count in counts]


def value_and_gradient(product, query, key, value, weights):
    weighted = jax.value_and_grad(lambda *arrays: jnp.sum(weights * product(*arrays)), (0, 1, 2))
    return jax.jit(weighted)(query, key, value)


def seen(segments, window=None):
    length = segments.shape[1]
    before = np.arange(length)[:, None] - np.arange(length)
    mask = jnp.asarray((before >= 0) & (before < (window or length)))[None]
    return mask & (segments[:, :, None] == segments[:, None, :])


def plain(query, key, value, segments, *, window=None):
    """The formula, on scores of all pairs."""
    key, value = (jnp.repeat(array, query.shape[2] // array.shape[2], axis=2) for array in (key, value))
    scores = jnp.einsum("bshd,bthd->bhst", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(seen(segments, window)[:, None], scores, -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), value)


def same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize(("length", "settings"), [(7, {}), (602, {"in_blocks": True})], ids=str)
def test_plain_products_and_their_gradient_are_the_formula(length, settings):
    segments = jnp.repeat(jnp.array([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]]), length // 7, axis=1)
    arrays = heads(2, length=length)
    expected = value_and_gradient(partial(plain, segments=segments), *arrays)
    same(value_and_gradient(partial(xla_attention, mask=seen(segments), **settings), *arrays), expected)


@pytest.mark.parametrize(("kv_heads", "window"), [pytest.param(2, None, marks=pytest.mark.full), (1, 20)])
def test_splash_is_the_plain_formula_on_packed_rows(kv_heads, window):
    kernel = partial(splash_attention, ids=SEGMENTS, window=window, interpret=True)
    expected = value_and_gradient(partial(plain, segments=SEGMENTS, window=window), *heads(kv_heads))
    same(value_and_gradient(kernel, *heads(kv_heads)), expected)


@pytest.mark.parametrize(("mesh", "window", "packed"), [
    ({"context": 2, "tensor": 2}, 200, True),
    pytest.param({"data": 2, "context": 2, "tensor": 2}, None, False, marks=pytest.mark.full),
], ids=str)  # fmt: skip
def test_on_parts_of_a_row_every_device_has_its_queries_and_all_keys(mesh, window, packed):
    arrays, length = heads(2, length=512), 512
    segments = jnp.asarray(np.stack([np.repeat(range(3), n) for n in ([100, 300, 112], [512, 0, 0])]), jnp.int32)
    layout = MeshLayout(make_mesh(mesh, jax.devices()[: int(np.prod(list(mesh.values())))]))
    settings = {"ids": segments if packed else None, "window": window, "interpret": True}
    split = partial(splash_on_parts, layout=layout, **settings)
    same(value_and_gradient(split, *arrays), value_and_gradient(partial(splash_attention, **settings), *arrays))
    # As in a step, where each projects its own tokens: no device keeps the keys of others for the backward pass.
    place = partial(layout.constrain, axes=("batch", "sequence", None, None))
    _, kept = jax.jit(lambda *arrays: jax.vjp(split, *map(place, arrays)))(*arrays[:3])
    of_tokens = [array.addressable_shards[0].data.shape for array in jax.tree.leaves(kept) if array.ndim == 4]
    assert len(of_tokens) >= 3 and all(length // mesh["context"] in shape[1:3] for shape in of_tokens)


@pytest.mark.parametrize(("name", "change", "wanted"), [
    ("auto", {}, "splash"),
    ("auto", {"platform": "cpu"}, "xla"),
    ("auto", {"platform": "gpu", "capability": (8, 0)}, "cudnn"),
    ("auto", {"platform": "gpu", "capability": (8, 0), "head_dim": 192}, "xla"),
    ("auto", {"platform": "gpu", "capability": (9, 0), "head_dim": 192}, "cudnn"),
    ("auto", {"platform": "gpu"}, "xla"),  # AMD's
    ("auto", {"length": 64}, "xla"),
    ("auto", {"only_xla": True}, "xla"),
    ("auto", {"dropout": 0.1}, "xla"),
    ("splash", {"platform": "cpu"}, "cannot honor a cpu"),
    ("splash", {"dropout": 0.1}, "dropout of 0.1"),
    ("cudnn", {"length": 511}, "rows of 511 tokens"),
    ("cudnn", {"dtype": jnp.float32, "head_dim": 20}, "float32, heads of 20"),
], ids=str)  # fmt: skip
def test_auto_takes_what_can_and_a_named_one_refuses_what_it_cannot_honor(name, change, wanted):
    if name == "auto":
        assert chosen(name, **change) == wanted
    else:
        assert "xla" in refused(lambda: chosen(name, **change), match=wanted).fix


@pytest.mark.parametrize(("documents", "by_offsets"), [("packed", True), ("packed", False), ("one", True)])
def test_cudnn_is_called_with_no_array_of_all_pairs_but_an_old_gpus_bias(documents, by_offsets):
    """The kernel itself needs a GPU (benchmarks/attention.py); its arguments, residuals and batching do not."""
    shapes = [jax.ShapeDtypeStruct((2, 512, count, 64), jnp.bfloat16) for count in (4, 2, 2)]
    segments = None if documents == "one" else jnp.zeros((2, 512), jnp.int32)

    def loss(*arrays):
        return jnp.sum(cudnn_attention(*arrays, segments, (None, by_offsets)).astype(jnp.float32))

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*shapes)
    assert [result.shape for result in traced.out_avals] == [shape.shape for shape in shapes]
    assert ("512,512" in str(traced)) == (documents == "packed" and not by_offsets)
    # Per-replica sums of micro-batches compute all replicas by one `jax.vmap`.
    jax.make_jaxpr(jax.vmap(jax.grad(loss, (0, 1, 2))))(*(jnp.zeros((3, *s.shape), s.dtype) for s in shapes))
