"""Tensors on a mesh, and the names that a checkpoint stores them under."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardtorch.errors import CheckpointError, ShardingError
from shardtorch.mesh import NamedSharding

LAYER = "*"
"""The segment of a key that stands for the number of a layer."""


@dataclass(frozen=True)
class Placed:
    """A tensor, and how it lies on the mesh."""

    tensor: Tensor
    """On the engine's device. To load, its shape and dtype are enough: it may be on the meta device."""
    sharding: NamedSharding
    """Of a stack of layers (see `entries`) it leaves dim 0 whole."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: a tensor of the run, or one layer of a stack."""

    key: str
    """The run's key of the tensor."""
    layer: int | None
    """Index of dim 0 of the run's tensor; None for a tensor that is no stack."""
    shape: tuple[int, ...]
    """Global shape, without the dim of the layers."""
    dtype: torch.dtype


def is_stack(key: str) -> bool:
    """Whether dim 0 of the tensor under this key counts layers.

    >>> is_stack("model.layers.*.mlp.w_up.weight"), is_stack("model.norm.weight")
    (True, False)
    """
    return LAYER in key.split(".")


def entry_name(key: str, layer: int | None) -> str:
    """The name in the checkpoint of a tensor, or of one layer of a stack.

    >>> entry_name("model.layers.*.mlp.w_up.weight", 3)
    'model.layers.3.mlp.w_up.weight'
    """
    return key if layer is None else ".".join(str(layer) if part == LAYER else part for part in key.split("."))


def entries(tensors: Mapping[str, Placed]) -> dict[str, Entry]:
    """What a checkpoint of these tensors holds, by name.

    A key with a segment `*` is a stack of layers: its dim 0 counts them, and each layer is stored by itself, under
    the name that has the layer's number instead.

    Raises:
      ShardingError: A sharding does not fit its tensor, or shards the dim of the layers.
      CheckpointError: A `*` is not one whole segment of a key, or two keys name the same entry.
    """
    found: dict[str, Entry] = {}
    for key, placed in tensors.items():
        shape, dtype = tuple(placed.tensor.shape), placed.tensor.dtype
        placed.sharding.validate(shape, name=key)
        if key.count(LAYER) != is_stack(key):
            raise CheckpointError(
                "the layer in a key is one '*' that stands between dots.",
                got=repr(key),
                fix="write it like model.layers.*.attention.wq.weight.",
            )
        if not is_stack(key):
            new = {key: Entry(key, None, shape, dtype)}
        elif not shape or placed.sharding.shard_shape(shape)[0] != shape[0]:
            raise ShardingError(
                f"{key}: dim 0 of a stack counts the layers and is not sharded.",
                got=f"shape {shape}, spec {placed.sharding.spec}, {placed.sharding.mesh}",
                fix="make the first entry of the spec None.",
            )
        else:
            new = {entry_name(key, i): Entry(key, i, shape[1:], dtype) for i in range(shape[0])}
        for name in new.keys() & found.keys():
            raise CheckpointError(
                f"{name}: a checkpoint holds a name once.",
                got=f"the keys {found[name].key!r} and {key!r}, which both hold it",
                fix="rename one of them.",
            )
        found |= new
    return found
