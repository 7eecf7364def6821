"""`LibtpuEngine`: a TPU slice that isn't there. Tensors are placeholders, and a step can be lowered but not run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor, nn

from shardtorch.engine import _contract
from shardtorch.engine.torch_xla import _lower
from shardtorch.engine.torch_xla._engine import TorchXlaEngine
from shardtorch.errors import EngineUnavailableError, ShardingError
from shardtorch.mesh import NamedSharding, SliceTopology

_XLAC = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]


class LibtpuEngine(TorchXlaEngine):
    """The devices of a named topology, for tracing a step as it would run there.

    Args:
      topology: The slices.
    """

    name = "libtpu"

    def __init__(self, topology: SliceTopology) -> None:
        super().__init__()
        self.topology = topology
        self._inventory = _contract.Inventory("tpu", topology.generation, topology.num_devices, 0, 1)
        self._shardings: dict[int, NamedSharding] = {}
        """By torch_xla's number of the tensor, which aliases share."""

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding, read: _contract.ReadShard
    ) -> Tensor:
        return self.zeros(shape, dtype, sharding)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding) -> Tensor:
        sharding.validate(tuple(shape))
        x = xb.create_placeholder_tensor(list(shape), dtype)
        self._shardings[_XLAC._xla_get_tensor_id(x)] = sharding
        return x

    def put(self, part: Tensor, sharding: NamedSharding, global_shape: Sequence[int]) -> Tensor:
        _contract.check_part(part, global_shape, 1)
        return self.zeros(global_shape, part.dtype, sharding)

    def annotate(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        if x.device.type == "xla" and self.declared(x) is not None:
            sharding.validate(tuple(x.shape))
            self._shardings[_XLAC._xla_get_tensor_id(x)] = sharding
            return x
        return self.constrain(x, sharding)

    def declared(self, x: Tensor) -> NamedSharding | None:
        """The sharding of a placeholder that this engine made; None for any other tensor."""
        return self._shardings.get(_XLAC._xla_get_tensor_id(x)) if x.device.type == "xla" else None

    def sharding_of(self, x: Tensor) -> str:
        sharding = self.declared(x)
        return "" if sharding is None else str(sharding.tile_assignment(x.ndim))

    def lower(
        self,
        step: Callable[..., Any],
        arguments: Sequence[Tensor],
        state: Mapping[str, Tensor],
        modules: Mapping[nn.Module, str] | None = None,
    ) -> _contract.Lowered:
        """Traces a step, and leaves its state as it was.

        Args:
          step: Called once with `arguments`; may update the state in place.
          arguments: Placeholders of this engine, made by `put` or `zeros`.
          state: Placeholders that the step reads and updates, by name.
          modules: Paths of the modules whose names operations should carry.

        Raises:
          ShardingError: A tensor is no placeholder of this engine.
          ShardtorchError: The step reads a value, or neither returns nor updates anything.
        """
        shardings: dict[str, NamedSharding] = {}
        for name, x in [*state.items(), *((f"argument {n}", x) for n, x in enumerate(arguments))]:
            sharding = self.declared(x) if isinstance(x, Tensor) else None
            if sharding is None:
                raise ShardingError(
                    f"{name}: what a planned step works on must be made by its engine, without data.",
                    got=f"a tensor of shape {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else repr(x),
                    fix="shard the model with fully_shard after start('libtpu', topology=...), and make the batch with "
                    "engine.zeros(shape, dtype, sharding).",
                )
            shardings[name] = sharding
        try:
            return _lower.lower(step, arguments, state, shardings, modules or {})
        finally:
            for name, x in state.items():  # what the step updated is another placeholder now
                self._shardings[_XLAC._xla_get_tensor_id(x)] = shardings[name]

    def compile(self, step: Callable[..., Any]) -> NoReturn:
        raise self._no_devices("a step to run")

    def local_shards(self, x: Tensor, sharding: NamedSharding) -> NoReturn:
        raise self._no_devices("a tensor to read")

    def sync(self) -> NoReturn:
        raise self._no_devices("pending work to run")

    def _no_devices(self, got: str) -> EngineUnavailableError:
        return EngineUnavailableError(
            f"{self.topology} is planned for: there are no devices that could run anything.",
            got=got,
            fix="compile a report of the step with shardtorch.aot.compile_report, or start the engine 'torch_xla' to "
            "run it.",
        )
