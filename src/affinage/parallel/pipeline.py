"""Pipeline parallelism: layers stand on different devices, micro-batches go through them one after the other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from affinage.config.parallel import ParallelSettings
from affinage.errors import UserError
from affinage.hardware.mesh import flags_for
from affinage.model.apply_config import NAMED, ApplyConfig
from affinage.model.forward import apply_layers
from affinage.model.graph import Graph, Node
from affinage.model.layer import LayerContext, Result
from affinage.parallel.sharding import STAGES, MeshLayout, multiples
from affinage.parallel.strategy import Spmd, Strategy

PyTree = Any


def strategy_for(mesh: Mesh, settings: ParallelSettings) -> Strategy:
    """A pipeline where the mesh has stages, else one program split by XLA."""
    options = flags_for(mesh.devices.flat[0].platform, mesh.size, settings.xla_flags)
    if mesh.shape[STAGES] > 1:
        return Pipeline(options, settings.pipeline_micro_batches, settings.pipeline_rounds)
    return Spmd(options)


@dataclass(frozen=True)
class Pipeline(Spmd):
    """The layers of a repeated node as stages along the mesh axis `pipeline` (GPipe: Huang et al., 2019).

    One program on all devices, in which every device runs its stage on another micro-batch in each of
    `rounds` x M + P - 1 ticks and sends the result to its neighbor; the other mesh axes split the work of a stage as
    without a pipeline. The share of ticks in which a device has nothing to do is (P - 1) / (rounds x M + P - 1).

    Attributes:
        micro_batches: M; None: as many as divide the rows, up to four for each of the P stages.
        rounds: how often a micro-batch goes round. With more than one, a device holds as many shorter stages (the
            circular form of interleaved stages: Narayanan et al., 2021); the weights, which lie in the order of the
            layers, are then sent to their stages in every micro-batch of the training.
    """

    micro_batches: int | None = None
    rounds: int = 1

    def adapt(self, config: ApplyConfig) -> ApplyConfig:
        """See `Strategy.adapt`."""
        return replace(config, layers=self._layers, attention="xla")

    def check(self, graph: Graph, rows: int, config: ApplyConfig) -> None:
        """See `Strategy.check`."""
        if config.rings:
            raise UserError(
                "ring attention does not go through a pipeline",  # JAX cannot differentiate nested shard_maps
                where="parallel.context_attention",
                fix="Set `context_attention: all_gather`.",
            )
        if config.attention not in ("auto", "xla"):
            raise UserError(
                f"attention by {config.attention} does not go through a pipeline",
                where="attention",
                fix="Set it to auto or xla; auto is xla in a pipeline.",
            )
        layout = cast(MeshLayout, config.layout)
        stages = layout.mesh.shape[STAGES]
        repeated = [node for node in graph.nodes if node.repeat is not None]
        if not repeated:
            raise UserError(
                f"the mesh has pipeline {stages}, but no node of the model is repeated",
                where="mesh",
                fix="A pipeline's stages are the layers of a node with `repeat`. Use the other axes of the mesh.",
            )
        for node in repeated:
            pieces, layers = stages * self.rounds, node.layers
            if layers % pieces:
                fitting = [n for n in range(1, layers + 1) if layers % (n * self.rounds) == 0][:4]
                per = f"{stages} stages" + (f" of {self.rounds} rounds" if self.rounds > 1 else "")
                fix = f"`repeat: {multiples(layers, pieces, ' or ')}` works"
                fix += f"; so does pipeline {' or '.join(map(str, fitting))} in the mesh." if fitting else "."
                raise UserError(f"the {layers} layers of `{node.name}` do not divide into {per}", where="mesh", fix=fix)
        self.parts(rows, layout)

    def parts(self, rows: int, layout: MeshLayout) -> int:
        """Micro-batches that this many rows go through the pipeline in.

        Raises:
            UserError: naming the nearest number that works.
        """
        stages, pieces = layout.mesh.shape[STAGES], layout.parts("batch")
        fitting = [number for number in range(1, rows + 1) if rows % (number * pieces) == 0]
        usual = max((number for number in fitting if number <= 4 * stages), default=0)
        wanted = self.micro_batches or usual
        enough = stages if self.rounds > 1 else 1
        if wanted in fitting and wanted >= enough:
            return wanted
        why = f"{rows} rows, split {pieces} times, do not divide into {wanted} micro-batches of a pipeline"
        if wanted < enough:
            why = f"{wanted} micro-batches are fewer than the {stages} stages, which several rounds need at least"
        near = sorted((number for number in fitting if number >= enough), key=lambda number: abs(number - wanted))[:2]
        fix = f"Set `pipeline_micro_batches` to {' or '.join(map(str, sorted(near)))}." if near else "Give more rows."
        raise UserError(why, where="parallel.pipeline_micro_batches", fix=fix)

    def _layers(self, node: Node, params: PyTree, x: Float[Array, "B S D"], context: LayerContext) -> Result:
        """The layers of `node`, as `apply_layers` applies them."""
        layout = cast(MeshLayout, context.config.layout)
        stages, rounds = layout.mesh.shape[STAGES], self.rounds
        parts = self.parts(len(x), layout)
        by_stage = jax.tree.map(lambda w: w.reshape(rounds, stages, -1, *w.shape[1:]), params)
        rows = {name: _split(array, parts) for name, array in context.batch.items()}
        # XLA:CPU ends the process over the gradient of the inputs, a sum over the stages, where that is in bfloat16.
        passed = jnp.dtype(jnp.float32) if context.config.platform == "cpu" else x.dtype
        inputs = layout.constrain(_split(x.astype(passed), parts), (None, "batch", "residual", "width"))
        key = None if context.key is None else jax.random.key_data(context.key)

        def stage(weights: PyTree, given: Array, rows: Mapping[str, Array], number: Array, key: Array | None) -> Result:
            layers = node.layers // (stages * rounds)
            inner = replace(context, batch=rows, key=None if key is None else jax.random.wrap_key_data(key))
            own = layout.constrain(given.astype(x.dtype), ("batch", "residual", "width"))
            inner = replace(inner, prepared=node.layer.prepare((own,), inner))
            result = apply_layers(replace(node, repeat=layers), weights, own, inner, number * layers)
            return replace(result, value=result.value.astype(passed))

        run = jax.shard_map(
            _schedule(stage, stages, rounds, parts, context.config.remat),
            mesh=layout.mesh,
            in_specs=(PartitionSpec(None, STAGES), PartitionSpec(), PartitionSpec(), PartitionSpec()),
            out_specs=(PartitionSpec(STAGES), PartitionSpec(), PartitionSpec()),
            axis_names={STAGES},
        )
        values, losses, metrics = run(by_stage, inputs, rows, key)
        y = jnp.swapaxes(values[0], 0, 1).reshape(x.shape).astype(x.dtype)
        return Result(layout.constrain(y, ("batch", "residual", "width")), losses=losses, metrics=metrics)


def _schedule(
    stage: Callable[..., Result], stages: int, rounds: int, parts: int, remat: Callable[..., Any] | None
) -> Callable[..., Any]:
    """What one device does: a tick is one stage on one micro-batch.

    In tick t device i is at its (t - i)-th piece of work, micro-batch (t - i) mod M of round (t - i) div M; before the
    first and after the last one it works on whatever is there, and nothing reads that.
    """
    work = rounds * parts
    ring = [(index, (index + 1) % stages) for index in range(stages)]

    def device(weights: PyTree, inputs: Array, rows: Mapping[str, Array], key: Array | None) -> Any:
        here = jax.lax.axis_index(STAGES)
        weights = jax.tree.map(lambda w: w[:, 0], weights)

        def work_on(round_: Array, weights: PyTree, x: Array, rows: Mapping[str, Array], key: Array | None) -> Any:
            own = jax.tree.map(lambda w: _at(w, round_), weights)
            result = stage(own, x, rows, round_ * stages + here, key)
            return result.value, result.losses, result.metrics

        if rounds > 1:
            # Left to itself, JAX would keep the weights that are cut out for a round in every tick. Of one round they
            # are the same in every tick, and kept once.
            work_on = jax.checkpoint(work_on, prevent_cse=False, policy=partial(_with_block_inputs, remat or NAMED))

        def tick(carry: tuple[Array, Array], time: Array) -> tuple[tuple[Array, Array], Any]:
            arrived, waiting = carry
            piece = jnp.clip(time - here, 0, work - 1)
            busy = piece == time - here
            round_, part = piece // parts, piece % parts
            waiting = _put(waiting, arrived, (time - stages) % parts, (here == 0) & (time >= stages))
            x = jnp.where(here == 0, _at(waiting, part), arrived)
            own_rows = {name: _at(array, part) for name, array in rows.items()}
            value, losses, metrics = work_on(round_, weights, x, own_rows, key)
            # A loss counts its tokens once, not in every layer.
            first = busy & (here == 0) & (round_ == 0)
            losses = {name: (_if(busy, total), _if(first, count)) for name, (total, count) in losses.items()}
            metrics = jax.tree.map(lambda metric: _if(busy, metric), metrics)
            return (jax.lax.ppermute(value, STAGES, ring), waiting), (losses, metrics)

        inputs = jax.lax.pcast(inputs, (STAGES,), to="varying")
        ticks = work + stages - 1
        (arrived, waiting), products = jax.lax.scan(tick, (jnp.zeros_like(inputs[0]), inputs), jnp.arange(ticks))
        done = _put(waiting, arrived, parts - 1, here == 0)  # what came back to the first stage is the result
        losses, metrics = jax.tree.map(lambda values: jax.lax.psum(jnp.sum(values), STAGES), products)
        return done[None], losses, metrics

    return device


def _with_block_inputs(remat: Callable[..., Any], primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    """What `remat` keeps, and what every layer begins with: of two policies the outer one holds for what is inside."""
    choice = remat(primitive, *inputs, **parameters)
    offloaded = hasattr(choice, "dst")  # to the host's memory
    return True if parameters.get("name") == "block_input" and not offloaded else choice


def _split(x: Array, parts: int) -> Array:
    """[B, ...] as [M, B / M, ...]: micro-batch m has the rows m, m + M, ..., so that every device keeps its own."""
    return jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)


def _at(x: Array, index: Array) -> Array:
    return x[0] if x.shape[0] == 1 else jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _put(x: Array, value: Array, index: Array | int, condition: Array) -> Array:
    kept = jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(x, jnp.where(condition, value, kept), index, 0)


def _if(condition: Array, value: Array) -> Array:
    return jnp.where(condition, value, jnp.zeros_like(value))
