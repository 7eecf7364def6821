"""Fully sharded parameters, gradients and optimizer state."""

from ._fully_shard import Placement as Placement
from ._fully_shard import fully_shard as fully_shard
from ._fully_shard import placement as placement
from ._initial import Constant as Constant
from ._initial import Initializer as Initializer
from ._initial import Normal as Normal
from ._initial import Uniform as Uniform
from ._names import layer_ndim as layer_ndim
from ._optimizer import shard_optimizer as shard_optimizer
from ._stack import StackedLayers as StackedLayers
