"""How a stored parameter becomes the one that is used: cast, then gathered over the FSDP axes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.mesh import NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Use:
    """The way from storage to use.

    Left to itself, the partitioner may compute with a parameter as it is stored, and send activations around in its
    place: far more traffic. So the gather is spelled out; its gradient is a sum over the batch that is then cut up,
    which is a reduce-scatter.
    """

    engine: Engine
    stored: NamedSharding
    axes: tuple[str, ...]
    """Mesh axes to gather over."""
    dtype: torch.dtype | None
    """What to compute in; None leaves the stored dtype. The cast comes first, so that parameters travel in it."""

    def __call__(self, weight: Tensor) -> Tensor:
        """The parameter as it is used; its gradient goes the same way back."""
        if self.stored.spec.axes:
            weight = self.engine.constrain(weight, self.stored)
        if self.dtype is not None and weight.is_floating_point():
            weight = weight.to(self.dtype)
        if set(self.axes) & set(self.stored.spec.axes):
            weight = self.engine.constrain(weight, without(self.stored, self.axes))
        return weight


def without(sharding: NamedSharding, axes: tuple[str, ...]) -> NamedSharding:
    """The sharding after a gather over some axes."""
    entries = (
        tuple(axis for axis in sharding.spec.axes_of(dim) if axis not in axes) for dim in range(len(sharding.spec))
    )
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def read_as(module: nn.Module, name: str, use: Callable[[Tensor], Tensor]) -> None:
    """Makes a module's own parameter read as it is used; optimizers and state dicts still see what is stored.

    `module.weight` becomes a property of a subclass that is made for this module.

    Args:
      module: Changed in place.
      name: Of the parameter.
      use: Gives what is used for what is stored.
    """
    reading = property(lambda self: use(self._parameters[name]))
    module.__class__ = type(type(module).__name__, (type(module),), {name: reading})
