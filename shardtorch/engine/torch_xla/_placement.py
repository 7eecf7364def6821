"""Moves data between the host and the devices, one shard at a time.

Private symbols of torch_xla 2.9.0: `_XLAC._global_tensor_from_cpu_shards`, `_get_local_shards`,
`_get_local_shard_replica_and_indices`.
"""

from collections.abc import Sequence

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


def local_device_ids(num_devices: int) -> range:
    """Ids of this process's devices in a mesh: processes hold equal, consecutive runs of them."""
    per_process = num_devices // xr.process_count()
    return range(xr.process_index() * per_process, (xr.process_index() + 1) * per_process)


def zeros(shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding) -> Tensor:
    """See `Engine.zeros`. The zeros are made by the devices."""
    sharding.validate(tuple(shape))
    x = constrain(torch.zeros(tuple(shape), dtype=dtype, device="xla"), sharding)
    sync(wait=False)  # as data now: left as a graph value it would be traced into the first step as a constant
    return x


def _from_shards(shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding, read: ReadShard) -> Tensor:
    ranges = sharding.index_ranges(tuple(shape))
    pieces: dict[tuple, Tensor] = {}  # replicas of one box are read once
    shards = []
    for device in local_device_ids(sharding.mesh.size):
        index = ranges[device]
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
    first_row = xr.process_index() * len(part) if part.ndim else 0

    def read(index: Index) -> Tensor:
        if not index:
            return part
        rows, *rest = index
        if rows.start < first_row or rows.stop > first_row + len(part):
            raise ShardingError(
                "the rows that a process gives must be those that its devices hold.",
                got=f"process {xr.process_index()} has rows {first_row} to {first_row + len(part)}, its devices hold "
                f"{rows.start} to {rows.stop} under {sharding.spec} on {sharding.mesh}",
                fix="put the mesh axes that shard the batch first.",
            )
        return part[(slice(rows.start - first_row, rows.stop - first_row), *rest)]

    return _from_shards(global_shape, part.dtype, sharding, read)


def local_shards(x: Tensor, sharding: NamedSharding) -> list[Shard]:
    """See `Engine.local_shards`."""
    sync(wait=True)  # a shard of a value that is still being computed can't be read
    ranges = sharding.index_ranges(tuple(x.shape))
    devices = local_device_ids(sharding.mesh.size)
    if not (reported := sharding_of(x)):
        raise _misplaced(f"the whole tensor lies on the host or on every device, not {sharding}")
    (real,) = _XLAC._get_local_shard_replica_and_indices([x])
    for device, (_, index) in zip(devices, real, strict=True):
        if index is Ellipsis:  # the runtime's word for all of it
            index = tuple(slice(0, size) for size in x.shape)
        if not _same_box(index, ranges[device]):
            raise _misplaced(
                f"device {device} holds {tuple(index)}, and {ranges[device]} under {sharding}; the runtime reports "
                f"{reported}"
            )
    (pieces,) = _XLAC._get_local_shards([x])
    return [
        Shard(ranges[device], data, sharding.replica_of(device))
        for device, (data, _) in zip(devices, pieces, strict=True)
    ]


def _misplaced(got: str) -> ShardingError:
    return ShardingError(
        "a tensor must lie on the devices as its sharding says.",
        got=got,
        fix="annotate it again with mark_sharding; an eager operation or a copy has dropped its sharding.",
    )


def _same_box(real: Sequence[slice], expected: Index) -> bool:
    return [(s.start, s.stop) for s in real] == [(s.start, s.stop) for s in expected]
