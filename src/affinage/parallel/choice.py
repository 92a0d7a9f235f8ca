"""What follows from the mesh that a recipe asks for."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from affinage.config.parallel import LogicalAxis, MeshAxis, ParallelSettings
from affinage.config.training import AttentionImplementation
from affinage.errors import UserError
from affinage.hardware.xla_flags import flags_for
from affinage.model.apply_config import ApplyConfig
from affinage.parallel.layout import MeshLayout
from affinage.parallel.mesh import make_mesh
from affinage.parallel.pipeline import AXIS, Pipeline
from affinage.parallel.sharding import Table, param_shardings, table_with
from affinage.parallel.strategy import Spmd, Strategy


def apply_config_on(layout: MeshLayout, attention: AttentionImplementation, settings: ParallelSettings) -> ApplyConfig:
    """How a model is applied on a mesh, as far as a strategy can refuse it."""
    return ApplyConfig(attention=attention, layout=layout, ring_attention=settings.context_attention == "ring")


def strategy_for(mesh: Mesh, settings: ParallelSettings) -> Strategy:
    """A pipeline where the mesh has stages, else one program split by XLA."""
    options = flags_for(mesh.devices.flat[0].platform, mesh.size, settings.xla_flags)
    if mesh.shape[AXIS] > 1:
        return Pipeline(options, settings.pipeline_micro_batches, settings.pipeline_rounds)
    return Spmd(options)


def serving_layout(
    sizes: Mapping[str, int | str],
    devices: Sequence[jax.Device],
    logical_axes: Any,
    abstract: Any,
    replacements: Mapping[LogicalAxis, tuple[MeshAxis, ...]] | None = None,
) -> tuple[MeshLayout, Any]:
    """How a model is used that was trained on a mesh of these sizes: the layout, and its parameters' shardings.

    Generation has neither stages nor long sequences to split: the devices of `pipeline` and `context` split the
    weights as `fsdp` does, or, where a width does not divide, hold copies as `data`. `replacements` are the lines of
    the sharding table that the recipe has replaced.
    """
    table = serving_table(replacements or {})
    mesh = make_mesh(sizes, devices)
    folded = mesh.shape[AXIS] * mesh.shape["context"]
    if folded > 1:
        shape = {**mesh.shape, AXIS: 1, "context": 1}
        split = make_mesh(shape | {"fsdp": shape["fsdp"] * folded}, devices)
        try:
            return MeshLayout(split, table), param_shardings(split, logical_axes, abstract, table)
        except UserError:
            mesh = make_mesh(shape | {"data": shape["data"] * folded}, devices)
    return MeshLayout(mesh, table), param_shardings(mesh, logical_axes, abstract, table)


def serving_table(replacements: Mapping[LogicalAxis, tuple[MeshAxis, ...]]) -> Table:
    """The sharding table of a recipe for generation, in which sequences are whole."""
    return table_with({**replacements, "sequence": (), "residual": ()})
