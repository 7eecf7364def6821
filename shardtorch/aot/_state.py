"""The state of a step as named tensors, from the models and optimizers that hold it."""

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardtorch.errors import ConfigError

Kind = Literal["parameter", "optimizer", "batch"]


class State:
    """Everything that a step reads and updates.

    Args:
      state: A model, an optimizer, a tensor, or any nesting of tuples, lists and mappings of them. An optimizer's
        tensors are named after the parameters of the models beside it. A name that is taken gets a number.

    Raises:
      ConfigError: Something else is in it.
    """

    def __init__(self, state: Any) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.kinds: dict[str, Kind] = {}
        self.modules: dict[nn.Module, str] = {}
        self._parameters: dict[int, str] = {}
        parts = list(_flat(state, ""))
        for name, part in parts:
            if isinstance(part, nn.Module):
                self._add_module(part)
            elif isinstance(part, Tensor):
                self._add(name or "tensor", part, "batch")
        for _, part in parts:
            if isinstance(part, torch.optim.Optimizer):
                self._add_optimizer(part)

    def _add(self, name: str, tensor: Tensor, kind: Kind) -> str:
        """Adds a tensor under a name that is free, which is returned."""
        names = (name if number == 1 else f"{name} ({number})" for number in itertools.count(1))
        free = next(each for each in names if self.tensors.get(each, tensor) is tensor)
        self.tensors[free] = tensor
        self.kinds[free] = kind
        return free

    def _add_module(self, module: nn.Module) -> None:
        self.modules |= {child: path for path, child in module.named_modules()}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self._parameters[id(tensor)] = self._add(name, tensor, "parameter")

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = self._parameters.get(id(parameter)) or self._add(f"parameter {number}", parameter, "parameter")
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    self._add(f"{name}.{key}", value, "optimizer")


def _flat(state: Any, name: str) -> Any:
    match state:
        case nn.Module() | torch.optim.Optimizer() | Tensor():
            yield name, state
        case Mapping():
            for key, value in state.items():
                yield from _flat(value, str(key))
        case tuple() | list():
            for number, value in enumerate(state):
                yield from _flat(value, f"{name or 'tensor'} {number}")
        case _:
            raise ConfigError(
                "the state of a step is made of modules, optimizers and tensors.",
                got=f"a {type(state).__name__}",
                fix="pass (model, optimizer).",
            )
