"""The seconds of a training step by its parts: forward, loss, backward, optimizer.

The step of a run is one program, in which XLA mixes its parts. Here each part is a program of its own, with what it
hands to the next one in memory between them; the whole step is measured beside them, and what they differ by is what
compiling them together is worth (or costs).
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from affinage.errors import UserError
from affinage.model.module import apply_part
from affinage.training.job import HostBatch
from affinage.training.optimizer import learning_rate
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


def measure(program: Trainer, batch: HostBatch, steps: int = 10) -> dict[str, Timing]:
    """Seconds of the parts, and of the whole step, over `steps` repetitions after one that does not count.

    Args:
        program: of a training of whole batches (one micro-batch) without a pipeline.
        batch: what every step is made on.
        steps: repetitions.

    Returns:
        Timings by the names in `PARTS`, and `STEP`.
    """
    if program.held.held:
        fix = "Leave out `lora`, and set `reference: precomputed`."
        raise UserError("only trainings of all weights are measured by their parts", fix=fix)
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
    call = dataclasses.replace(program.adapted_call, key=key)
    inputs = {name for name, _ in graph.inputs}
    read = tuple(name for name in graph[graph.loss].inputs if name not in inputs)
    before = set(graph.needed_for(graph.loss)) - {graph.loss}

    def values_of(params: PyTree, batch: PyTree) -> Any:
        given = {name: batch[name] for name in inputs if name in batch}
        part = apply_part(graph, before, params, given, batch, call)
        return {name: part.values[name] for name in read}, sum(part.losses, jnp.zeros(()))

    def forward(params: PyTree, batch: PyTree) -> Any:
        return jax.vjp(lambda params: values_of(params, batch), params)

    def loss(values: Any, params: PyTree, batch: PyTree) -> Any:
        def mean(values: Any) -> Any:
            made, losses = values
            given = {**{name: batch[name] for name in inputs if name in batch}, **made}
            part = apply_part(graph, {graph.loss}, params, given, batch, call)
            return part.values[graph.loss].mean() + losses

        return jax.grad(mean)(values)

    def backward(pull: Any, direction: Any) -> PyTree:
        (grads,) = pull(direction)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    return forward, loss, backward


def _update(program: Trainer) -> Callable[..., Any]:
    job, settings = program.job, program.job.settings
    update = make_update(
        program.optimizer,
        learning_rate(settings.schedule, settings.steps),
        seed=job.seed,
        stochastic_rounding=settings.precision.rounding == "stochastic",
        health=settings.health,
        ema=settings.ema,
    )
    loss = math.log(job.graph.vocabulary)  # one that no judge of losses minds

    def apply_gradient(state: Any, grads: PyTree) -> Any:
        return update(state, grads, jnp.float32(loss), optax.tree.norm(grads))[0]

    return apply_gradient
