"""One training step on a mesh, with what it takes to compare it to the same step on one device."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from affinage.model import Graph, parse
from affinage.parallel import make_mesh
from affinage.recipe.parallel import ParallelSettings
from affinage.recipe.training import PretrainSettings
from affinage.training import TrainJob
from affinage.training.program import Program

VOCABULARY, CONTEXT, ROWS = 64, 32, 8
# XLA's other way from loops to code, a third of the compilation, and these tests compile much. JAX 0.11 has none.
QUICKLY = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}


def graph(kind: str, layers: int = 4, *, heads: int = 4, window: int | None = None, **mixture: Any) -> Graph:
    """Width 32; `dense`: SwiGLU, `moe`: 4 experts, 2 for each token, beside a SwiGLU for all."""
    ffn: dict[str, Any] = {"kind": "swiglu", "width": 64}
    if kind == "moe":
        ffn = {"kind": "moe", "experts": 4, "top_k": 2, "width": 32, "shared_experts": 1} | mixture
    blocks = {
        "kind": "transformer_block",
        "in": "embed",
        "repeat": layers,
        "scan": True,  # half the compilation
        "attention": {"heads": heads, "rope": {"theta": 10000}, "window": window},
        "ffn": ffn,
        "norm": {"kind": "rms", "eps": 1e-6},
    }
    nodes = {
        # Vectors of a usual length: norms of short ones amplify rounding.
        "embed": {"kind": "embedding", "in": "tokens", "vocab": VOCABULARY, "width": 32, "init_std": 0.5},
        "blocks": blocks,
        "norm": {"kind": "rms_norm", "in": "blocks"},
        "logits": {"kind": "unembed", "in": "norm", "vocab": VOCABULARY, "tied": False},
        "loss": {"kind": "next_token_loss", "in": ["logits", "tokens"]},
    }
    return parse({"inputs": ["tokens"], "nodes": nodes})


class Feed:
    """Rows of three packed documents, with masks of very different sums; a function of the step alone."""

    def batch(self, step: int, rows: int = ROWS) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(step)
        borders = np.sort(draw.choice(np.arange(2, CONTEXT - 2), (rows, 2), replace=True), axis=1)
        index = np.arange(CONTEXT)[None, :]
        segments = (index[:, :, None] >= borders[:, None, :]).sum(-1)
        starts = np.concatenate([np.zeros((rows, 1), int), borders], axis=1)
        return {
            "tokens": (VOCABULARY * draw.random((rows, CONTEXT)) ** 3).astype(np.int32),
            "segment_ids": segments.astype(np.int32),
            "positions": (index - np.take_along_axis(starts, segments, axis=1)).astype(np.int32),
            "loss_mask": (draw.random((rows, CONTEXT)) < np.linspace(0.2, 1.0, rows)[:, None]).astype(np.float32),
            "rows": np.arange(rows, dtype=np.int32),
        }

    def iterate(self, start_step: int) -> Any:
        return map(self.batch, itertools.count(start_step))


def program(
    model: Graph, sizes: dict[str, int], *, micro_batches: int = 1, rows: int = ROWS, parallel: dict[str, Any]
) -> Program:
    settings = PretrainSettings.model_validate(
        {
            "steps": 20,
            "batch": rows,
            "micro_batches": micro_batches,
            "schedule": {"peak": 2e-3, "floor": 1e-3, "warmup_steps": 4},
        }
    )
    job = TrainJob(
        graph=model,
        settings=settings,
        mesh=sizes,
        seed=3,
        feed=Feed(),
        folder=Path("unused"),
        parallel=ParallelSettings.model_validate(parallel),
    )
    return Program(job, make_mesh(sizes, jax.devices()), Feed().batch(0, rows))


def run(one: Program, steps: int) -> dict[str, list[float]]:
    """Loss and gradient norm of the first steps, from weights that are the same for every mesh."""
    quick = one.job.parallel.model_copy(update={"xla_flags": QUICKLY | one.job.parallel.xla_flags})
    step = dataclasses.replace(one, job=dataclasses.replace(one.job, parallel=quick)).compile_training()
    state = jax.tree.map(
        lambda x, like: jax.device_put(np.asarray(x).astype(like.dtype), like.sharding),
        _first_state(json.dumps(one.job.graph.to_dict())),
        one.abstract,
    )
    seen: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for number in range(steps):
        state, metrics = step(state, one.put(Feed().batch(number, one.rows)))
        for name, values in seen.items():
            values.append(float(metrics[name]))
    return seen


@functools.cache
def _first_state(model: str) -> Any:
    return jax.device_get(program(parse(json.loads(model)), {"data": 1}, parallel={}).begin())


@functools.cache
def on_one_device(model: str, steps: int, rows: int = ROWS) -> dict[str, list[float]]:
    return run(program(parse(json.loads(model)), {"data": 1}, rows=rows, parallel={}), steps)


def assert_same_as_on_one_device(one: Program, steps: int) -> None:
    expected = on_one_device(json.dumps(one.job.graph.to_dict()), steps, one.rows)
    for name, values in run(one, steps).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, err_msg=name)
