"""One training step on a mesh, with what it takes to compare it to the same step on one device."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tiny
import tiny_graphs
from affinage.config.training import ParallelSettings
from affinage.model import Graph, parse
from affinage.training import TrainJob
from affinage.training.trainer import Trainer

VOCABULARY, CONTEXT, ROWS = 64, 32, 8
# XLA's other way from loops to code, a third of the compilation, and these tests compile much. JAX 0.11 has none.
QUICKLY = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}


def graph(kind: str, layers: int = 4, *, heads: int = 4, window: int | None = None, **mixture: Any) -> Graph:
    """Width 32; `dense`: SwiGLU, `moe`: 4 experts, 2 for each token."""
    experts = {"kind": "moe", "experts": 4, "top_k": 2, "width": 32} | mixture
    ffn = experts if kind == "moe" else {"kind": "swiglu", "width": 64}
    attention = {"heads": heads, "window": window}
    model = tiny_graphs.llama(layers=layers, vocabulary=VOCABULARY, scan=True, attention=attention, ffn=ffn)
    # Vectors of a usual length: norms of short ones amplify rounding.
    model["nodes"]["embed"]["init_std"] = 0.5
    return parse(model)


Feed = functools.partial(tiny.RandomFeed, context=CONTEXT, documents=3)


def program(
    model: Graph, sizes: dict[str, int], *, micro_batches: int = 1, rows: int = ROWS, parallel: Any, **more: Any
) -> Trainer:
    how = {"batch_size": rows, "gradient_accumulation_steps": micro_batches} | more
    settings = tiny.settings(**how, schedule={"peak_lr": 2e-3, "min_lr": 1e-3, "warmup_steps": 4})
    of_job = {"mesh": sizes, "seed": 3, "feed": Feed(rows), "parallel": ParallelSettings.model_validate(parallel)}
    return tiny.uncompiled(TrainJob(graph=model, settings=settings, folder=Path("unused"), **of_job))


def compiled(one: Trainer) -> Any:
    """The training step, compiled quickly."""
    quick = one.job.parallel.model_copy(update={"xla_flags": QUICKLY | one.job.parallel.xla_flags})
    return Trainer(dataclasses.replace(one.job, parallel=quick), one.mesh, one.batch).compile_training()


def run(one: Trainer, steps: int, step: Any = None) -> list[list[float]]:
    """Loss and gradient norm of the first steps, from weights that are the same for every mesh."""
    step, state = step or compiled(one), tiny.placed(first_state(one.job.graph), one.abstract)
    seen = []
    for number in range(steps):
        state, metrics = step(state, one.put(one.job.feed.batch(number)))
        seen.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return seen


@functools.cache
def first_state(model: Graph) -> Any:
    return jax.device_get(program(model, {"data": 1}, parallel={}).begin())


@functools.cache
def on_one_device(model: Graph, steps: int, rows: int = ROWS) -> list[list[float]]:
    return run(program(model, {"data": 1}, rows=rows, parallel={}), steps)


def assert_same_as_on_one_device(one: Trainer, steps: int, step: Any = None) -> None:
    np.testing.assert_allclose(run(one, steps, step), on_one_device(one.job.graph, steps, one.rows), rtol=1e-5)


def loops_of(text: str) -> str:
    """Of a compiled program what its loops do, with what that calls."""
    named = ((re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", block), block) for block in text.split("\n\n"))
    computations = {match[1]: block for match, block in named if match}
    inside: set[str] = set()
    reached = set(re.findall(r" body=%?([\w.\-]+)", text))
    while reached:
        inside |= reached
        called = " ".join(computations.get(name, "") for name in reached)
        reached = set(re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", called)) - inside
    return "\n".join(computations.get(name, "") for name in sorted(inside))
