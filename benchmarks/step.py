"""Where the time of a training step goes on this machine, part by part; the planner's estimate is the whole's peer.

    python benchmarks/step.py [RECIPE] [--set KEY=VALUE ...] [--quick]

A run's step is one program, in which XLA mixes its parts. Here forward, loss (logits, loss and its gradient), backward
and optimizer are a program each; the whole step, as a run compiles it, stands beside them. The default recipe is FAX's
124M model. A CPU measures one row of 256 tokens, unless `--set` gives another size.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from measuring import batch_of, finish, options_of, result, trainer_of

from affinage.config.load import load_recipe
from affinage.hardware.devices import acquire
from affinage.model.forward import apply_part
from affinage.planning.plan import forecast, planned_graph
from affinage.registry import load_plugins
from affinage.training.state import Purpose, random_key
from affinage.training.step import make_update
from affinage.training.trainer import rows_per_step

PyTree = Any
NAMES = ("forward", "loss", "backward", "optimizer", "step")


def parts_of(trainer: Any) -> list[Callable[..., Any]]:
    """Return the parts of a step as compiled functions.

    Returns:
        forward: (parameters, batch) -> (what the loss reads, the pullback through the model).
        loss: (what the loss reads, parameters, batch) -> the gradient of the mean loss by it.
        backward: (the pullback, that gradient) -> the gradient by the parameters, float32.
        optimizer: (state, gradient) -> next state.
    """
    graph, seed = trainer.job.graph, trainer.job.seed
    config = dataclasses.replace(trainer.adapted_config, key=random_key(seed, Purpose.DROPOUT))
    inputs = {name for name, _ in graph.inputs}
    read = tuple(name for name in graph[graph.loss].inputs if name not in inputs)
    before = set(graph.needed_for(graph.loss)) - {graph.loss}
    update = make_update(trainer.optimizer, trainer.job.settings, seed=seed)

    def inputs_of(batch: PyTree) -> dict[str, Any]:
        return {name: batch[name] for name in inputs if name in batch}

    def forward(params: PyTree, batch: PyTree) -> Any:
        def values(params: PyTree) -> Any:
            outputs = apply_part(graph, before, params, inputs_of(batch), batch, config)
            return {name: outputs.values[name] for name in read}, sum(outputs.losses, jnp.zeros(()))

        return jax.vjp(values, params)

    def loss(values: Any, params: PyTree, batch: PyTree) -> Any:
        def mean(values: Any) -> Any:
            made, losses = values
            outputs = apply_part(graph, {graph.loss}, params, inputs_of(batch) | made, batch, config)
            return outputs.values[graph.loss].mean() + losses

        return jax.grad(mean)(values)

    def backward(pullback: Any, direction: Any) -> PyTree:
        return jax.tree.map(lambda g: g.astype(jnp.float32), pullback(direction)[0])

    def optimizer(state: Any, grads: PyTree) -> Any:
        healthy_loss = jnp.float32(math.log(graph.vocabulary))
        return update(state, grads, healthy_loss, optax.tree.norm(grads))[0]

    return [jax.jit(forward), jax.jit(loss), jax.jit(backward), jax.jit(optimizer, donate_argnums=0)]


def measure(trainer: Any, batch: Any, steps: int) -> dict[str, float]:
    """Return the mean seconds of the parts and of the whole step, without the first repetition."""
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}

    def timed(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        value = jax.block_until_ready(function(*arguments))
        seconds[name].append(time.perf_counter() - start)
        return value

    put, state = trainer.put(batch), trainer.begin()
    forward, loss, backward, optimizer = parts_of(trainer)
    for _ in range(steps + 1):
        values, pullback = timed("forward", forward, state.params, put)
        direction = timed("loss", loss, values, state.params, put)
        grads = timed("backward", backward, pullback, direction)
        del values, pullback, direction
        state = timed("optimizer", optimizer, state, grads)
    step = trainer.compile_training()
    for _ in range(steps + 1):
        state, _ = timed("step", step, state, put)
    return {name: fmean(taken[1:]) for name, taken in seconds.items()}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("recipe", nargs="?", help="default: fax-124m, or quickstart with --quick")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    devices = acquire()
    settings = ["pretrain.gradient_accumulation_steps=1"]
    if options.quick or devices[0].platform == "cpu":
        settings += ["pretrain.per_device_batch_size=null", "pretrain.batch_size=1"]
        settings.append(f"packing.seq_len={64 if options.quick else 256}")
    name = options.recipe or ("quickstart" if options.quick else "fax-124m")
    loaded = load_recipe(name, [*settings, *options.set])
    load_plugins(loaded)
    recipe = loaded.recipe
    pretrain, context, mesh = recipe.pretrain, recipe.packing.seq_len, {str(k): size for k, size in recipe.mesh.items()}
    if pretrain is None:
        raise SystemExit(f"{name}: only the pretraining of a language model is measured")
    graph, rows = planned_graph(loaded), rows_per_step(pretrain, len(devices))
    tokens = np.random.default_rng(0).integers(0, graph.vocabulary, (rows, context)).astype(np.int32)
    batch = batch_of(tokens, np.zeros_like(tokens))
    trainer = trainer_of(graph, pretrain, mesh, batch, recipe.parallel)
    if trainer.split.adapters is not None or trainer.mesh.shape["pipeline"] > 1:
        raise SystemExit(f"{name}: a step with frozen weights or a pipeline has no such parts")
    seconds = measure(trainer, batch, 1 if options.quick else 10)
    kind, shape, size = devices[0].device_kind, trainer.mesh.shape, trainer.mesh.size
    chips = {"rows": rows, "context": context, "mesh": shape, "device_kind": kind, "devices": size}
    estimate = forecast(graph, pretrain, recipe.parallel, **chips)
    planned = {"step": estimate[1].seconds} if estimate else {}
    results = [result(part, seconds[part], "s", planned.get(part)) for part in NAMES]
    rates = {"tokens_per_second": rows * context / seconds["step"]}
    rates["flops_per_second"] = trainer.flops_per_step / seconds["step"]
    finish("step", results, recipe=recipe.name, device=kind, rows=rows, context=context, **rates)


if __name__ == "__main__":
    main()
