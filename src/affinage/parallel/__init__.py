"""Parallel: a graph and a mesh become one compiled step."""

from affinage.parallel.sharding import MeshLayout as MeshLayout
from affinage.parallel.sharding import make_mesh as make_mesh
from affinage.parallel.sharding import replicated as replicated
from affinage.parallel.sharding import serving_layout as serving_layout
from affinage.parallel.sharding import serving_table as serving_table
from affinage.parallel.sharding import table_with as table_with
from affinage.parallel.strategy import Pipeline as Pipeline
from affinage.parallel.strategy import Strategy as Strategy
from affinage.parallel.strategy import strategy_for as strategy_for
