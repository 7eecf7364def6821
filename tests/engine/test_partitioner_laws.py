"""Our arithmetic of shardings against XLA's: the same spec on 8 devices gives the same pieces in the same places."""

import math
import re

import numpy as np
import pytest
import torch
import torch_xla
from assertions import assert_lies_as
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtorch.engine import Engine
from shardtorch.mesh import Mesh, NamedSharding, P, TileAssignment

NUM_DEVICES = 8


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Meshes of 8 devices: up to three axes in any order, of any size that fits, each with a DCN factor."""
    names = draw(st.permutations(("data", "fsdp", "tensor")))[: draw(st.integers(1, 3))]
    sizes = dict.fromkeys(names, 1)
    for _ in range(int(math.log2(NUM_DEVICES))):
        sizes[draw(st.sampled_from(names))] *= 2
    dcn = {name: draw(st.sampled_from([d for d in (1, 2, 4) if size % d == 0])) for name, size in sizes.items()}
    return Mesh(sizes, dcn=dcn)


@st.composite
def placed(draw: st.DrawFn) -> tuple[NamedSharding, tuple[int, ...]]:
    """A sharding of a tensor of up to four dims, and its shape."""
    mesh = draw(meshes())
    rank = draw(st.integers(0, 4))
    entries: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axis_names)):
        if (dim := draw(st.integers(-1, rank - 1))) >= 0:
            entries[dim].append(axis)
    shape = tuple(mesh.axis_size(axes) * draw(st.integers(1, 3)) for axes in entries)
    return NamedSharding(mesh, P(*entries)), shape


def put(xla: Engine, sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.arange(math.prod(shape)).reshape(shape)
    return xla.put(values, sharding, shape), values


def boxes_by_xla(x: torch.Tensor) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """The replica number and the box of each device, in the order of their ids."""
    (found,) = torch_xla._XLAC._get_local_shard_replica_and_indices([x])
    whole = [slice(0, size) for size in x.shape]
    return [
        (replica, tuple((s.start, s.stop) for s in (whole if index is Ellipsis else index))) for replica, index in found
    ]


@given(placed())
@settings(max_examples=150)
def test_index_ranges_and_replicas(xla: Engine, case: tuple[NamedSharding, tuple[int, ...]]):
    sharding, shape = case
    x, values = put(xla, sharding, shape)
    ours = [
        (sharding.replica_of(device), tuple((s.start, s.stop) for s in index))
        for device, index in sharding.index_ranges(shape).items()
    ]
    assert boxes_by_xla(x) == ours
    assert_lies_as(x, sharding, values, xla)


@given(placed())
@settings(max_examples=150)
def test_tile_assignments(xla: Engine, case: tuple[NamedSharding, tuple[int, ...]]):
    sharding, shape = case
    x, _ = put(xla, sharding, shape)
    tile, reported = sharding.tile_assignment(len(shape)), xla.sharding_of(x)
    if sharding.is_fully_replicated:
        assert reported == str(tile) == "{replicated}"
        return
    match = re.fullmatch(r"\{devices=\[([\d,]+)\]([\d,]+)( last_tile_dim_replicate)?\}", reported)
    assert match is not None, reported
    dims, devices = (tuple(map(int, numbers.split(","))) for numbers in match.group(1, 2))
    assert (dims, match[3] is not None) == (tile.dims, tile.replicate_last_dim)
    assert devices == tuple(tile.devices().ravel())
    assert np.array_equal(parsed(str(tile)), np.reshape(devices, dims))


def parsed(text: str) -> np.ndarray:
    """The devices of a sharding in XLA's short form, by the definition of that form."""
    match = re.fullmatch(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(?: last_tile_dim_replicate)?\}", text)
    assert match is not None, text
    dims, shape, perm = (tuple(map(int, numbers.split(","))) if numbers else () for numbers in match.groups())
    return np.arange(math.prod(shape)).reshape(shape).transpose(perm or range(len(shape))).reshape(dims)


@given(placed())
@settings(max_examples=20)
def test_what_the_partitioner_computes_lies_there_too(xla: Engine, case: tuple[NamedSharding, tuple[int, ...]]):
    """Annotated values, unlike data that we upload, are placed by XLA."""
    sharding, shape = case
    x, values = put(xla, NamedSharding(sharding.mesh, P()), shape)
    y = xla.compile(lambda x: xla.constrain(x + 1, sharding))(x)
    assert_lies_as(y, sharding, values + 1, xla)


def test_the_laws_can_fail(xla: Engine):
    """A device order that differs from XLA's is seen."""
    sharding = NamedSharding(Mesh(a=2, b=4), P(("b", "a")))
    x, values = put(xla, NamedSharding(Mesh(a=2, b=4), P(("a", "b"))), (8,))
    assert boxes_by_xla(x) != [(0, ((s.start, s.stop),)) for (s,) in sharding.index_ranges((8,)).values()]
    wrong = TileAssignment((8,), (8,), (0,), replicate_last_dim=False)
    assert not np.array_equal(wrong.devices(), sharding.tile_assignment(1).devices())
    with pytest.raises(ValueError, match="must lie on the devices as its sharding says"):
        assert_lies_as(x, sharding, values, xla)
