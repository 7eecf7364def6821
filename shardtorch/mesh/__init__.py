"""Meshes, specs, shardings, plans and topologies as pure data: numpy only, no runtime."""

from ._mesh import Mesh as Mesh
from ._plan import ShardingPlan as ShardingPlan
from ._plan import matches as matches
from ._rules import AxisRules as AxisRules
from ._sharding import NamedSharding as NamedSharding
from ._sharding import TileAssignment as TileAssignment
from ._spec import P as P
from ._spec import PartitionSpec as PartitionSpec
from ._spec import SpecLike as SpecLike
from ._topology import SliceTopology as SliceTopology
