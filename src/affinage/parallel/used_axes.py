"""Which mesh axes split anything of a model."""

from collections.abc import Mapping

import jax

from affinage.errors import UserError
from affinage.hardware.mesh import AXES
from affinage.model.forward import logical_axes
from affinage.model.graph import Graph
from affinage.model.layer import SEQUENCE
from affinage.parallel.pipeline import AXIS as STAGES
from affinage.parallel.sharding import Table

_OF_SEQUENCES = frozenset({"sequence", "residual", "keys", "width"})  # logical axes of activations alone


def check_axes_used(graph: Graph, sizes: Mapping[str, int], table: Table) -> None:
    """Refuse a mesh with an axis along which nothing of the model is split, so that all its devices do the same work.

    The axis of a pipeline is left to `Pipeline.check`.

    Raises:
        UserError: naming the nearest mesh that works.
    """
    for axis, size in sizes.items():
        if size > 1 and axis != STAGES and not _lines(graph, axis, table):
            rows = table["batch"][0] if table["batch"] else "data"
            changed = {**sizes, axis: 1, rows: sizes[rows] * size}
            shown = ", ".join(f"{name}: {changed[name]}" for name in AXES if changed[name] > 1)
            raise UserError(
                f"nothing of this model is split along {axis} = {size}: those {size} devices would do the same work",
                where="mesh",
                fix=f"Set `mesh: {{{shown}}}`.",
            )


def without_experts(graph: Graph, table: Table) -> str:
    """What to say of a mesh with the axis `expert`, where it splits no more than the rows; "" where it does."""
    if _lines(graph, "expert", table) != {"batch"}:
        return ""
    return (
        "no node of the model has experts, so `mesh.expert` splits only the rows of a batch, which is what `mesh.data` "
        "is for: give its devices to that, or to `mesh.fsdp`, which splits the weights, too"
    )


def _lines(graph: Graph, axis: str, table: Table) -> set[str]:
    """The lines of the table by which a mesh axis splits something of this model."""
    used = {"batch"}
    for axes in jax.tree.leaves(logical_axes(graph), is_leaf=lambda leaf: isinstance(leaf, tuple)):
        used.update(name for name in axes if name is not None)
    if any(SEQUENCE in shape.dims for _, shape in graph.inputs):
        used |= _OF_SEQUENCES
    if "experts" in used:
        used.add("expert_rows")
    return {line for line in used if axis in table[line]}
