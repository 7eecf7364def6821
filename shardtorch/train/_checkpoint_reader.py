"""Reads boxes of stored tensors, from whatever chunks hold them."""

import io
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from shardtorch.engine import Index
from shardtorch.errors import CheckpointError
from shardtorch.train._checkpoint_manifest import Chunk, Manifest

_CACHE_BYTES = 64 * 2**20
"""Bytes of chunks that a reader keeps, besides the last one that it read."""


class ChunkReader:
    """The tensors of a checkpoint, read in parts.

    A chunk is read and checked as a whole. The last few are kept, since the boxes that come next often lie in them.

    Args:
      folder: A checkpoint.
      manifest: The checkpoint's own.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._cache: OrderedDict[Chunk, Tensor] = OrderedDict()

    def read(self, name: str, index: Index) -> Tensor:
        """A box of one tensor, on the CPU.

        Raises:
          CheckpointError: A chunk that it lies in is damaged.
        """
        stored = self.manifest.tensors[name]
        box = torch.empty([part.stop - part.start for part in index], dtype=stored.dtype)
        for chunk in stored.chunks:
            overlap = [
                slice(max(part.start, start), min(part.stop, start + size))
                for part, start, size in zip(index, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(part.start < part.stop for part in overlap):
                target = _shifted(overlap, [part.start for part in index])
                box[target] = self._chunk(name, chunk)[_shifted(overlap, chunk.offsets)]
        return box

    def _chunk(self, name: str, chunk: Chunk) -> Tensor:
        if chunk not in self._cache:
            kept = sum(data.nbytes for data in self._cache.values())
            while self._cache and kept > _CACHE_BYTES:
                kept -= self._cache.popitem(last=False)[1].nbytes
            self._cache[chunk] = self._read_chunk(name, chunk)
        self._cache.move_to_end(chunk)
        return self._cache[chunk]

    def _read_chunk(self, name: str, chunk: Chunk) -> Tensor:
        path = self.folder / chunk.file
        try:
            stored = read_bytes(path, chunk.start, chunk.num_bytes)
        except OSError as error:
            raise CheckpointError(
                f"{name}: {path} must be readable.", got=str(error), fix="make it readable, or load another checkpoint."
            ) from error
        if zlib.crc32(stored) != chunk.crc32:  # before anything parses the bytes
            raise CheckpointError(
                f"{name}: the bytes of a tensor must be as they were saved.",
                got=f"another CRC-32 for bytes {chunk.start} to {chunk.start + chunk.num_bytes} of {path}",
                fix="the file is damaged: copy the whole folder again, or load another checkpoint.",
            )
        try:
            data = unpacked(stored)
            got = f"shape {tuple(data.shape)}, {data.dtype}"
        except (UnpicklingError, RuntimeError, AttributeError) as error:
            data, got = None, f"something else ({error})"
        dtype = self.manifest.tensors[name].dtype
        if data is None or (tuple(data.shape), data.dtype) != (chunk.sizes, dtype):
            raise CheckpointError(
                f"{name}: a chunk must be what the manifest says: a tensor of shape {chunk.sizes}, {dtype}.",
                got=f"{got} in {path} at byte {chunk.start}",
                fix="don't use this checkpoint: it was not written by a save.",
            )
        return data


def read_bytes(path: Path, start: int, num_bytes: int) -> bytes:
    """Part of a file; shorter than asked if the file ends before."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(num_bytes)


def unpacked(stored: bytes) -> Tensor:
    """The tensor that `torch.save` wrote. Runs no code out of the bytes."""
    return torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)


def data_crc32(x: Tensor) -> int:
    """CRC-32 of a CPU tensor's elements, whatever its dtype."""
    return zlib.crc32(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _shifted(parts: Sequence[slice], origin: Sequence[int]) -> Index:
    return tuple(slice(part.start - start, part.stop - start) for part, start in zip(parts, origin, strict=True))
