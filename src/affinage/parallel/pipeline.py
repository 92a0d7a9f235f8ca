"""Pipeline parallelism: layers stand on different devices, micro-batches go through them one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from affinage.config.parallel import ParallelSettings
from affinage.errors import UserError
from affinage.hardware.mesh import flags_for
from affinage.model.apply_config import NAMED, ApplyConfig
from affinage.model.forward import apply_layers
from affinage.model.graph import Graph, Node
from affinage.model.layer import LayerContext, Result
from affinage.parallel.sharding import STAGES, MeshLayout, multiples
from affinage.parallel.strategy import Strategy

PyTree = Any
RESIDUAL = ("batch", "residual", "width")


def strategy_for(mesh: Mesh, settings: ParallelSettings) -> Strategy:
    """A pipeline where the mesh has stages, else one program split by XLA."""
    options = flags_for(mesh.devices.flat[0].platform, mesh.size, settings.xla_flags)
    if mesh.shape[STAGES] > 1:
        return Pipeline(options, settings.pipeline_micro_batches, settings.pipeline_rounds)
    return Strategy(options)


@dataclass(frozen=True)
class Pipeline(Strategy):
    """The layers of a repeated node as P stages along the mesh axis `pipeline` (GPipe: Huang et al., 2019).

    All stages are one `jax.vmap` over an axis that the mesh splits, and what a stage has computed goes to the next by a
    roll along that axis. In each of rounds x M + P - 1 ticks every stage works on another micro-batch; the share of
    ticks without work is (P - 1) / (rounds x M + P - 1). Embedding and head are no stages: they split the rows over
    the devices of the pipeline as well.

    Attributes:
        micro_batches: M, a multiple of P; None: the largest up to 4 P that divides the rows.
        rounds: how often a micro-batch goes through the stages. With more than one, a device holds as many shorter
            stages (the circular form of interleaved stages: Narayanan et al., 2021); the weights, which lie in the
            order of the layers, are then sent to their stages in every step.
    """

    micro_batches: int | None = None
    rounds: int = 1

    def adapt(self, config: ApplyConfig) -> ApplyConfig:
        """See `Strategy.adapt`."""
        return replace(config, layers=self._layers, layout=cast(MeshLayout, config.layout).beside_stages)

    def check(self, graph: Graph, rows: int, config: ApplyConfig) -> None:
        """See `Strategy.check`."""
        layout = cast(MeshLayout, config.layout)
        repeated = [node for node in graph.nodes if node.repeat is not None]
        if not repeated:
            raise UserError(
                f"the mesh has pipeline {layout.stages}, but no node of the model is repeated",
                where="mesh",
                fix="A pipeline's stages are the layers of a node with `repeat`. Use the other axes of the mesh.",
            )
        pieces = layout.stages * self.rounds
        for node in repeated:
            if node.layers % pieces:
                per = f"{layout.stages} stages" + (f" of {self.rounds} rounds" if self.rounds > 1 else "")
                raise UserError(
                    f"the {node.layers} layers of `{node.name}` do not divide into {per}",
                    where="mesh",
                    fix=f"`repeat: {multiples(node.layers, pieces)}` works with this mesh.",
                )
        self.parts(rows, layout)

    def parts(self, rows: int, layout: MeshLayout) -> int:
        """Micro-batches that this many rows go through the pipeline in.

        Raises:
            UserError: naming numbers that work.
        """
        stages, pieces = layout.stages, layout.of_a_stage.parts("batch")
        fitting = [number for number in range(stages, rows + 1, stages) if rows % (number * pieces) == 0]
        wanted = self.micro_batches or max((number for number in fitting if number <= 4 * stages), default=stages)
        if wanted in fitting:
            return wanted
        near = sorted(fitting, key=lambda number: abs(number - wanted))[:2]
        raise UserError(
            f"{rows} rows, split {pieces} times, do not divide into {wanted} micro-batches of {stages} stages",
            where="parallel.pipeline_micro_batches",
            fix=f"Set `pipeline_micro_batches` to {' or '.join(map(str, sorted(near)))}."
            if near
            else f"Make the rows of a micro-batch of the training a multiple of {stages * pieces}.",
        )

    def _layers(self, node: Node, params: PyTree, x: Float[Array, "B S D"], context: LayerContext) -> Result:
        """The layers of `node`, as `apply_layers` applies them."""
        beside = cast(MeshLayout, context.config.layout)
        layout, own, rounds = beside.of_a_stage, beside.own_stages, self.rounds
        x, rows = beside.gather_rows(x), {name: beside.gather_rows(array) for name, array in context.batch.items()}
        parts, each = self.parts(len(x), beside), node.layers // (own * rounds)
        rows = {name: _micro_batches(array, parts) for name, array in rows.items()}
        # [stages, rounds, layers of a piece, ...]
        weights = jax.tree.map(lambda w: jnp.swapaxes(w.reshape(rounds, own, each, *w.shape[1:]), 0, 1), params)
        weights = jax.tree.map(beside.pin_stages, weights)
        inside = replace(context.config, layout=layout, layers=None)

        def stage(weights: PyTree, x: Array, piece: Array, number: Array) -> tuple[Array, Any, Any]:
            """Stage `number` at its `piece` of work: micro-batch `piece` mod M of round `piece` div M."""
            batch = {name: _at(array, piece % parts) for name, array in rows.items()}
            inner = replace(context, batch=batch, config=inside)
            x = layout.constrain(x, RESIDUAL)
            inner = replace(inner, prepared=node.layer.prepare((x,), inner))
            weights = jax.tree.map(lambda w: _at(w, piece // parts), weights)
            first = (piece // parts * beside.stages + number) * each
            result = apply_layers(replace(node, repeat=each), weights, x, inner, first)
            return layout.constrain(result.value, RESIDUAL), result.losses, result.metrics

        if rounds > 1:
            # Else JAX would keep the weights that are cut out for a round in every tick. Of one round they are the same
            # in every tick, and kept once.
            keep = partial(_with_block_inputs, context.config.remat or NAMED)
            stage = jax.checkpoint(stage, prevent_cse=False, policy=keep)
        run = jax.vmap(stage, spmd_axis_name=STAGES if own > 1 else None)
        waiting = beside.at_first_stage(_micro_batches(x, parts))
        value, losses, metrics = _schedule(partial(run, weights), waiting, beside.stages, rounds)
        y = jnp.swapaxes(layout.constrain(value, (None, *RESIDUAL)), 0, 1).reshape(x.shape)
        return Result(beside.own_rows(y), losses=losses, metrics=metrics)


def _schedule(
    run: Callable[..., Any], waiting: Float[Array, "P M b S D"], stages: int, rounds: int
) -> tuple[Float[Array, "M b S D"], Any, Any]:
    """All ticks: what the last stage makes of the micro-batches that wait at the first one, and sums of by-products.

    In tick t stage i is at its piece of work t - i; before the first and after the last one it works on whatever is
    there, and nothing reads that.
    """
    own, parts = waiting.shape[:2]
    number = jnp.arange(own)
    first = (number == 0).reshape(-1, 1, 1, 1)

    def store(waiting: Array, made: Array, time: Array | int) -> Array:
        """Put what went round to the first stage into the place of its micro-batch."""
        place = (time - stages) % parts
        arrived = jnp.where(time >= stages, made, _at(waiting, place, 1))
        return jax.lax.dynamic_update_index_in_dim(waiting, arrived, place, 1)

    def tick(carry: tuple[Array, Array], time: Array) -> tuple[tuple[Array, Array], Any]:
        made, waiting = carry
        made = jnp.roll(made, 1, axis=0)
        waiting = store(waiting, made, time)
        piece = jnp.clip(time - number, 0, rounds * parts - 1)
        made, losses, metrics = run(jnp.where(first, _at(waiting, time % parts, 1), made), piece, number)
        busy = piece == time - number
        # A loss counts its tokens once, not in every layer.
        counted = busy & (number == 0) & (piece < parts)
        losses = {name: (_sum(busy, total), _sum(counted, count)) for name, (total, count) in losses.items()}
        return (made, waiting), (losses, jax.tree.map(partial(_sum, busy), metrics))

    ticks = rounds * parts + stages - 1
    (made, waiting), sums = jax.lax.scan(tick, (jnp.zeros_like(waiting[:, 0]), waiting), jnp.arange(ticks))
    losses, metrics = jax.tree.map(jnp.sum, sums)
    return store(waiting, jnp.roll(made, 1, axis=0), ticks)[0], losses, metrics


def _with_block_inputs(remat: Callable[..., Any], primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    """What `remat` keeps, and what every layer begins with: of two policies the outer one holds for what is inside."""
    choice = remat(primitive, *inputs, **parameters)
    offloaded = hasattr(choice, "dst")  # to the host's memory
    return True if parameters.get("name") == "block_input" and not offloaded else choice


def _micro_batches(x: Array, parts: int) -> Array:
    """[B, ...] as [M, B / M, ...]: micro-batch m has the rows m, m + M, ..., so that every device keeps its own."""
    return jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)


def _at(x: Array, index: Array | int, axis: int = 0) -> Array:
    if x.shape[axis] == 1:
        return jnp.squeeze(x, axis)
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


def _sum(condition: Array, values: Array) -> Array:
    return jnp.sum(jnp.where(condition, values, 0.0))
