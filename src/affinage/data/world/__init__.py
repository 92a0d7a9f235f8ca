"""The pocket world: a closed bilingual corpus of true facts, generated without a network, with its own benchmarks."""

from affinage.data.world.write import write_world

__all__ = ["write_world"]
