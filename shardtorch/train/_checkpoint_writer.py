"""Writes shards in the format of `torch.distributed.checkpoint` (DCP), one file per process.

DCP drives a save in phases that all processes finish together, and raises on all of them what one of them raised:

1. every process plans what it writes (`create_local_plan`);
2. the first one merges the plans and makes the folder (`create_global_plan`, `prepare_global_plan`);
3. every process writes its file and reads it back (`write_data`);
4. the first one checks that all is there, and gives the folder its final name (`finish`).
"""

import dataclasses
import os
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardtorch.engine import Engine
from shardtorch.errors import CheckpointError, ShardingError
from shardtorch.mesh import NamedSharding
from shardtorch.train._checkpoint_manifest import JSON, Chunk, Manifest, StoredTensor
from shardtorch.train._checkpoint_reader import data_crc32, read_bytes, unpacked
from shardtorch.train._checkpoint_tensors import Entry, Placed, entries

TEMPORARY = ".tmp-"
"""How the names of unfinished folders begin; a save removes what a killed one left."""

_Box = tuple[tuple[int, int], ...]
"""Start and stop per dim; hashable, as slices are not."""


class ShardPlanner(SavePlanner):
    """Plans one write per distinct shard: by the process that holds replica 0 of it, so that every tensor is complete,
    and nothing is written twice.

    torch_xla's own planner leaves out every tensor that is replicated along some mesh axis.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tensors: Mapping[str, Placed] = {}
        self._boxes: dict[str, list[_Box]] = {}  # by key
        self._sources: dict[MetadataIndex, tuple[Entry, _Box]] = {}
        self._fetched: tuple[str, dict[_Box, Tensor]] = ("", {})
        self.entries: dict[str, Entry] = {}
        """What the checkpoint is to hold, by name."""
        self.data_crc32s: dict[MetadataIndex, int] = {}
        """Of the elements of what was handed out to be written."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._tensors, self.entries = state_dict, entries(state_dict)

    def create_local_plan(self) -> SavePlan:
        items = []
        self._boxes = {key: list(self._own_boxes(placed)) for key, placed in self._tensors.items()}
        for name, entry in self.entries.items():  # layers of a stack lie together, so its shards are fetched once
            for box in self._boxes[entry.key]:
                part = box if entry.layer is None else box[1:]
                index = MetadataIndex(name, [start for start, _ in part])
                sizes = torch.Size([stop - start for start, stop in part])
                assert index.offset is not None
                data = TensorWriteData(
                    ChunkStorageMetadata(index.offset, sizes),
                    TensorProperties(dtype=entry.dtype),
                    torch.Size(entry.shape),
                )
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._sources[index] = (entry, box)
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        # DCP's tools want to know that the state dict was flat: a name is one key, dots and all.
        return plans, dataclasses.replace(metadata, planner_data={name: (name,) for name in self.entries})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        entry, box = self._sources[write_item.index]
        if self._fetched[0] != entry.key:
            self._fetched = ("", {})  # frees one tensor's shards before the next ones come
            self._fetched = (entry.key, self._fetch(entry.key))
        data = self._fetched[1][box]
        data = (data if entry.layer is None else data[entry.layer]).contiguous()
        self.data_crc32s[write_item.index] = data_crc32(data)
        return data

    def _own_boxes(self, placed: Placed) -> Iterator[_Box]:
        """Where the shards lie of which this process holds replica 0."""
        # Processes hold equal, consecutive runs of a mesh's devices, in process order.
        inventory = self._engine.inventory()
        num_devices = placed.sharding.mesh.size // inventory.process_count
        first = inventory.process_index * num_devices
        ranges = placed.sharding.index_ranges(placed.tensor.shape)
        for device in range(first, first + num_devices):
            if placed.sharding.replica_of(device) == 0:
                yield _box(ranges[device])

    def _fetch(self, key: str) -> dict[_Box, Tensor]:
        placed = self._tensors[key]
        try:
            shards = self._engine.local_shards(placed.tensor, placed.sharding)
        except ShardingError as error:
            raise CheckpointError(f"{key}: {error.law}", got=error.got, fix=error.fix) from error
        pieces = {_box(shard.index): shard.data.detach() for shard in shards if shard.replica == 0}
        assert sorted(pieces) == sorted(self._boxes[key]), f"{key}: the engine holds other shards than the mesh says"
        for box, data in pieces.items():
            if (data.shape, data.dtype) != (tuple(stop - start for start, stop in box), placed.tensor.dtype):
                raise _lost_sharding(key, placed.sharding, box, data)
        return pieces


@dataclass(frozen=True)
class _CheckedResult(WriteResult):
    """What was written, once it has been read back."""

    crc32: int
    """Of the stored bytes."""


class CheckpointWriter(FileSystemWriter):
    """DCP's writer, into a temporary folder that gets its final name once everything in it has been checked.

    Args:
      folder: The checkpoint's final name.
      planner: Knows what the checkpoint must hold.
    """

    def __init__(self, folder: Path, step: int, extra: Mapping[str, JSON], planner: ShardPlanner) -> None:
        self.folder = folder
        self.temporary = folder.with_name(TEMPORARY + folder.name)
        # Copying ahead would write the items in another order, for which whole tensors would be fetched anew.
        super().__init__(self.temporary, per_thread_copy_ahead=0)
        self._step, self._extra, self._planner = step, extra, planner

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Here only one process runs, and all others wait: none has written anything yet.
        if self.folder.exists():
            raise CheckpointError(
                "a checkpoint is never written over.",
                got=f"step {self._step} again, while {self.folder} exists",
                fix="resume from it, or move it away.",
            )
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.parent.glob(f"{TEMPORARY}step_*"):
            shutil.rmtree(leftover)
        self.temporary.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        checked: Future[list[WriteResult]] = Future()
        checked.set_result([self._checked(result) for result in super().write_data(plan, planner).value()])
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        manifest = self._manifest(metadata, [result for own in results for result in own])
        manifest.check(self.temporary)
        held = {name: (tensor.shape, tensor.dtype) for name, tensor in manifest.tensors.items()}
        asked = {name: (entry.shape, entry.dtype) for name, entry in self._planner.entries.items()}
        if wrong := sorted(name for name in held.keys() | asked.keys() if held.get(name) != asked.get(name)):
            raise CheckpointError(
                "a checkpoint holds what it was asked to hold.",
                got=f"{wrong[0]} and {len(wrong) - 1} other tensors are missing or different",
                fix="give every process the same tensors.",
            )
        manifest.write(self.temporary)
        _fsync_folder(self.temporary)
        self.temporary.rename(self.folder)
        _fsync_folder(self.folder.parent)

    def _checked(self, result: WriteResult) -> _CheckedResult:
        """Reads one chunk back, and compares it with what was in memory."""
        info = result.storage_data
        stored = read_bytes(self.temporary / info.relative_path, info.offset, info.length)
        try:
            same = data_crc32(unpacked(stored)) == self._planner.data_crc32s[result.index]
        except Exception:  # bytes that are no tensor make the reader fail in many ways
            same = False
        if not same:
            raise CheckpointError(
                f"{result.index.fqn}: what was written must read back the same.",
                got=f"other data in {info.relative_path} at byte {info.offset}",
                fix="the disk or the memory is faulty: save elsewhere.",
            )
        return _CheckedResult(result.index, result.size_in_bytes, info, crc32=zlib.crc32(stored))

    def _manifest(self, metadata: Metadata, results: list[WriteResult]) -> Manifest:
        chunks: defaultdict[str, list[Chunk]] = defaultdict(list)
        stored = {
            name: tensor
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        for result in results:
            assert isinstance(result, _CheckedResult)
            assert result.index.index is not None  # the place of the chunk among the tensor's, set by the global plan
            chunk, info = stored[result.index.fqn].chunks[result.index.index], result.storage_data
            place = (info.relative_path, info.offset, info.length, result.crc32)
            chunks[result.index.fqn].append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *place))
        return Manifest(
            self._step,
            self._extra,
            files={path.name: path.stat().st_size for path in sorted(self.temporary.glob("*.distcp"))},
            tensors={
                name: StoredTensor(tuple(tensor.size), tensor.properties.dtype, tuple(chunks[name]))
                for name, tensor in stored.items()
            },
        )


def _fsync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Removes a checkpoint so that a kill can't leave a part of it under its name."""
    doomed = folder.with_name(TEMPORARY + folder.name)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _box(index: tuple[slice, ...]) -> _Box:
    return tuple((part.start, part.stop) for part in index)


def _lost_sharding(key: str, sharding: NamedSharding, box: _Box, data: Tensor) -> CheckpointError:
    return CheckpointError(
        f"{key}: a tensor must lie on the devices as its sharding says.",
        got=f"a piece of shape {tuple(data.shape)}, {data.dtype} where {sharding.spec} on {sharding.mesh} puts {box}",
        fix="the tensor lost its sharding: mark it again where it was made, or save it with the sharding that it has.",
    )
