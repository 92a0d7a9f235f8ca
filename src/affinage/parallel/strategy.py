"""Strategies: how one train step becomes one compiled program for all devices of a mesh."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from affinage.errors import UserError
from affinage.model.apply_config import ApplyConfig
from affinage.model.graph import Graph
from affinage.parallel.sharding import replicated

PyTree = Any
Function = Callable[..., Any]


class Strategy(Protocol):
    """Turns pure steps into programs. A test or a plug-in may bring its own."""

    def check(self, graph: Graph, rows: int, config: ApplyConfig) -> None:
        """Refuse a model, or rows of a micro-batch, that the strategy cannot run on the mesh of the config's layout.

        Raises:
            UserError: naming the nearest settings that work.
        """
        ...

    def adapt(self, config: ApplyConfig) -> ApplyConfig:
        """How the graph is to be applied inside the steps."""
        ...

    def compile_training(self, step: Function, state: PyTree, batch: PyTree) -> Function:
        """Compile the pure `(state, batch) -> (state, metrics)`; the new state takes the memory of the old one.

        `state` and `batch` are trees of `jax.ShapeDtypeStruct` with shardings. The new state comes out sharded like the
        old one, the metrics are whole on every device.
        """
        ...

    def compile_evaluation(self, step: Function, params: PyTree, batch: PyTree) -> Function:
        """Compile `(params, batch) -> sums`; the parameters stay, the sums are whole on every device."""
        ...


@dataclass(frozen=True)
class Spmd:
    """One program on all devices, split by XLA's partitioner (GSPMD) from the shardings of its arguments.

    Which of data parallelism, FSDP, tensor, expert and context parallelism this is, is in the mesh and the sharding
    table alone. `compiler_options` are XLA's, by name.
    """

    compiler_options: Mapping[str, bool | int | str] = field(default_factory=dict)

    def check(self, graph: Graph, rows: int, config: ApplyConfig) -> None:
        """See `Strategy.check`: any graph, and rows are the table's business."""

    def adapt(self, config: ApplyConfig) -> ApplyConfig:
        """See `Strategy.adapt`."""
        return config

    def compile_training(self, step: Function, state: PyTree, batch: PyTree) -> Function:
        """See `Strategy.compile_training`."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, _whole(state)))
        return self._compile(jitted.lower(state, batch))

    def compile_evaluation(self, step: Function, params: PyTree, batch: PyTree) -> Function:
        """See `Strategy.compile_evaluation`."""
        return self._compile(jax.jit(step, out_shardings=_whole(params)).lower(params, batch))

    def _compile(self, lowered: jax.stages.Lowered) -> Function:
        options = {name: flag if isinstance(flag, bool) else str(flag) for name, flag in self.compiler_options.items()}
        try:
            return lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            unknown = str(error).partition("option: ")[2].partition("\n")[0]
            raise UserError(
                f"XLA has no option {unknown}", where="parallel.xla_flags", fix="Names begin with xla_ and have no --."
            ) from error


def _whole(arguments: PyTree) -> NamedSharding:
    return replicated(jax.tree.leaves(arguments)[0].sharding.mesh)
