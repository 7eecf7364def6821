"""Moves data between the host and the devices, one shard at a time.

Private symbols of torch_xla 2.9.0: `_XLAC._global_tensor_from_cpu_shards`, `_get_local_shards`,
`_get_local_shard_replica_and_indices`, `_xla_get_runtime_devices`.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import Tensor

from shardtorch.engine._contract import Index, ReadShard, Shard, check_part, is_stack
from shardtorch.engine.torch_xla._annotate import constrain, op_sharding, sharding_of
from shardtorch.engine.torch_xla._trace import sync
from shardtorch.errors import ShardingError
from shardtorch.mesh import NamedSharding, PartitionSpec

_XLAC = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]


def local_device_ids() -> list[int]:
    """Ids in a mesh of this process's devices, in the runtime's order. On most slices they are no run of numbers: the
    first host of v5e:4x4 has 0, 1, 4 and 5."""
    return [int(name.rpartition(":")[2]) for name in _XLAC._xla_get_runtime_devices()]


@lru_cache(maxsize=4096)
def _local_indices(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, Index]:
    """What each of this process's devices holds, by id, in the runtime's order."""
    return {device: sharding.index_of(device, shape) for device in local_device_ids()}


def zeros(shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding) -> Tensor:
    """See `Engine.zeros`. The zeros are made by the devices."""
    sharding.validate(tuple(shape))
    x = constrain(torch.zeros(tuple(shape), dtype=dtype, device="xla"), sharding)
    sync(wait=False)  # as data now: left as a graph value it would be traced into the first step as a constant
    return x


def _from_shards(shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding, read: ReadShard) -> Tensor:
    pieces: dict[tuple, Tensor] = {}  # replicas of one box are read once
    shards = []
    for index in _local_indices(sharding, tuple(shape)).values():
        key = tuple((s.start, s.stop) for s in index)
        if key not in pieces:
            pieces[key] = read(index).detach().to(dtype).contiguous()
        shards.append(pieces[key])
    tile = sharding.tile_assignment(len(shape))
    return _XLAC._global_tensor_from_cpu_shards(shards, op_sharding(tile), list(shape))


def materialize(shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding, read: ReadShard) -> Tensor:
    """See `Engine.materialize`."""
    shape = tuple(shape)
    if not is_stack(shape, sharding):
        return _from_shards(shape, dtype, sharding, read)
    # A stack of layers goes up one layer at a time; the index is a tensor, so one graph serves every layer, and the
    # stack's buffer is donated from one to the next.
    stack = zeros(shape, dtype, sharding)
    layer_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec.entries[1:]))
    for layer in range(shape[0]):
        piece = _from_shards(
            shape[1:], dtype, layer_sharding, lambda index, i=layer: read((slice(i, i + 1), *index)).squeeze(0)
        )
        stack.index_copy_(0, torch.tensor([layer]).to("xla"), piece[None])
        sync(wait=False)
    return stack


def put(part: Tensor, sharding: NamedSharding, global_shape: Sequence[int]) -> Tensor:
    """See `Engine.put`."""
    check_part(part, global_shape, xr.process_count())
    shape = tuple(global_shape)
    if not shape:
        return _from_shards(shape, part.dtype, sharding, lambda index: part)
    blocks = sorted({(index[0].start, index[0].stop) for index in _local_indices(sharding, shape).values()})
    if sum(stop - start for start, stop in blocks) != len(part):
        raise ShardingError(
            "each process must give the rows that its devices hold.",
            got=f"{len(part)} rows from process {xr.process_index()} of {xr.process_count()}, whose devices hold "
            f"{blocks} under {sharding.spec} on {sharding.mesh}",
            fix="let mesh axes that shard dim 0 tell the processes apart: put them first, and make their product a "
            "multiple of the number of processes.",
        )
    first_of = {start: sum(stop - start for start, stop in blocks[:n]) for n, (start, _) in enumerate(blocks)}

    def read(index: Index) -> Tensor:
        rows, *rest = index
        first = first_of[rows.start]
        return part[(slice(first, first + rows.stop - rows.start), *rest)]

    return _from_shards(shape, part.dtype, sharding, read)


def local_shards(x: Tensor, sharding: NamedSharding) -> list[Shard]:
    """See `Engine.local_shards`."""
    sync(wait=True)  # a shard of a value that is still being computed can't be read
    expected = _local_indices(sharding, tuple(x.shape))
    if not (reported := sharding_of(x)):
        raise _misplaced(f"the whole tensor lies on the host or on every device, not {sharding}")
    (real,) = _XLAC._get_local_shard_replica_and_indices([x])
    for (device, want), (_, index) in zip(expected.items(), real, strict=True):
        if index is Ellipsis:  # the runtime's word for all of it
            index = tuple(slice(0, size) for size in x.shape)
        if not _same_box(index, want):
            raise _misplaced(
                f"device {device} holds {tuple(index)}, and {want} under {sharding}; the runtime reports {reported}"
            )
    (pieces,) = _XLAC._get_local_shards([x])
    return [
        Shard(index, data, sharding.replica_of(device))
        for (device, index), (data, _) in zip(expected.items(), pieces, strict=True)
    ]


def _misplaced(got: str) -> ShardingError:
    return ShardingError(
        "a tensor must lie on the devices as its sharding says.",
        got=got,
        fix="annotate it again with mark_sharding; an eager operation or a copy has dropped its sharding.",
    )


def _same_box(real: Sequence[slice], expected: Index) -> bool:
    return [(s.start, s.stop) for s in real] == [(s.start, s.stop) for s in expected]
