"""A spec on a mesh: what each device holds of a tensor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardtorch.errors import ShardingError

from ._mesh import Mesh, divisors
from ._spec import PartitionSpec


@dataclass(frozen=True)
class TileAssignment:
    """Which device holds which tile of a tensor, in the form that XLA prints and parses (`IotaTileAssignment`).

    The devices 0..N-1 are reshaped, transposed and reshaped, so the description does not grow with their number.
    """

    dims: tuple[int, ...]
    """Number of tiles along each tensor dim, then the number of replicas if `replicate_last_dim`."""
    reshape_dims: tuple[int, ...]
    """Shape that 0..N-1 first takes. Canonical: without dims of size 1 and with adjacent dims merged."""
    transpose_perm: tuple[int, ...]
    """How that shape is transposed before it takes the shape `dims`."""
    replicate_last_dim: bool
    """Whether the last of `dims` counts replicas of a tile rather than tiles."""

    def devices(self) -> np.ndarray:
        """The device of each tile: integers of shape `dims`. The only thing here that grows with the mesh."""
        ids = np.arange(math.prod(self.dims)).reshape(self.reshape_dims)
        return ids.transpose(self.transpose_perm).reshape(self.dims)

    def __str__(self) -> str:
        tiles = self.dims[:-1] if self.replicate_last_dim else self.dims
        if math.prod(tiles) == 1:
            return "{replicated}"
        dims, source, perm = (",".join(map(str, x)) for x in (self.dims, self.reshape_dims, self.transpose_perm))
        transpose = f"T({perm})" if len(self.reshape_dims) > 1 else ""
        replicated = " last_tile_dim_replicate" if self.replicate_last_dim else ""
        return f"{{devices=[{dims}]<=[{source}]{transpose}{replicated}}}"


@dataclass(frozen=True)
class NamedSharding:
    """How a tensor lies on a mesh. Pure data, equal by value, hashable.

    Raises:
      ShardingError: The spec uses an axis that the mesh lacks.
    """

    mesh: Mesh
    spec: PartitionSpec
    """Anything that `PartitionSpec.of` takes; kept as a `PartitionSpec`."""

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise ShardingError(
                "a sharding is on a Mesh.",
                got=f"a {type(self.mesh).__name__}",
                fix="write NamedSharding(mesh, P('fsdp')).",
            )
        object.__setattr__(self, "spec", PartitionSpec.of(self.spec))
        self.mesh.check_axes(self.spec.axes)

    @property
    def num_shards(self) -> int:
        """Number of different pieces of the tensor."""
        return self.mesh.axis_size(self.spec.axes)

    @property
    def num_replicas(self) -> int:
        """Number of devices that hold each piece."""
        return self.mesh.axis_size(self.replicated_axes)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Mesh axes that split no dim, in the mesh's order."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.spec.axes)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole tensor."""
        return self.num_shards == 1

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the piece that one device holds.

        Args:
          shape: Global shape. Dims beyond the spec are replicated.

        Raises:
          ShardingError: As `validate`.

        >>> NamedSharding(Mesh(x=2, y=8, z=2), PartitionSpec(("x", "y"), None)).shard_shape((128, 2048))
        (8, 2048)
        """
        self.validate(shape)
        return tuple(size // self._num_tiles(dim) for dim, size in enumerate(shape))

    def bytes_per_device(self, shape: Sequence[int], itemsize: int) -> int:
        """Bytes of the piece that one device holds, without padding.

        Args:
          shape: Global shape.
          itemsize: Bytes per element.
        """
        return math.prod(self.shard_shape(shape)) * itemsize

    def index_of(self, device_id: int, shape: Sequence[int]) -> tuple[slice, ...]:
        """The part of the tensor that one device holds: a slice with concrete start and stop per dim.

        Args:
          device_id: 0 to N-1.
          shape: Global shape.

        >>> NamedSharding(Mesh(x=2), PartitionSpec(None, "x")).index_of(1, (3, 4))
        (slice(0, 3, None), slice(2, 4, None))
        """
        sizes = self.shard_shape(shape)
        places, num_places = self.mesh.coordinates(device_id), self.mesh.shape
        tiles = [0] * len(sizes)
        for dim in range(len(self.spec)):
            for axis in self.spec.axes_of(dim):
                tiles[dim] = tiles[dim] * num_places[axis] + places[axis]
        return tuple(slice(tile * size, (tile + 1) * size) for tile, size in zip(tiles, sizes, strict=True))

    def index_ranges(self, shape: Sequence[int]) -> dict[int, tuple[slice, ...]]:
        """The part of the tensor that each device holds, by device id, 0..N-1 in order; see `index_of`."""
        return {device_id: self.index_of(device_id, shape) for device_id in range(self.mesh.size)}

    def replica_of(self, device_id: int) -> int:
        """Which replica of its piece a device holds: 0 to `num_replicas - 1`, numbered by rising device id.

        Replica 0 writes checkpoints.

        >>> [NamedSharding(Mesh(data=2, fsdp=2), PartitionSpec("fsdp")).replica_of(device) for device in range(4)]
        [0, 0, 1, 1]
        """
        places, ici, dcn = self.mesh.coordinates(device_id), self.mesh.ici, self.mesh.dcn
        replica = 0
        for axis in self.replicated_axes:  # the DCN factors vary slowest in device ids
            replica = replica * dcn[axis] + places[axis] // ici[axis]
        for axis in self.replicated_axes:
            replica = replica * ici[axis] + places[axis] % ici[axis]
        return replica

    def validate(self, shape: Sequence[int], name: str | None = None) -> None:
        """Raises unless the mesh cuts a tensor of this shape into equal pieces that are not empty.

        Args:
          shape: Global shape.
          name: What the user calls the tensor; the message starts with it.

        Raises:
          ShardingError: The spec has more entries than the tensor has dims, a dim is smaller than the axes that split
            it, or not divisible by them.
        """
        try:
            self._check(tuple(shape))
        except ShardingError as error:
            raise (error if name is None else error.within(name)) from None

    def tile_assignment(self, rank: int) -> TileAssignment:
        """This sharding of a tensor with `rank` dims as XLA writes it.

        Raises:
          ShardingError: The spec has more entries than that.

        >>> print(NamedSharding(Mesh(data=4, tensor=2), PartitionSpec("tensor", "data")).tile_assignment(2))
        {devices=[2,4]<=[4,2]T(1,0)}
        """
        self._check_rank(rank)
        tiles = tuple(self._num_tiles(dim) for dim in range(rank))
        replicate = self.num_replicas > 1
        # The grid of device ids is an iota of shape (*dcn, *ici); each axis is its DCN dim followed by its ICI dim.
        names = self.mesh.axis_names
        split = [dim for axis in map(names.index, self.spec.axes) for dim in (axis, len(names) + axis)]
        replicated = [dim for dim in range(2 * len(names)) if dim not in split]  # by rising device id, as XLA has it
        reshape_dims, transpose_perm = _canonical_iota(
            (*self.mesh.dcn.values(), *self.mesh.ici.values()), [*split, *replicated]
        )
        return TileAssignment(
            dims=(*tiles, self.num_replicas) if replicate else tiles,
            reshape_dims=reshape_dims,
            transpose_perm=transpose_perm,
            replicate_last_dim=replicate,
        )

    def _num_tiles(self, dim: int) -> int:
        return self.mesh.axis_size(self.spec.axes_of(dim))

    def _check(self, shape: tuple[int, ...]) -> None:
        self._check_rank(len(shape))
        for dim, size in enumerate(shape):
            axes, num_tiles = self.spec.axes_of(dim), self._num_tiles(dim)
            if num_tiles == 1 or (size and size % num_tiles == 0):
                continue
            sizes = " x ".join(str(self.mesh.axis_size(axis)) for axis in axes)
            split = f"mesh axis {axes[0]!r} of size {sizes}"
            if len(axes) > 1:
                split = f"mesh axes {axes} of sizes {sizes} = {num_tiles}"
            if size < num_tiles:
                law = f"dim {dim} has size {size}, fewer than {split}: some devices would hold nothing."
            else:
                law = f"dim {dim} has size {size}, not divisible by {split}."
            raise ShardingError(law, got=f"shape {shape}, {self._text}", fix=_suggestion(size, num_tiles, axes))

    def _check_rank(self, rank: int) -> None:
        if len(self.spec) > rank:
            raise ShardingError(
                f"the tensor has {rank} dims, and its spec {len(self.spec)} entries.",
                got=self._text,
                fix="give the spec at most one entry per dim.",
            )

    @property
    def _text(self) -> str:
        return f"spec {self.spec}, mesh {self.mesh}"


def _suggestion(size: int, num_tiles: int, axes: Sequence[str]) -> str:
    """What would let `axes` split a dim: the two divisors of its size nearest to the present number of tiles."""
    nearest = sorted(divisors(size)[1:], key=lambda divisor: abs(divisor - num_tiles))[:2] if size else []
    if not nearest:
        return "replicate this dim with None."
    subject = (
        f"a {axes[0]} size that divides" if len(axes) == 1 else f"sizes of {', '.join(axes)} whose product divides"
    )
    return f"use {subject} {size} (such as {' or '.join(map(str, sorted(nearest)))}), or replicate this dim with None."


def _canonical_iota(shape: Sequence[int], perm: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shortest reshape and transpose of 0..N-1 that give the same order, which is the one that XLA prints.

    Drops dims of size 1 and merges neighbours that the transpose leaves neighbours in the same order, as
    `CanonicalizeIotaDims` in `xla/hlo/ir/tile_assignment.cc` does.

    >>> _canonical_iota((2, 1, 4, 3), (3, 0, 1, 2))
    ((8, 3), (1, 0))
    """
    runs: list[list[int]] = []  # maximal runs of neighbours, in transposed order
    kept = [dim for dim, size in enumerate(shape) if size > 1]
    number = {dim: place for place, dim in enumerate(kept)}
    for dim in (number[dim] for dim in perm if dim in number):
        if runs and runs[-1][-1] + 1 == dim:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    if len(runs) <= 1:
        return (math.prod(shape),), (0,)
    in_source_order = sorted(runs)
    sizes = tuple(math.prod(shape[kept[dim]] for dim in run) for run in in_source_order)
    return sizes, tuple(in_source_order.index(run) for run in runs)
