"""`TorchXlaEngine`: the verbs of the contract, each in a module of its own."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps

import torch
import torch_xla
import torch_xla.debug.metrics as xla_metrics
from torch import Tensor

from shardtorch.engine import _contract
from shardtorch.engine.torch_xla import _annotate, _kernel, _placement, _scan, _start, _trace
from shardtorch.engine.torch_xla._ops import PartitionedOps, in_order
from shardtorch.errors import ShardingError
from shardtorch.mesh import NamedSharding


class TorchXlaEngine(_contract.Engine):
    """GSPMD through torch_xla. Tensors are lazy: they are computed when a compiled step returns, or at `sync`."""

    name = "torch_xla"

    def __init__(self) -> None:
        self.device = torch_xla.device()
        self._inventory = _start.inventory()  # once: on a TPU VM it asks the metadata server

    def inventory(self) -> _contract.Inventory:
        return self._inventory

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding, read: _contract.ReadShard
    ) -> Tensor:
        return _placement.materialize(shape, dtype, sharding, read)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding) -> Tensor:
        return _placement.zeros(shape, dtype, sharding)

    def constrain(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        if x.device.type != "xla":
            raise ShardingError(
                "only a tensor on the engine's device can be annotated.",
                got=f"a tensor on {x.device}",
                fix="move it with .to('xla') first, or use fully_shard for a whole module.",
            )
        sharding.validate(tuple(x.shape))
        return _annotate.constrain(x, sharding)

    def in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        for number, x in enumerate(tensors):
            if x.device.type != "xla":
                raise ShardingError(
                    "an order is kept of tensors on the engine's device.",
                    got=f"tensor {number}: shape {tuple(x.shape)} on {x.device}",
                    fix="move it there with .to(engine.device).",
                )
        return in_order([x.detach() for x in tensors])

    def annotate(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        traced = _trace.is_tracing() or type(x) not in (Tensor, torch.nn.Parameter)
        if traced or x.device.type != "xla" or not _is_leaf(x):
            return self.constrain(x, sharding)
        sharding.validate(tuple(x.shape))
        _annotate.place(x, sharding)
        return x

    def put(self, part: Tensor, sharding: NamedSharding, global_shape: Sequence[int]) -> Tensor:
        return _placement.put(part, sharding, global_shape)

    def scan(
        self,
        body: _contract.LayerBody,
        x: Tensor,
        weights: Mapping[str, Tensor],
        constants: Sequence[Tensor],
        *,
        remat: bool,
    ) -> Tensor:
        return _scan.scan(body, x, weights, constants, remat=remat)

    def call_kernel(self, kernel: _contract.Kernel, tensors: Sequence[Tensor]) -> list[Tensor]:
        return _kernel.call_kernel(kernel, tensors, self.inventory().platform)

    def compile(
        self, step: Callable[_contract.Arguments, _contract.Result]
    ) -> Callable[_contract.Arguments, _contract.Result]:
        # Virtual CPU devices share the host's threads. With two graphs under way, collectives of one can hold all
        # threads while they wait for devices that the other keeps, until XLA ends the process (torch_xla 2.9.0).
        wait = self.inventory().platform == "cpu"

        @wraps(step)
        def run(*args: _contract.Arguments.args, **kwargs: _contract.Arguments.kwargs) -> _contract.Result:
            with PartitionedOps():
                out = step(*args, **kwargs)
            _trace.sync(wait=wait)
            return out

        return run

    def local_shards(self, x: Tensor, sharding: NamedSharding) -> list[_contract.Shard]:
        return _placement.local_shards(x, sharding)

    def sharding_of(self, x: Tensor) -> str:
        return _annotate.sharding_of(x)

    def num_compiles(self) -> int:
        data = xla_metrics.metric_data("CompileTime")
        return data[0] if data else 0

    def sync(self) -> None:
        _trace.sync(wait=True)


def _is_leaf(x: Tensor) -> bool:
    """Whether an XLA tensor is data to cut up in place. Without grad mode, autograd calls every value a leaf."""
    if isinstance(x, torch.nn.Parameter) or _annotate.is_data(x):
        return x.is_leaf
    return x.is_leaf and torch.is_grad_enabled()
