"""Shardings in torch_xla's terms, and the annotation op.

Private symbols of torch_xla 2.9.0: `_XLAC.OpSharding`, `_xla_annotate_custom_sharding`, `_xla_mark_sharding`,
`_get_xla_sharding_spec`, `_check_tensor_need_materialization`. The engine contract tests exercise each of them.
"""

import math
from functools import lru_cache

import numpy as np
import torch
import torch_xla
from torch import Tensor

from shardtorch.errors import ShardingError
from shardtorch.mesh import NamedSharding, TileAssignment

_XLAC = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]
_MAX_DIMS = 5
_REPLICATED, _TILED, _PARTIAL = 0, 3, 5  # torch_xla's ShardingType


@lru_cache(maxsize=4096)
def op_sharding(tile: TileAssignment):
    """torch_xla's object for a sharding; built once per sharding, since it lists every device."""
    if math.prod(tile.dims[:-1] if tile.replicate_last_dim else tile.dims) == 1:
        return _XLAC.OpSharding([], [], [], _REPLICATED)
    num_dims = len(tile.dims) - tile.replicate_last_dim
    if num_dims > _MAX_DIMS:
        raise ShardingError(
            f"torch_xla 2.9.0 shards tensors of at most {_MAX_DIMS} dims.",
            got=f"a tensor of {num_dims} dims, {tile}",
            fix="reshape it, or replicate it.",
        )
    devices = tile.devices()
    if not tile.replicate_last_dim:
        return _XLAC.OpSharding(devices.tolist(), [], [], _TILED)
    groups = devices.reshape(-1, devices.shape[-1])
    group_ids = np.arange(len(groups)).reshape(devices.shape[:-1])
    return _XLAC.OpSharding(devices.tolist(), group_ids.tolist(), groups.tolist(), _PARTIAL)


@torch.library.custom_op("shardtorch::constrain", mutates_args=())
def _constrain(
    x: Tensor, dims: list[int], reshape_dims: list[int], transpose_perm: list[int], replicate_last_dim: bool
) -> Tensor:
    """Annotates a value. An op of its own, since it must survive tracing (AOTAutograd) and carry to the gradient."""
    tile = TileAssignment(tuple(dims), tuple(reshape_dims), tuple(transpose_perm), replicate_last_dim)
    y = x.clone()
    _XLAC._xla_annotate_custom_sharding(y, op_sharding(tile))
    return y


@_constrain.register_fake
def _(x, dims, reshape_dims, transpose_perm, replicate_last_dim):
    return torch.empty_like(x)


def _setup_context(ctx, inputs, output):
    _, *ctx.tile = inputs


_constrain.register_autograd(lambda ctx, grad: (_constrain(grad, *ctx.tile), *[None] * 4), setup_context=_setup_context)


def constrain(x: Tensor, sharding: NamedSharding) -> Tensor:
    """Annotates a graph value and its gradient; see `Engine.constrain`."""
    tile = sharding.tile_assignment(x.ndim)
    return _constrain(x, list(tile.dims), list(tile.reshape_dims), list(tile.transpose_perm), tile.replicate_last_dim)


def place(x: Tensor, sharding: NamedSharding) -> None:
    """Shards a leaf in place; see `Engine.annotate`."""
    tile = sharding.tile_assignment(x.ndim)
    before = sharding_of(x)
    if not is_data(x) or not before:  # host data goes up shard by shard, a pending value is annotated
        _XLAC._xla_mark_sharding(x, op_sharding(tile))
    elif before != _reported(tile):  # torch_xla would refuse, or bring the whole tensor to the host
        x.data = constrain(x.detach(), sharding)


@lru_cache(maxsize=4096)
def _reported(tile: TileAssignment) -> str:
    """The sharding as torch_xla reports it: with every device listed."""
    if str(tile) == "{replicated}":
        return "{replicated}"
    dims, devices = (",".join(map(str, numbers)) for numbers in (tile.dims, tile.devices().ravel()))
    return f"{{devices=[{dims}]{devices}{' last_tile_dim_replicate' if tile.replicate_last_dim else ''}}}"


def is_data(x: Tensor) -> bool:
    """Whether `x` holds data, rather than being a value of a graph that has not run."""
    return not _XLAC._check_tensor_need_materialization([x])[0]


def sharding_of(x: Tensor) -> str:
    """The sharding torch_xla has on record for `x`; see `Engine.sharding_of`."""
    return _XLAC._get_xla_sharding_spec(x)
