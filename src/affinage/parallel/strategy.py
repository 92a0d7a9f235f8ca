"""Strategies: how one train step becomes one compiled program for all devices of a mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

PyTree = Any


class Strategy(Protocol):
    """Turns a pure step into a program. A test or a plug-in may bring its own."""

    def compile(
        self, step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], state: PyTree, batch: PyTree, *, donate: bool
    ) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
        """Compile `(state, batch) -> (state, metrics)` for arguments of the given shapes and shardings.

        Args:
            step: pure; traced once.
            state: tree of `jax.ShapeDtypeStruct` with shardings; the new state comes out sharded like it.
            batch: tree of `jax.ShapeDtypeStruct` with shardings.
            donate: whether the new state takes the memory of the old one, which is then gone.
        """
        ...


@dataclass(frozen=True)
class Spmd:
    """One program on all devices, split by XLA's partitioner (GSPMD) from the shardings of its arguments.

    Which of data parallelism, FSDP and tensor parallelism this is, is in the mesh and the sharding table alone.
    """

    def compile(
        self, step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]], state: PyTree, batch: PyTree, *, donate: bool
    ) -> Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]:
        """See `Strategy.compile`. Metrics come out whole on every device."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        mesh = jax.tree.leaves(shardings)[0].mesh
        metrics = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        jitted = jax.jit(step, donate_argnums=0 if donate else (), out_shardings=(shardings, metrics))
        return jitted.lower(state, batch).compile()
