"""How one train step becomes one compiled program for all devices of a mesh."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from affinage.errors import UserError
from affinage.model.apply_config import ApplyConfig
from affinage.model.graph import Graph
from affinage.parallel.sharding import replicated

PyTree = Any
Function = Callable[..., Any]


@dataclass(frozen=True)
class Strategy:
    """One program on all devices, split by XLA's partitioner from the shardings of its arguments.

    Which of data parallelism, FSDP, tensor, expert and context parallelism this is, is in the mesh and the sharding
    table alone. `compiler_options` are XLA's, by name. A test or a plug-in may bring a strategy of its own.
    """

    compiler_options: Mapping[str, bool | int | str] = field(default_factory=dict)

    def check(self, graph: Graph, rows: int, config: ApplyConfig) -> None:
        """Refuse, by a UserError, a model or rows of a micro-batch that the strategy cannot run on the mesh."""

    def adapt(self, config: ApplyConfig) -> ApplyConfig:
        """How the graph is to be applied inside the steps."""
        return config

    def compile_training(self, step: Function, state: PyTree, batch: PyTree) -> Function:
        """Compile the pure `(state, batch) -> (state, metrics)`; the new state takes the memory of the old one.

        `state` and `batch` are trees of `jax.ShapeDtypeStruct` with shardings. The new state comes out sharded like the
        old one, the metrics are whole on every device.
        """
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        return self._compile(jax.jit(step, donate_argnums=0, out_shardings=(shardings, _whole(state))), state, batch)

    def compile_evaluation(self, step: Function, params: PyTree, batch: PyTree) -> Function:
        """Compile `(params, batch) -> sums`; the parameters stay, the sums are whole on every device."""
        return self._compile(jax.jit(step, out_shardings=_whole(params)), params, batch)

    def _compile(self, jitted: Any, *arguments: PyTree) -> Function:
        options = {name: flag if isinstance(flag, bool) else str(flag) for name, flag in self.compiler_options.items()}
        try:
            compiled: Function = jitted.lower(*arguments).compile(compiler_options=options or None)
            return compiled
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            raise UserError(
                f"XLA: {str(error).partition(chr(10))[0]}",
                where="parallel.xla_flags",
                fix="Names begin with xla_ and have no --.",
            ) from error


def _whole(arguments: PyTree) -> NamedSharding:
    return replicated(jax.tree.leaves(arguments)[0].sharding.mesh)
