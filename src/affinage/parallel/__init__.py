"""Parallel: a graph and a mesh become one compiled step."""

from affinage.parallel.mesh import AXES as AXES
from affinage.parallel.mesh import make_mesh as make_mesh
from affinage.parallel.sharding import activation_constraint as activation_constraint
from affinage.parallel.sharding import batch_sharding as batch_sharding
from affinage.parallel.sharding import param_shardings as param_shardings
from affinage.parallel.sharding import per_shard as per_shard
from affinage.parallel.sharding import replicated as replicated
from affinage.parallel.strategy import Spmd as Spmd
from affinage.parallel.strategy import Strategy as Strategy
