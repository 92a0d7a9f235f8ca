"""Which strategy a mesh asks for."""

from jax.sharding import Mesh

from affinage.parallel.pipeline import AXIS, Pipeline
from affinage.parallel.strategy import Spmd, Strategy
from affinage.recipe.parallel import ParallelSettings


def strategy_for(mesh: Mesh, settings: ParallelSettings) -> Strategy:
    """A pipeline where the mesh has stages, else one program split by XLA."""
    if mesh.shape[AXIS] > 1:
        return Pipeline(settings.pipeline_micro_batches, settings.pipeline_rounds)
    return Spmd()
