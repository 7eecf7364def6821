"""Sharded checkpoints: atomic, checked, loadable on another mesh and in plain torch.

A checkpoint is a folder in the format of `torch.distributed.checkpoint` (DCP), with a `manifest.json` beside it:

    checkpoints/step_00000020/
        __0_0.distcp     shards, one file per process
        .metadata        for torch.distributed.checkpoint.load, which needs neither shardtorch nor torch_xla
        manifest.json    names, shapes, dtypes, chunks with checksums, and what the run keeps beside its tensors
"""

import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from shardtorch.engine import Engine, Index
from shardtorch.errors import CheckpointError
from shardtorch.train._checkpoint_manifest import JSON as JSON
from shardtorch.train._checkpoint_manifest import MANIFEST, Manifest, check_extra
from shardtorch.train._checkpoint_reader import ChunkReader
from shardtorch.train._checkpoint_tensors import Entry, entries, entry_name, is_stack
from shardtorch.train._checkpoint_tensors import Placed as Placed


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: Mapping[str, Placed],
    extra: Mapping[str, JSON],
    engine: Engine,
    *,
    keep: int | None = None,
) -> Path:
    """Saves tensors as `directory/step_00000020`, which exists complete and checked, or not at all.

    Everything is written into a temporary folder beside, made durable, read back and compared; then the folder gets
    its name. A kill at any moment leaves the older checkpoints as they were; what it left behind is removed by the
    next save.

    Several processes all call this, with one folder that all of them see, and with `torch.distributed` initialised
    on a backend that works on the CPU; each writes the shards of which it holds replica 0. `extra` is the first
    one's.

    Args:
      directory: Holds the checkpoints of one run, and nothing else called `.tmp-step_...`. It is made if missing.
      step: Number of updates behind the state.
      tensors: By key. In a key with a segment `*` (`model.layers.*.mlp.w_up.weight`), the tensor is a stack of
        layers: dim 0 counts them and is not sharded. Layers are stored one by one, under their numbers.
      extra: Whatever else the run must know to go on.
      keep: How many checkpoints to keep, this one included: older ones are removed once this one is in place. None
        keeps all.

    Returns:
      The checkpoint's folder.

    Raises:
      CheckpointError: The step is saved already, `extra` is not JSON, a key is not well-formed, a tensor does not
        lie as its sharding says, or the folder can't be written (a full disk): no part of the checkpoint is left.
      ShardingError: A sharding does not fit its tensor.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    from shardtorch.train import _checkpoint_writer as writing

    if step < 0 or (keep is not None and keep < 1):
        raise CheckpointError(
            "a step is not negative, and at least one checkpoint is kept.",
            got=f"step={step}, keep={keep}",
            fix="use keep=None to keep all of them.",
        )
    check_extra(extra)
    several = _several_processes(engine)
    engine.sync()  # what is pending runs here, on all processes together
    planner = writing.ShardPlanner(engine)
    writer = writing.CheckpointWriter(Path(directory) / f"step_{step:08d}", step, extra, planner)
    first = engine.inventory().process_index == 0
    with _explained(writer.folder, tensors):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
                save(dict(tensors), storage_writer=writer, planner=planner, no_dist=not several)
        except BaseException:
            if first:
                shutil.rmtree(writer.temporary, ignore_errors=True)
            raise
    if first and keep is not None:
        older = [path for number, path in _complete(writer.folder.parent) if number < step]
        with _explained_removal(writer.folder):
            for path in older[: max(0, len(older) + 1 - keep)]:
                writing.remove(path)
    return writer.folder


def load_checkpoint(
    path: Path, tensors: Mapping[str, Placed], engine: Engine
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """Loads a checkpoint onto any mesh.

    Each process reads what its devices need. No pickle is executed.

    Args:
      path: A checkpoint's folder; `latest_checkpoint` finds one.
      tensors: What to load, and where to put it. A stack (`*` in its key) loads layers that were saved one by one,
        and the other way round.

    Returns:
      New global tensors by the keys of `tensors`, and the `extra` that was saved.

    Raises:
      CheckpointError: It is no complete checkpoint, is damaged or of a newer version, or holds other tensors than
        `tensors`: exactly the same names, shapes and dtypes are wanted.
      ShardingError: A sharding does not fit its tensor.
    """
    path = Path(path)
    manifest = Manifest.read(path)
    _check_same(path, manifest, entries(tensors))
    reader = ChunkReader(path, manifest)
    loaded = {}
    for key, placed in tensors.items():

        def read(index: Index, key: str = key) -> Tensor:
            if not is_stack(key):
                return reader.read(key, index)
            layers = range(index[0].start, index[0].stop)
            return torch.stack([reader.read(entry_name(key, layer), index[1:]) for layer in layers])

        loaded[key] = engine.materialize(tuple(placed.tensor.shape), placed.tensor.dtype, placed.sharding, read)
    return loaded, dict(manifest.extra)


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step in a folder, or None. What a killed save left is passed over."""
    found = _complete(Path(directory))
    return found[-1][1] if found else None


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Whole tensors of a checkpoint, on the CPU, under the names that a plain torch model uses.

    Args:
      path: A checkpoint's folder.
      prefix: Only names that start with it are read; it is cut off. `model.` gives a state dict of the model.

    Raises:
      CheckpointError: It is no complete checkpoint, is damaged or of a newer version, or no name starts so.
    """
    path = Path(path)
    manifest = Manifest.read(path)
    names = [name for name in manifest.tensors if name.startswith(prefix)]
    if not names:
        prefixes = sorted({name.partition(".")[0] for name in manifest.tensors})
        raise CheckpointError(
            f"{path}: tensors to read must be there.",
            got=f"no name that starts with {prefix!r}",
            fix=f"names start with {', '.join(prefixes)}.",
        )
    reader = ChunkReader(path, manifest)
    shapes = {name: manifest.tensors[name].shape for name in names}
    return {
        name.removeprefix(prefix): reader.read(name, tuple(slice(0, size) for size in shape))
        for name, shape in shapes.items()
    }


def read_extra(path: Path) -> dict[str, JSON]:
    """What the run kept beside its tensors.

    Raises:
      CheckpointError: It is no complete checkpoint, or of a newer version.
    """
    return dict(Manifest.read(Path(path)).extra)


def _complete(directory: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints, in order of steps."""
    if not directory.is_dir():
        return []
    named = ((re.fullmatch(r"step_(\d{8,})", path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match and (path / MANIFEST).is_file())


def _several_processes(engine: Engine) -> bool:
    """Whether processes save together.

    Raises:
      CheckpointError: They can't, because torch.distributed does not connect them.
    """
    import torch.distributed as dist

    inventory = engine.inventory()
    if inventory.process_count == 1:
        return False
    joined = dist.is_available() and dist.is_initialized()
    if not joined or (dist.get_rank(), dist.get_world_size()) != (inventory.process_index, inventory.process_count):
        raise CheckpointError(
            f"the {inventory.process_count} processes of a run save a checkpoint together, over torch.distributed.",
            got=f"process {dist.get_rank()} of {dist.get_world_size()} there" if joined else "it is not initialised",
            fix=f"call torch.distributed.init_process_group('gloo', rank={inventory.process_index}, "
            f"world_size={inventory.process_count}, init_method=...) at the start.",
        )
    return True


def _check_same(path: Path, manifest: Manifest, wanted: Mapping[str, Entry]) -> None:
    """Raises unless a checkpoint holds exactly the tensors that are wanted."""
    missing, unexpected = wanted.keys() - manifest.tensors.keys(), manifest.tensors.keys() - wanted.keys()
    if missing or unexpected:
        sides = (("lacks", missing), ("also has", unexpected))
        raise CheckpointError(
            f"{path}: a checkpoint must hold the tensors to load, and no others.",
            got="; ".join(f"it {verb} {_listed(names)}" for verb, names in sides if names),
            fix="load it into the model and optimizer that it was saved from.",
        )
    for name, entry in wanted.items():
        stored = manifest.tensors[name]
        if (stored.shape, stored.dtype) != (entry.shape, entry.dtype):
            raise CheckpointError(
                f"{name}: the tensor to load has shape {entry.shape}, {entry.dtype}.",
                got=f"shape {stored.shape}, {stored.dtype} in {path}",
                fix="load it into the model and optimizer that it was saved from.",
            )


def _listed(names: set[str], limit: int = 5) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


@contextmanager
def _explained(folder: Path, tensors: Mapping[str, Placed]) -> Iterator[None]:
    """Unwraps what DCP wraps, and says what a failure of the file system means."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as wrapped:
        error = next(iter(wrapped.failures.values()))[0]
        cause = _file_error(error) if isinstance(error, Exception) else None
        if cause is None:
            raise error from None
        size = sum(placed.tensor.numel() * placed.tensor.dtype.itemsize for placed in tensors.values())
        raise CheckpointError(
            f"{folder}: the checkpoint must be written, which takes {size / 2**20:,.1f} MiB.",
            got=f"{cause}{_free_space(folder)}",
            fix="make room, keep fewer checkpoints, or save into another folder. Nothing was left of this one.",
        ) from error


def _file_error(error: BaseException | None) -> OSError | None:
    """The file system's error behind one; torch's zip writer hides it behind a RuntimeError of its own."""
    while error is not None and not isinstance(error, OSError | CheckpointError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, OSError) else None


def _free_space(folder: Path) -> str:
    existing = next(parent for parent in folder.absolute().parents if parent.is_dir())
    return f"; {shutil.disk_usage(existing).free / 2**20:,.1f} MiB are free"


@contextmanager
def _explained_removal(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            "checkpoints older than the ones to keep must be removable.",
            got=f"{error}, after {folder} was saved",
            fix="make them writable, or leave keep out.",
        ) from error
