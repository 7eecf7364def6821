"""Laws and mistakes of `NamedSharding` and `TileAssignment`."""

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_strategies import shardings

from shardtorch.errors import ShardingError
from shardtorch.mesh import Mesh, NamedSharding, P, TileAssignment

Case = tuple[NamedSharding, tuple[int, ...]]


@given(shardings())
def test_shards_tile_the_tensor_exactly_once_per_replica(case: Case) -> None:
    sharding, shape = case
    counts = np.zeros((sharding.num_replicas, *shape), dtype=int)
    for device_id, ranges in sharding.index_ranges(shape).items():
        counts[(sharding.replica_of(device_id), *ranges)] += 1
    assert (counts == 1).all()


@given(shardings())
def test_every_range_has_the_shard_shape(case: Case) -> None:
    sharding, shape = case
    ranges = sharding.index_ranges(shape)
    assert list(ranges) == list(range(sharding.mesh.size))
    for held in ranges.values():
        assert tuple(part.stop - part.start for part in held) == sharding.shard_shape(shape)
    assert len({tuple((part.start, part.stop) for part in held) for held in ranges.values()}) == sharding.num_shards


@given(shardings(), st.sampled_from([1, 2, 4]))
def test_bytes_per_device_times_devices_is_bytes_times_replicas(case: Case, itemsize: int) -> None:
    sharding, shape = case
    total = math.prod(shape) * itemsize
    assert sharding.bytes_per_device(shape, itemsize) * sharding.mesh.size == total * sharding.num_replicas
    assert sharding.num_shards * sharding.num_replicas == sharding.mesh.size
    assert sharding.is_fully_replicated == (sharding.num_replicas == sharding.mesh.size)
    assert sorted((*sharding.spec.axes, *sharding.replicated_axes)) == sorted(sharding.mesh.axis_names)


@given(shardings())
def test_tile_assignment_agrees_with_index_ranges(case: Case) -> None:
    sharding, shape = case
    assignment = sharding.tile_assignment(len(shape))
    devices = assignment.devices()
    assert devices.shape == assignment.dims
    ranges = sharding.index_ranges(shape)
    shard = sharding.shard_shape(shape)
    for place in np.ndindex(*assignment.dims):
        tile, replica = (place[:-1], place[-1]) if assignment.replicate_last_dim else (place, 0)
        device_id = int(devices[place])
        assert ranges[device_id] == tuple(slice(i * n, (i + 1) * n) for i, n in zip(tile, shard, strict=True))
        assert sharding.replica_of(device_id) == replica


@given(shardings())
def test_replicas_are_numbered_by_rising_device_id(case: Case) -> None:
    sharding, shape = case
    groups: dict[str, list[int]] = {}
    for device_id, ranges in sharding.index_ranges(shape).items():
        groups.setdefault(str(ranges), []).append(sharding.replica_of(device_id))
    assert all(replicas == list(range(sharding.num_replicas)) for replicas in groups.values())


@given(shardings())
def test_iota_is_canonical(case: Case) -> None:
    sharding, shape = case
    assignment = sharding.tile_assignment(len(shape))
    reshape, perm = assignment.reshape_dims, assignment.transpose_perm
    assert sorted(perm) == list(range(len(reshape)))
    assert all(size > 1 for size in reshape) or reshape == (1,)
    assert all(after != before + 1 for before, after in itertools.pairwise(perm))
    assert len(assignment.dims) == len(shape) + assignment.replicate_last_dim


@pytest.mark.parametrize(
    ("mesh", "spec", "rank", "text"),
    [
        (Mesh(fsdp=4, tensor=2), P("fsdp"), 2, "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"),
        (Mesh(data=4, tensor=2), P("tensor", "data"), 2, "{devices=[2,4]<=[4,2]T(1,0)}"),
        (Mesh(data=4, tensor=2), P("tensor"), 1, "{devices=[2,4]<=[4,2]T(1,0) last_tile_dim_replicate}"),
        (Mesh(data=4, tensor=2), P(("tensor", "data")), 1, "{devices=[8]<=[4,2]T(1,0)}"),
        (Mesh(data=4, tensor=2), P(("data", "tensor")), 1, "{devices=[8]<=[8]}"),
        (Mesh(data=4, tensor=2), P(), 2, "{replicated}"),
        (Mesh(data=4, tensor=1), P("tensor"), 2, "{replicated}"),
        (
            Mesh(data=2, fsdp=2, tensor=2),
            P("tensor", "fsdp"),
            2,
            "{devices=[2,2,2]<=[2,2,2]T(2,1,0) last_tile_dim_replicate}",
        ),
        (
            Mesh(data=2, fsdp=1, tensor=4),
            P(None, "tensor"),
            3,
            "{devices=[1,4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
        ),
        (Mesh(data=4, fsdp=2, dcn={"data": 2}), P("data", "fsdp"), 2, "{devices=[4,2]<=[8]}"),
        (Mesh(data=2, fsdp=4, dcn={"fsdp": 2}), P("data", "fsdp"), 2, "{devices=[2,4]<=[2,2,2]T(1,0,2)}"),
        (
            Mesh(fsdp=2, tensor=2, context=2, dcn={"context": 2}),
            P("fsdp"),
            1,
            "{devices=[2,4]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}",
        ),
        (Mesh(), P(), 0, "{replicated}"),
    ],
)
def test_text_is_what_xla_writes(mesh: Mesh, spec: P, rank: int, text: str) -> None:
    assert str(NamedSharding(mesh, spec).tile_assignment(rank)) == text


def test_tile_assignment_does_not_grow_with_the_mesh() -> None:
    huge = NamedSharding(Mesh(data=2**20, fsdp=2**20, tensor=2**20), P("tensor", "fsdp"))
    assert huge.tile_assignment(2) == TileAssignment(
        (2**20, 2**20, 2**20), (2**20, 2**20, 2**20), (2, 1, 0), replicate_last_dim=True
    )
    assert huge.replica_of(2**60 - 1) == 2**20 - 1


def test_sharding_is_a_value() -> None:
    one, two = (NamedSharding(Mesh(fsdp=4, tensor=2), P("fsdp")) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one.replicated_axes == ("tensor",)
    assert NamedSharding(Mesh(fsdp=4), ("fsdp",)) == NamedSharding(Mesh(fsdp=4), P("fsdp"))  # type: ignore[arg-type]


def test_unsharded_dims_may_be_empty() -> None:
    assert NamedSharding(Mesh(fsdp=4), P(None, "fsdp")).shard_shape((0, 8)) == (0, 2)


MESH = Mesh(data=2, fsdp=4, tensor=48)


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (
            P("tensor", "fsdp"),
            (11008, 4096),
            "ShardingError: w_up: dim 0 has size 11008, not divisible by mesh axis 'tensor' of size 48.\n"
            "  got: shape (11008, 4096), spec P('tensor', 'fsdp'), mesh Mesh(data=2, fsdp=4, tensor=48)\n"
            "  fix: use a tensor size that divides 11008 (such as 32 or 43), or replicate this dim with None.",
        ),
        (
            P(None, ("data", "fsdp")),
            (3, 12),
            "ShardingError: w_up: dim 1 has size 12, not divisible by mesh axes ('data', 'fsdp') of sizes 2 x 4 = 8.\n"
            "  got: shape (3, 12), spec P(None, ('data', 'fsdp')), mesh Mesh(data=2, fsdp=4, tensor=48)\n"
            "  fix: use sizes of data, fsdp whose product divides 12 (such as 4 or 6), "
            "or replicate this dim with None.",
        ),
        (
            P("fsdp"),
            (2,),
            "w_up: dim 0 has size 2, fewer than mesh axis 'fsdp' of size 4: some devices would hold nothing.",
        ),
        (P("fsdp"), (1,), "fix: replicate this dim with None."),
        (P("fsdp"), (0,), "w_up: dim 0 has size 0, fewer than"),
        (P("fsdp", None), (8,), "w_up: the tensor has 1 dims, and its spec 2 entries."),
    ],
)
def test_a_tensor_that_does_not_fit(spec: P, shape: tuple[int, ...], message: str) -> None:
    sharding = NamedSharding(MESH, spec)
    with pytest.raises(ShardingError) as caught:
        sharding.validate(shape, "w_up")
    assert message in f"ShardingError: {caught.value}"
    without_name = re.escape(caught.value.law.removeprefix("w_up: "))
    for verb in (sharding.validate, sharding.shard_shape, sharding.index_ranges):
        with pytest.raises(ShardingError, match=f"^{without_name}"):
            verb(shape)


@given(st.integers(1, 300), st.integers(2, 60))
def test_suggested_sizes_work(size: int, num_tiles: int) -> None:
    try:
        NamedSharding(Mesh(fsdp=num_tiles), P("fsdp")).validate((size,))
    except ShardingError as error:
        suggested = Counter(re.findall(r"\d+", error.fix.partition("such as")[2]))
        assert suggested or size == 1
        for other in suggested:
            assert NamedSharding(Mesh(fsdp=int(other)), P("fsdp")).shard_shape((size,)) == (size // int(other),)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            lambda: NamedSharding(MESH, P("fsd")),
            "no axis 'fsd'; its axes are 'data', 'fsdp', 'tensor'(.|\n)*mean 'fsdp'",
        ),
        (lambda: NamedSharding(MESH, P("stage")), "no axis 'stage'(.|\n)*add this one to the mesh"),
        (lambda: NamedSharding(MESH, P("fsdp", None)).tile_assignment(1), "1 dims, and its spec 2 entries"),
        (lambda: NamedSharding(MESH, P("fsdp")).replica_of(384), "numbered 0 to 383"),
        (lambda: NamedSharding(Mesh(fsdp=-1), P("fsdp")).shard_shape((8,)), r"call mesh\.bind"),
    ],
)
def test_mistakes(mistake, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        mistake()
