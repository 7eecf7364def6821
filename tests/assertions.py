"""What tests of several packages assert of placed tensors."""

from collections import Counter

import torch
from torch import Tensor

from shardtorch.engine import Engine
from shardtorch.mesh import NamedSharding


def assert_lies_as(x: Tensor, sharding: NamedSharding, want: Tensor, engine: Engine) -> None:
    """The shards of `x` hold `want`, tile it exactly once per replica, and are those of the sharding's devices."""
    shards = engine.local_shards(x, sharding)
    assert [shard.index for shard in shards] == list(sharding.index_ranges(want.shape).values())
    covered = torch.zeros((sharding.num_replicas, *want.shape), dtype=torch.int64)
    for shard in shards:
        assert shard.data.device.type == "cpu"
        assert shard.data.dtype == want.dtype
        assert shard.data.shape == sharding.shard_shape(want.shape)
        assert torch.equal(shard.data, want[shard.index])
        covered[(shard.replica, *shard.index)] += 1
    assert bool((covered == 1).all())


def assert_read_once_per_box(boxes: list[tuple[slice, ...]], shape: tuple[int, ...]) -> None:
    """What was read covers a tensor of this shape, and no element twice."""
    times = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        times[box] += 1
    assert bool((times == 1).all()), Counter(times.flatten().tolist())
