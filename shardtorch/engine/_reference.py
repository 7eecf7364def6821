"""The reference engine: one CPU device, eager torch. It checks every spec and applies none: the oracle of the tests."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardtorch.engine import _contract
from shardtorch.errors import EngineUnavailableError, ShardingError
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
        ranges = sharding.index_ranges(tuple(shape)).values()
        boxes = {tuple((s.start, s.stop) for s in index): index for index in ranges}  # replicas are read once
        num_layers = shape[0] if _contract.is_stack(shape, sharding) else 0
        rows = [(slice(layer, layer + 1),) for layer in range(num_layers)] or [()]
        for first in rows:
            for index in boxes.values():
                box = (*first, *index[len(first) :])
                x[box] = read(box).detach().to(dtype)
        return x

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding) -> Tensor:
        sharding.validate(tuple(shape))
        return torch.zeros(tuple(shape), dtype=dtype)

    def constrain(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        if x.device != self.device:
            raise ShardingError(
                "only a tensor on the engine's device can be annotated.",
                got=f"a tensor on {x.device}",
                fix="move it to the CPU, where the reference engine computes.",
            )
        sharding.validate(tuple(x.shape))
        return x

    def in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x.detach() for x in tensors]

    def annotate(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        return self.constrain(x, sharding)

    def put(self, part: Tensor, sharding: NamedSharding, global_shape: Sequence[int]) -> Tensor:
        _contract.check_part(part, global_shape, process_count=1)
        sharding.validate(tuple(global_shape))
        return part.detach().clone()

    def scan(
        self,
        body: _contract.LayerBody,
        x: Tensor,
        weights: Mapping[str, Tensor],
        constants: Sequence[Tensor],
        *,
        remat: bool,
    ) -> Tensor:
        recompute = remat and torch.is_grad_enabled()
        for layer in range(_contract.check_scan(weights, constants)):
            arguments = (x, {name: w[layer] for name, w in weights.items()}, *constants)
            y = checkpoint(body, *arguments, use_reentrant=False) if recompute else body(*arguments)
            assert isinstance(y, Tensor)
            x = _contract.check_layer_output(x, y)
        return x

    def call_kernel(self, kernel: _contract.Kernel, tensors: Sequence[Tensor]) -> list[Tensor]:
        raise EngineUnavailableError(
            "the reference engine runs plain torch, and no kernels.",
            got=f"the kernel {kernel.name}",
            fix="use torch's own op here: it is what the kernel is compared with.",
        )

    def compile(
        self, step: Callable[_contract.Arguments, _contract.Result]
    ) -> Callable[_contract.Arguments, _contract.Result]:
        return step

    def local_shards(self, x: Tensor, sharding: NamedSharding) -> list[_contract.Shard]:
        return [
            _contract.Shard(index, x[index].detach().clone(), sharding.replica_of(device))
            for device, index in sharding.index_ranges(tuple(x.shape)).items()
        ]

    def sharding_of(self, x: Tensor) -> str:
        return ""

    def num_compiles(self) -> int:
        return 0

    def sync(self) -> None:
        pass
