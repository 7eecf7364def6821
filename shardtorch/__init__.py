"""SPMD for PyTorch on TPUs: a mesh, partition specs, FSDP, and pretraining. Importing it starts no runtime."""

from shardtorch.annotate import mark_sharding as mark_sharding
from shardtorch.engine import running as running
from shardtorch.engine import start as start
from shardtorch.errors import ShardtorchError as ShardtorchError
from shardtorch.fsdp import fully_shard as fully_shard
from shardtorch.fsdp import shard_optimizer as shard_optimizer
from shardtorch.mesh import AxisRules as AxisRules
from shardtorch.mesh import Mesh as Mesh
from shardtorch.mesh import NamedSharding as NamedSharding
from shardtorch.mesh import P as P
from shardtorch.mesh import PartitionSpec as PartitionSpec
from shardtorch.mesh import ShardingPlan as ShardingPlan
from shardtorch.mesh import SliceTopology as SliceTopology
