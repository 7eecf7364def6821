"""What a checkpoint says about itself: `manifest.json`, the only thing that a load trusts.

torch's own `.metadata` lies beside it for torch's own loader. It is a pickle, so shardtorch does not read it.
"""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from shardtorch.errors import CheckpointError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

MANIFEST = "manifest.json"
VERSION = 1
"""Of the manifest's layout. A reader refuses newer ones."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the bytes that hold it: what `torch.save` makes of it."""

    offsets: tuple[int, ...]
    """Where the box starts, per dim."""
    sizes: tuple[int, ...]
    """Extent of the box, per dim."""
    file: str
    """Name of the file, in the checkpoint's folder."""
    start: int
    """First byte in the file."""
    num_bytes: int
    crc32: int
    """Of those bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, in chunks that cover it exactly once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def check_coverage(self, name: str) -> None:
        """Raises unless the chunks cover the tensor exactly once.

        Raises:
          CheckpointError: An element lies in no chunk, in several, or outside.
        """
        # The cuts of all chunks make a grid, of as many cells as there are chunks if a mesh made them.
        cuts = [np.unique([0, size]) for size in self.shape]
        for dim in range(len(self.shape)):
            ends = [(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for chunk in self.chunks]
            cuts[dim] = np.union1d(cuts[dim], np.array(ends, dtype=np.int64).reshape(-1))
        counts = np.zeros([len(cut) - 1 for cut in cuts], dtype=np.int64)
        for chunk in self.chunks:
            ends = zip(cuts, chunk.offsets, chunk.sizes, strict=True)
            counts[tuple(slice(*np.searchsorted(cut, (start, start + size))) for cut, start, size in ends)] += 1
        inside = all(cut[0] == 0 and cut[-1] == size for cut, size in zip(cuts, self.shape, strict=True))
        if not inside or (counts != 1).any():
            boxes = ", ".join(
                "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(c.offsets, c.sizes, strict=True)) + "]"
                for c in self.chunks[:8]
            )
            raise CheckpointError(
                f"{name}: the chunks of a tensor cover it exactly once.",
                got=f"shape {self.shape} in {len(self.chunks)} chunks: {boxes}{' ...' if self.chunks[8:] else ''}",
                fix="this checkpoint can't be used; save or load another one.",
            )


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint but the numbers."""

    step: int
    extra: Mapping[str, JSON]
    """What the run keeps beside its tensors."""
    files: Mapping[str, int]
    """Size in bytes of each file of chunks, by name."""
    tensors: Mapping[str, StoredTensor]
    """By name; layers each have their own."""
    torch_version: str = torch.__version__
    """Of the torch that wrote the chunks."""

    def write(self, folder: Path) -> None:
        """Writes `manifest.json` into a folder, durably."""
        content = {
            "step": self.step,
            "torch_version": self.torch_version,
            "extra": dict(self.extra),
            "files": dict(self.files),
            "tensors": {
                name: asdict(tensor) | {"dtype": str(tensor.dtype).removeprefix("torch.")}
                for name, tensor in self.tensors.items()
            },
        }
        with (folder / MANIFEST).open("w") as file:
            file.write(_dumps({"version": VERSION, "crc32": _checksum(content), "content": content}))
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a complete checkpoint.

        Raises:
          CheckpointError: It is not there, damaged or of a newer version; a file is missing or has another size; a
            tensor is not covered.
        """
        path = folder / MANIFEST
        try:
            whole = json.loads(path.read_bytes())
            version = int(whole["version"])
        except FileNotFoundError:
            raise CheckpointError(
                f"a checkpoint is a folder with a {MANIFEST}.",
                got=str(folder) + ("" if folder.is_dir() else ", which is no folder"),
                fix="give a folder such as step_00000020, inside the folder that the run saves into.",
            ) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _damaged(path, error) from error
        if version > VERSION:
            raise CheckpointError(
                f"{path}: this version of shardtorch reads checkpoints up to version {VERSION}.",
                got=f"version {version}",
                fix="load it with the shardtorch that wrote it, or a newer one.",
            )
        try:
            if _checksum(whole["content"]) != whole["crc32"]:
                raise ValueError("its CRC-32 is wrong")
            manifest = _parsed(whole["content"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _damaged(path, error) from error
        manifest.check(folder)
        return manifest

    def check(self, folder: Path) -> None:
        """Raises unless every tensor is complete and every file has its size.

        Raises:
          CheckpointError: A tensor is not covered exactly once, or a file is missing, cut off or too long.
        """
        for name, tensor in self.tensors.items():
            tensor.check_coverage(name)
            for chunk in tensor.chunks:
                if not chunk.start + chunk.num_bytes <= self.files.get(chunk.file, -1):
                    raise _damaged(folder / MANIFEST, f"a chunk of {name} lies outside of {chunk.file!r}")
        for file, num_bytes in self.files.items():
            path = folder / file
            if not path.is_file():
                raise CheckpointError(
                    f"{path}: every file of a checkpoint must be there.",
                    got="no such file",
                    fix="copy the whole folder again, or load another checkpoint. Several processes need one folder "
                    "that all of them see.",
                )
            if path.stat().st_size != num_bytes:
                raise CheckpointError(
                    f"{path}: the file must have the {num_bytes} bytes that were saved.",
                    got=f"{path.stat().st_size} bytes",
                    fix="copy the whole folder again, or load another checkpoint.",
                )


def check_extra(extra: Mapping[str, JSON]) -> None:
    """Raises unless `extra` comes back from JSON as it is.

    Raises:
      CheckpointError: It holds something else than JSON does, such as a tuple, a key that isn't text, or a NaN.
    """
    try:
        if (back := json.loads(_dumps(dict(extra)))) == extra:
            return
        got = next(f"{key!r}: {value!r}" for key, value in extra.items() if key not in back or back[key] != value)
    except (TypeError, ValueError) as error:
        got = str(error)
    raise CheckpointError(
        "what a checkpoint keeps beside its tensors is JSON.",
        got=got,
        fix="use None, bool, int, finite float, str, list, and dict with str keys.",
    )


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _checksum(content: object) -> int:
    return zlib.crc32(_dumps(content).encode())


def _parsed(content: dict) -> Manifest:
    tensors = {}
    for name, tensor in content["tensors"].items():
        chunks = tuple(
            Chunk(**(chunk | {"offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])}))
            for chunk in tensor["chunks"]
        )
        dtype = getattr(torch, tensor["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{tensor['dtype']!r} is no dtype")
        tensors[name] = StoredTensor(tuple(tensor["shape"]), dtype, chunks)
    for file in content["files"]:
        if Path(file).name != file:
            raise ValueError(f"{file!r} is not the name of a file in the folder")
    return Manifest(content["step"], content["extra"], content["files"], tensors, content["torch_version"])


def _damaged(path: Path, what: object) -> CheckpointError:
    return CheckpointError(
        f"{path}: the manifest must be as it was written.",
        got=f"a damaged one: {what}",
        fix="copy the whole folder again, or load another checkpoint.",
    )
