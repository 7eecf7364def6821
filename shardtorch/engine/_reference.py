"""The reference engine: one CPU device, eager torch. It checks every spec and applies none: the oracle of the tests."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardtorch.engine import _contract
from shardtorch.mesh import NamedSharding


class ReferenceEngine(_contract.Engine):
    """Plain torch on the CPU.

    It takes any mesh: a tensor is whole, and `local_shards` cuts it the way the mesh's devices would hold it.
    """

    name = "reference"
    device = torch.device("cpu")

    def inventory(self) -> _contract.Inventory:
        return _contract.Inventory("cpu", "cpu", num_devices=1, process_index=0, process_count=1)

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding, read: _contract.ReadShard
    ) -> Tensor:
        sharding.validate(tuple(shape))
        x = torch.empty(tuple(shape), dtype=dtype)
        seen = set()
        for index in sharding.index_ranges(tuple(shape)).values():
            key = tuple((s.start, s.stop) for s in index)
            if key not in seen:  # replicas of one box are read once
                seen.add(key)
                x[index] = read(index).detach().to(dtype)
        return x

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding) -> Tensor:
        sharding.validate(tuple(shape))
        return torch.zeros(tuple(shape), dtype=dtype)

    def constrain(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        sharding.validate(tuple(x.shape))
        return x

    def annotate(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        return self.constrain(x, sharding)

    def put(self, part: Tensor, sharding: NamedSharding, global_shape: Sequence[int]) -> Tensor:
        _contract.check_part(part, global_shape, process_count=1)
        sharding.validate(tuple(global_shape))
        return part

    def scan(
        self,
        body: _contract.LayerBody,
        x: Tensor,
        weights: Mapping[str, Tensor],
        constants: Sequence[Tensor],
        *,
        remat: bool,
    ) -> Tensor:
        num_layers = len(next(iter(weights.values())))
        for layer in range(num_layers):
            layer_weights = {name: w[layer] for name, w in weights.items()}
            if remat and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(body, x, layer_weights, *constants, use_reentrant=False)
            else:
                x = body(x, layer_weights, *constants)
        return x

    def compile(self, step: _contract.Step) -> _contract.Step:
        return step

    def local_shards(self, x: Tensor, sharding: NamedSharding) -> list[_contract.Shard]:
        return [
            _contract.Shard(index, x[index].detach(), sharding.replica_of(device))
            for device, index in sharding.index_ranges(tuple(x.shape)).items()
        ]

    def sharding_of(self, x: Tensor) -> str:
        return ""

    def num_compiles(self) -> int:
        return 0

    def sync(self) -> None:
        pass
