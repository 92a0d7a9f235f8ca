"""How one train step becomes one compiled program for all devices of a mesh: split by XLA, or as a pipeline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import checkpoint_policies as policies
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from affinage.config.training import ParallelSettings
from affinage.errors import UserError
from affinage.model.apply_config import NAMED, ApplyConfig
from affinage.model.forward import apply_layers
from affinage.model.graph import Graph, Node
from affinage.model.layer import LayerContext, Result
from affinage.parallel.sharding import STAGES, MeshLayout, multiples, replicated

PyTree = Any
Function = Callable[..., Any]
_RESIDUAL = ("batch", "residual", "width")

# All of them let collectives run beside the arithmetic. They are options of one compilation, not of the environment:
# the planner's compiled check and a run have the same, and a recipe's `parallel.xla_flags` replaces single ones.
_FLAGS: Mapping[str, Mapping[str, bool | int]] = {
    "tpu": {
        "xla_tpu_enable_latency_hiding_scheduler": True,  # order operations so that transfers are under way early
        "xla_enable_async_all_gather": True,  # FSDP's gathering of the next layer's weights
        # Not xla_tpu_enable_async_collective_fusion: the compiler refuses it for TPU v4, as it may give wrong results.
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_tpu_enable_data_parallel_all_reduce_opt": True,  # sums of gradients between slices, over the network
        "xla_tpu_data_parallel_opt_different_sized_ops": True,
    },
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**27,  # few large transfers: NCCL has a price for each
        "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**26,
        # Not xla_gpu_enable_pipelined_reduce_scatter and the like: XLA then joins transfers of many layers, whose
        # gradients wait for each other: a step of llama3-1b on 8 H100 would take 52 GiB instead of 31.
    },
}


@dataclass(frozen=True)
class Strategy:
    """One program on all devices, split by XLA's partitioner from the shardings of its arguments.

    Data, fully sharded, tensor, expert and context parallelism are in the mesh and the sharding table alone.
    """

    compiler_options: Mapping[str, bool | int | str] = field(default_factory=dict)  # XLA's, by name

    def check(self, graph: Graph, rows: int, layout: MeshLayout) -> None:
        """Refuse, by a UserError, a model or rows of a micro-batch that the strategy cannot run on the mesh."""

    def adapt(self, config: ApplyConfig) -> ApplyConfig:
        """How the graph is to be applied inside the steps."""
        return config

    def compile(self, step: Function, state: PyTree, batch: PyTree, *, donate: bool) -> Function:
        """Compile `(state, batch) -> (state, metrics)`, whose new state takes the memory of the old one and is sharded
        like it, or without `donate` `(state, batch) -> metrics`. Metrics are whole on every device.

        The arguments are trees of `jax.ShapeDtypeStruct` with shardings. UserError: XLA does not know an option.
        """
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        whole = replicated(jax.tree.leaves(shardings)[0].mesh)
        new, donated = ((shardings, whole), 0) if donate else (whole, ())
        jitted = jax.jit(step, donate_argnums=donated, out_shardings=new)
        options = {name: flag if isinstance(flag, bool) else str(flag) for name, flag in self.compiler_options.items()}
        try:
            return jitted.lower(state, batch).compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            what, fix = f"XLA: {str(error).partition(chr(10))[0]}", "Names begin with xla_ and have no --."
            raise UserError(what, where="parallel.xla_flags", fix=fix) from error


def strategy_for(mesh: Mesh, settings: ParallelSettings) -> Strategy:
    """A pipeline where the mesh has stages, else one program split by XLA; with XLA's flags for several devices."""
    flags = _FLAGS.get(mesh.devices.flat[0].platform, {}) if mesh.size > 1 else {}
    options = {**flags, **settings.xla_flags}
    if mesh.shape[STAGES] > 1:
        return Pipeline(options, settings.pipeline_micro_batches, settings.pipeline_rounds)
    return Strategy(options)


# ---- the pipeline: layers stand on different devices, micro-batches go through them one after the other ----


@dataclass(frozen=True)
class Pipeline(Strategy):
    """The layers of a repeated node as P stages along the mesh axis `pipeline` (GPipe: Huang et al., 2019).

    All stages are one `jax.vmap` over an axis that the mesh splits, and what a stage has computed goes to the next by a
    roll along that axis. In each of rounds x M + P - 1 ticks every stage works on another micro-batch, but in P - 1 of
    them it has none. Of several rounds, a device holds as many shorter stages (interleaved: Narayanan et al., 2021),
    and weights, which lie in the order of the layers, are sent to their stages in every step.
    """

    micro_batches: int | None = None  # M, a multiple of P; None: the largest up to 4 P that divides the rows
    rounds: int = 1  # how often a micro-batch goes through the stages

    def adapt(self, config: ApplyConfig) -> ApplyConfig:
        layout = cast(MeshLayout, config.layout)  # of embedding and head, which are no stages: all devices split rows
        beside = replace(layout, table={**layout.table, "batch": (*layout.table["batch"], STAGES)})
        return replace(config, layers=self._layers, layout=beside)

    def check(self, graph: Graph, rows: int, layout: MeshLayout) -> None:
        pieces = layout.stages * self.rounds
        stages = f"{layout.stages} stages" + (f" of {self.rounds} rounds" if self.rounds > 1 else "")
        for node in graph.nodes:
            if node.repeat is not None and node.layers % pieces:
                what = f"the {node.layers} layers of `{node.name}` do not divide into {stages}"
                fix = f"`repeat: {multiples(node.layers, pieces)}` works with this mesh."
                raise UserError(what, where="mesh", fix=fix)
        self.parts(rows, layout)

    def parts(self, rows: int, layout: MeshLayout) -> int:
        """Micro-batches that this many rows go through the pipeline in, or a UserError naming numbers that work."""
        stages, pieces = layout.stages, layout.without(STAGES).parts("batch")
        fitting = [number for number in range(stages, rows + 1, stages) if rows % (number * pieces) == 0]
        wanted = self.micro_batches or max((number for number in fitting if number <= 4 * stages), default=stages)
        if wanted in fitting:
            return wanted
        fix = f"Make the rows of a micro-batch of the training a multiple of {stages * pieces}."
        if fitting:
            fix = f"Set `pipeline_micro_batches` to {' or '.join(map(str, fitting))}."
        what = f"{rows} rows, split {pieces} times, do not divide into {wanted} micro-batches of {stages} stages"
        raise UserError(what, where="parallel.pipeline_micro_batches", fix=fix)

    def _layers(self, node: Node, params: PyTree, x: Float[Array, "B S D"], context: LayerContext) -> Result:
        """The layers of `node`, as `apply_layers` applies them."""
        beside = cast(MeshLayout, context.config.layout)
        layout, own, rounds = beside.without(STAGES), beside.parts("stages"), self.rounds
        x = beside.gather_rows(x)
        parts, each = self.parts(len(x), beside), node.layers // (own * rounds)
        rows = {name: _micro_batches(beside.gather_rows(array), parts) for name, array in context.batch.items()}

        def pin(x: Array) -> Array:
            return beside.pin_first(x, "stages") if own > 1 else x

        # [stages, rounds, layers of a piece, ...]
        weights = jax.tree.map(lambda w: pin(jnp.swapaxes(w.reshape(rounds, own, each, *w.shape[1:]), 0, 1)), params)

        def stage(weights: PyTree, x: Array, piece: Array, number: Array) -> tuple[Array, Any, Any]:
            """Stage `number` at its `piece` of work: micro-batch `piece` mod M of round `piece` div M."""
            batch, x = {n: _at(array, piece % parts) for n, array in rows.items()}, layout.constrain(x, _RESIDUAL)
            inner = replace(context, batch=batch, config=replace(context.config, layout=layout, layers=None))
            inner = replace(inner, prepared=node.layer.prepare((x,), inner))
            weights = jax.tree.map(lambda w: _at(w, piece // parts), weights)
            first = (piece // parts * beside.stages + number) * each
            result = apply_layers(replace(node, repeat=each), weights, (x,), inner, first)
            return layout.constrain(result.value, _RESIDUAL), result.losses, result.metrics

        if rounds > 1:
            # Else JAX would keep the weights that are cut out for a round in every tick. Of one round they are the same
            # in every tick, and kept once. Of two policies the outer one holds, so it has the layers' inputs, too.
            inputs = policies.save_only_these_names("block_input")
            kept = policies.save_from_both_policies(inputs, context.config.remat or NAMED)
            stage = jax.checkpoint(stage, prevent_cse=False, policy=kept)
        run = partial(jax.vmap(stage, spmd_axis_name=STAGES if own > 1 else None), weights)
        # Micro-batches wait on the devices of the first stage; the others have zeros.
        x = _micro_batches(x, parts)
        waiting = pin(jnp.pad(x[None], ((0, own - 1), *[(0, 0)] * x.ndim)))
        value, losses, metrics = _schedule(run, waiting, beside.stages, rounds)
        y = jnp.swapaxes(layout.constrain(value, (None, *_RESIDUAL)), 0, 1).reshape(-1, *x.shape[2:])
        return Result(beside.own_rows(y), losses=losses, metrics=metrics)


def _schedule(
    run: Callable[..., Any], waiting: Float[Array, "P M b S D"], stages: int, rounds: int
) -> tuple[Float[Array, "M b S D"], Any, Any]:
    """What the last stage makes of the micro-batches that wait at the first one, and sums of by-products. In tick t
    stage i is at its piece of work t - i; what it computes before the first and after the last one nothing reads."""
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
        losses = {n: (jnp.sum(v, where=busy), jnp.sum(count, where=counted)) for n, (v, count) in losses.items()}
        return (made, waiting), (losses, jax.tree.map(lambda values: jnp.sum(values, where=busy), metrics))

    ticks = rounds * parts + stages - 1
    (made, waiting), sums = jax.lax.scan(tick, (jnp.zeros_like(waiting[:, 0]), waiting), jnp.arange(ticks))
    losses, metrics = jax.tree.map(jnp.sum, sums)
    return store(waiting, jnp.roll(made, 1, axis=0), ticks)[0], losses, metrics


def _micro_batches(x: Shaped[Array, "B ..."], parts: int) -> Shaped[Array, "M b ..."]:
    """Micro-batch m of M has the rows m, m + M, ..., so that every device keeps its own."""
    return jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)


def _at(x: Array, index: Array | int, axis: int = 0) -> Array:
    if x.shape[axis] == 1:
        return jnp.squeeze(x, axis)
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)
