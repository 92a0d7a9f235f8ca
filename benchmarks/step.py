"""Where the time of a training step goes on this machine, part by part, beside what the planner predicts.

    python benchmarks/step.py [RECIPE] [--set KEY=VALUE ...] [--quick] [--steps 10] ...

A run's step is one program, in which XLA mixes its parts. Here forward, loss (with its gradient, and the logits),
backward and optimizer are a program each, with what one hands to the next in memory between them; the whole step, as a
run compiles it, stands beside them. Without a name it is FAX's 124M model; a CPU measures one sequence of 256 tokens.
"""

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from affinage.config.load import load_recipe
from affinage.config.parallel import ParallelSettings
from affinage.config.training import TrainSettings
from affinage.hardware.devices import acquire
from affinage.model import Graph
from affinage.model.forward import apply_part, batch_shapes
from affinage.parallel import make_mesh
from affinage.planning.plan import forecast, planned_graph
from affinage.plugins import load_plugins
from affinage.training.job import HostBatch, TrainJob, rows_per_step
from affinage.training.state import Purpose, random_key
from affinage.training.step import make_update
from affinage.training.trainer import Trainer

PyTree = Any

PARTS = ("forward", "loss", "backward", "optimizer")
STEP = "step"  # the whole, as a run compiles it


@dataclass(frozen=True)
class Timing:
    """Seconds of some repetitions, by the clock and of the processor (all its cores together)."""

    seconds: tuple[float, ...]
    processor: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Of all of them."""
        return statistics.fmean(self.seconds)

    @property
    def deviation(self) -> float:
        """Standard deviation of the sample; 0 of one."""
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0


def program_of(
    graph: Graph, settings: TrainSettings, parallel: ParallelSettings, mesh: Mapping[str, int | str], batch: HostBatch
) -> Trainer:
    """A training without a feed and a folder, on all devices of this machine: for its steps alone."""
    nothing: Any = None
    job = TrainJob(graph=graph, settings=settings, mesh=mesh, seed=0, feed=nothing, folder=Path(), parallel=parallel)
    return Trainer(job, make_mesh(mesh, acquire()), batch)


def synthetic_batch(graph: Graph, rows: int, context: int) -> dict[str, np.ndarray]:
    """A batch as a feed makes it, of uniformly drawn tokens in rows of one document: what is computed is the same."""
    shapes = batch_shapes(graph, rows, context)
    draw = np.random.default_rng(0)
    batch = {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
    batch["tokens"] = draw.integers(0, graph.vocabulary, (rows, context)).astype(np.int32)
    batch["positions"] = np.tile(np.arange(context, dtype=np.int32), (rows, 1))
    batch["loss_mask"] = np.ones((rows, context), np.float32)
    batch["rows"] = np.arange(rows, dtype=np.int32)
    return batch


def measure(program: Trainer, batch: HostBatch, steps: int = 10) -> dict[str, Timing]:
    """Seconds of the parts, and of the whole step, over `steps` repetitions after one that does not count.

    Args:
        program: of a training of whole batches (one micro-batch) without a pipeline.
        batch: what every step is made on.
        steps: repetitions.

    Returns:
        Timings by the names in `PARTS`, and `STEP`.
    """
    if program.split.has_frozen:
        raise SystemExit("only trainings of all weights are measured by their parts: leave out `lora`")
    put, state = program.put(batch), program.begin()
    forward, loss, backward = (jax.jit(part) for part in differentiated(program))
    update = jax.jit(_update(program), donate_argnums=0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*PARTS, STEP)}
    for _ in range(steps + 1):
        values, pull = _timed(found["forward"], forward, state.params, put)
        direction = _timed(found["loss"], loss, values, state.params, put)
        grads = _timed(found["backward"], backward, pull, direction)
        del values, pull, direction
        state = _timed(found["optimizer"], update, state, grads)
    step = program.compile_training()
    for _ in range(steps + 1):
        state, _ = _timed(found[STEP], step, state, put)
    return {name: Timing(*zip(*taken[1:], strict=True)) for name, taken in found.items()}


def _timed(taken: list[tuple[float, float]], function: Callable[..., Any], *arguments: Any) -> Any:
    jax.block_until_ready(arguments)
    began, worked = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(function(*arguments))
    taken.append((time.perf_counter() - began, time.process_time() - worked))
    return result


def differentiated(program: Trainer) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The gradient of a program's mean loss as three functions.

    Returns:
        forward: (parameters, batch) -> (what the loss reads, the way back through the model).
        loss: (what the loss reads, parameters, batch) -> the gradient of the mean loss by it.
        backward: (the way back, that gradient) -> the gradient by the parameters, float32.
    """
    graph, key = program.job.graph, random_key(program.job.seed, Purpose.DROPOUT)
    config = dataclasses.replace(program.adapted_config, key=key)
    inputs = {name for name, _ in graph.inputs}
    read = tuple(name for name in graph[graph.loss].inputs if name not in inputs)
    before = set(graph.needed_for(graph.loss)) - {graph.loss}

    def values_of(params: PyTree, batch: PyTree) -> Any:
        given = {name: batch[name] for name in inputs if name in batch}
        part = apply_part(graph, before, params, given, batch, config)
        return {name: part.values[name] for name in read}, sum(part.losses, jnp.zeros(()))

    def forward(params: PyTree, batch: PyTree) -> Any:
        return jax.vjp(lambda params: values_of(params, batch), params)

    def loss(values: Any, params: PyTree, batch: PyTree) -> Any:
        def mean(values: Any) -> Any:
            made, losses = values
            given = {**{name: batch[name] for name in inputs if name in batch}, **made}
            part = apply_part(graph, {graph.loss}, params, given, batch, config)
            return part.values[graph.loss].mean() + losses

        return jax.grad(mean)(values)

    def backward(pull: Any, direction: Any) -> PyTree:
        (grads,) = pull(direction)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    return forward, loss, backward


def _update(program: Trainer) -> Callable[..., Any]:
    update = make_update(program.optimizer, program.job.settings, seed=program.job.seed)
    loss = math.log(program.job.graph.vocabulary)  # one that is no spike

    def apply_gradient(state: Any, grads: PyTree) -> Any:
        return update(state, grads, jnp.float32(loss), optax.tree.norm(grads))[0]

    return apply_gradient


def measured(
    recipe: str, overrides: list[str], steps: int, batch_size: int | None, seq_len: int | None
) -> dict[str, Any]:
    device, cpu = acquire()[0], acquire()[0].platform == "cpu"
    batch_size, seq_len = batch_size or (1 if cpu else None), seq_len or (256 if cpu else None)
    settings = [*overrides, "pretrain.gradient_accumulation_steps=1"]
    settings += ["pretrain.per_device_batch_size=null", f"pretrain.batch_size={batch_size}"] if batch_size else []
    loaded = load_recipe(recipe, [*settings, *([f"packing.seq_len={seq_len}"] if seq_len else [])])
    load_plugins(loaded)
    pretrain, length = loaded.recipe.pretrain, loaded.recipe.packing.seq_len
    if pretrain is None:
        raise SystemExit(f"{recipe}: only the pretraining of a language model is measured")
    graph, mesh = planned_graph(loaded), {str(axis): size for axis, size in loaded.recipe.mesh.items()}
    rows = rows_per_step(pretrain, len(acquire()))
    batch = synthetic_batch(graph, rows, length)
    program = program_of(graph, pretrain, loaded.recipe.parallel, mesh, batch)
    if program.mesh.shape["pipeline"] > 1:
        raise SystemExit(f"{recipe}: the stages of a pipeline do not part into forward and backward")
    found = measure(program, batch, steps)
    planned = forecast(
        graph,
        pretrain,
        loaded.recipe.parallel,
        rows=rows,
        context=length,
        mesh=program.mesh.shape,
        device_kind=device.device_kind,
        devices=program.mesh.size,
    )
    return {
        "recipe": loaded.recipe.name,
        "device": device.device_kind,
        "devices": len(acquire()),
        "rows": rows,
        "seq_len": length,
        "timings": found,
        "planned": planned and planned[1].seconds,
        "tokens_per_second": rows * length / found[STEP].mean,
        "flops_per_second": program.flops_per_step / found[STEP].mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="fax-124m")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=10, help="repetitions of each part")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--quick", action="store_true", help="one repetition of 64 tokens")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.batch_size, options.seq_len = 1, 1, 64
    facts = measured(options.recipe, options.set, options.steps, options.batch_size, options.seq_len)
    print(f"{facts['recipe']}, {facts['rows']} x {facts['seq_len']:,} tokens on {facts['devices']} x {facts['device']}")
    results = []
    for name, timing in facts.pop("timings").items():
        planned = facts["planned"] if name == STEP else None
        print(
            f"{name:<10}{timing.mean:10.4f} s ± {timing.deviation:.4f}"
            f"{statistics.fmean(timing.processor):10.3f} CPU s{f'{planned:10.4f} planned' if planned else ''}"
        )
        line = {"name": name, "ours": timing.mean, "peer": planned, "unit": "s"}
        results.append(line | {"ratio": timing.mean / planned if planned else None, "deviation": timing.deviation})
    print(f"{facts['tokens_per_second']:,.0f} tokens/s, {facts['flops_per_second'] / 1e9:,.1f} GFLOP/s")
    print(json.dumps({"benchmark": "step", "results": results, **facts}))


if __name__ == "__main__":
    main()
