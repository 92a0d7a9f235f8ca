"""Attention by kernels: the same numbers as the plain formula, on any mesh, or a refusal."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny_graphs
from affinage.errors import UserError
from affinage.model import Call, apply, init_cache, parse
from affinage.model.kind import Context
from affinage.model.kinds.attention_choice import Need, choose
from affinage.model.kinds.attention_kernels import splash_attention
from affinage.model.kinds.attention_masks import causal_mask
from affinage.model.kinds.attention_products import plain_attention, splash_on_parts
from affinage.parallel import MeshLayout, make_mesh

LENGTH = 150  # more than one block, and no whole number of them
SEGMENTS = jnp.asarray(np.stack([np.repeat(range(3), n) for n in ([3, 87, 60], [128, 1, 21])] * 2), jnp.int32)
NEEDS = Need("tpu", jnp.bfloat16, head_dim=64, length=2048, cached=False, dropout=0.0, softcap=None)


def heads(kv_heads):
    """Query, key, value and weights of the result, of 4 rows and 4 query heads."""
    random = np.random.default_rng(0)
    counts = (4, kv_heads, kv_heads, 4)
    return [jnp.asarray(2 * random.normal(size=(4, count, LENGTH, 8)), jnp.float32) for count in counts]


def value_and_gradient(product, query, key, value, weights):
    return jax.jit(jax.value_and_grad(lambda *arrays: jnp.sum(weights * product(*arrays)), (0, 1, 2)))(
        query, key, value
    )


def plain(query, key, value, segments, *, window=None, softcap=None):
    """The formula, on scores of all pairs."""
    before = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    mask = (before >= 0) & (before < (window or LENGTH))
    mask = jnp.asarray(mask)[None] & (segments[:, :, None] == segments[:, None, :])
    grouped = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])
    out = plain_attention(grouped, key, value, mask, Context(Call(), {}), dropout=0.0, softcap=softcap)
    return out.reshape(query.shape)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 20, 33, 64])
def test_blocks_of_a_mask_are_those_of_all_pairs(window):
    mask = causal_mask(64, window)
    before = np.arange(64)[:, None] - np.arange(64)
    every = (before >= 0) & (before < (window or 64))
    for size in (1, 8, 16, 64):
        for rows, columns in np.ndindex(64 // size, 64 // size):
            block = np.s_[rows * size : (rows + 1) * size, columns * size : (columns + 1) * size]
            np.testing.assert_array_equal(mask[block], every[block])
    np.testing.assert_array_equal(mask[:, 3:4], every[:, 3:4])
    assert mask == causal_mask(64, window) and hash(mask) == hash(causal_mask(64, window))
    assert mask != causal_mask(64, 7)


def same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize(
    "kv_heads, settings", [(2, {}), (1, {"window": 20, "softcap": 2.0})], ids=["grouped", "windowed, capped"]
)
def test_splash_is_the_plain_formula_on_packed_rows(kv_heads, settings):
    arrays = heads(kv_heads)

    def kernel(*qkv):
        return splash_attention(*qkv, SEGMENTS, **{"window": None, "softcap": None} | settings, interpret=True)

    same(
        value_and_gradient(kernel, *arrays),
        value_and_gradient(lambda *qkv: plain(*qkv, SEGMENTS, **settings), *arrays),
    )


def test_on_a_mesh_every_device_runs_the_kernel_on_its_part():
    arrays, split = heads(2), MeshLayout(make_mesh({"data": 2, "context": 2, "tensor": 2}, jax.devices())).mapped

    def kernel(query, key, value, segments):
        assert query.shape == (2, 2, LENGTH, 8) and key.shape == (2, 1, LENGTH, 8)
        return splash_attention(query, key, value, segments, window=None, softcap=None, interpret=True)

    of_query, of_key = ("batch", "heads", None, None), ("batch", "kv_heads", None, None)
    run = split(kernel, (of_query, of_key, of_key, ("batch", None)), of_query)
    same(
        value_and_gradient(lambda *qkv: run(*qkv, SEGMENTS), *arrays),
        value_and_gradient(lambda *qkv: plain(*qkv, SEGMENTS), *arrays),
    )


@pytest.mark.parametrize(
    "mesh, window, packed",
    [
        ({"context": 4}, None, True),
        ({"context": 2, "tensor": 2}, 200, True),
        ({"data": 2, "context": 2, "tensor": 2}, None, False),
    ],
    ids=str,
)
def test_on_parts_of_a_row_every_device_has_its_queries_and_all_keys(mesh, window, packed):
    random, length = np.random.default_rng(0), 512
    arrays = [jnp.asarray(random.normal(size=(2, count, length, 8)), jnp.float32) for count in (4, 2, 2, 4)]
    ends = [[100, 300, 112], [512, 0, 0]]
    segments = jnp.asarray(np.stack([np.repeat(range(3), n) for n in ends]), jnp.int32) if packed else None
    layout = MeshLayout(make_mesh(mesh, jax.devices()[: int(np.prod(list(mesh.values())))]))
    split = partial(splash_on_parts, segments=segments, layout=layout, window=window, softcap=None, interpret=True)
    whole = partial(splash_attention, segments=segments, window=window, softcap=None, interpret=True)
    same(value_and_gradient(split, *arrays), value_and_gradient(whole, *arrays))


def test_on_parts_of_a_row_no_device_keeps_the_keys_of_others_for_the_backward_pass():
    random, length = np.random.default_rng(0), 512
    query, key, value = (jnp.asarray(random.normal(size=(2, n, length, 8)), jnp.float32) for n in (4, 2, 2))
    layout = MeshLayout(make_mesh({"context": 4}, jax.devices()[:4]))
    split = partial(splash_on_parts, segments=None, layout=layout, window=None, softcap=None, interpret=True)
    # As in a step, where each projects its own tokens.
    place = partial(layout.constrain, axes=("batch", None, "sequence", None))
    _, kept = jax.jit(lambda *arrays: jax.vjp(split, *map(place, arrays)))(query, key, value)
    of_tokens = [array.addressable_shards[0].data.shape for array in jax.tree.leaves(kept) if array.ndim == 4]
    assert len(of_tokens) >= 3 and {shape[2] for shape in of_tokens} == {length // 4}


@pytest.mark.parametrize(
    "change, wanted",
    [
        ({}, "splash"),
        ({"platform": "cpu"}, "xla"),
        ({"platform": "gpu"}, "xla"),
        ({"length": 64}, "xla"),
        ({"cached": True}, "xla"),
        ({"dropout": 0.1}, "xla"),
        ({"softcap": 30.0}, "splash"),
    ],
)
def test_auto_takes_what_can(change, wanted):
    assert choose("auto", dataclasses.replace(NEEDS, **change)) == wanted


@pytest.mark.parametrize(
    "name, change, what",
    [
        ("splash", {"platform": "cpu"}, "cannot honour a cpu: it is a kernel for TPUs"),
        ("splash", {"dropout": 0.1}, "cannot honour dropout of 0.1"),
        ("cudnn", {"softcap": 30.0}, "a soft-cap of 30.0"),
        ("cudnn", {"dtype": jnp.float32, "head_dim": 20}, "float32 .* and heads of 20"),
    ],
)
def test_a_named_one_refuses_what_it_cannot_honour(name, change, what):
    with pytest.raises(UserError, match=what) as raised:
        choose(name, dataclasses.replace(NEEDS, **change))
    assert "xla" in raised.value.fix


def test_a_cache_is_refused_by_the_graph_too():
    graph = parse(tiny_graphs.llama(layers=1))
    call = Call(platform="tpu", attention="splash", cache=init_cache(graph, 1, 8, platform="tpu"))
    with pytest.raises(UserError, match="a KV cache"):
        apply(graph, tiny_graphs.random_params(graph), {"tokens": jnp.zeros((1, 4), jnp.int32)}, call)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'affinage[tpu]'")
@pytest.mark.parametrize(("axis", "queries"), [("data", 256), ("context", 128)])
def test_a_training_step_with_the_kernel_compiles_for_tpus(axis: str, queries: int):
    program = """
        import jax, jax.numpy as jnp, tiny_graphs
        from jax.experimental import topologies
        from jax.sharding import NamedSharding, PartitionSpec as P
        from affinage.model import Call, abstract_params, apply, parse
        from affinage.parallel import MeshLayout, make_mesh

        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
        mesh = make_mesh({"AXIS": 2, "tensor": 2}, devices)
        graph = parse(tiny_graphs.llama(layers=1, attention={"kv_heads": 2, "head_dim": 64, "window": 100}))
        call = Call(jnp.bfloat16, platform="tpu", layout=MeshLayout(mesh))

        def loss(params, tokens, segments):
            return apply(graph, params, {"tokens": tokens, "segment_ids": segments}, call).values[graph.loss].sum

        def placed(leaf, spec=P()):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        rows = placed(jax.ShapeDtypeStruct((4, 256), jnp.int32), P("data", "context"))
        step = jax.jit(jax.grad(loss)).lower(jax.tree.map(placed, abstract_params(graph)), rows, rows)
        print(step.compile().as_text())
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {
        "PYTHONPATH": f"{os.path.dirname(tiny_graphs.__file__)}{os.pathsep}{paths}",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process of this machine may be compiling for TPUs, too
        "TPU_SKIP_MDS_QUERY": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(program).replace("AXIS", axis)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for kernel in ("fwd_segmented", "dq_segmented", "dkv_segmented"):
        assert f"splash_mha_{kernel}" in done.stdout
    calls = [line for line in done.stdout.splitlines() if "custom-call(" in line and "splash_mha_fwd" in line]
    assert calls and all(f",{queries},64]" in line.partition("custom-call(")[0] for line in calls)
