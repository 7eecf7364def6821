"""How a stored parameter becomes the one that is used: cast, then gathered over the FSDP axes."""

import threading
from collections.abc import Mapping
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


class Forwards:
    """The forwards of one sharded model and of its parts: whether one runs in this thread, and what came in between."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._handed_out: dict[Tensor, tuple[Use, int]] = {}

    @property
    def depth(self) -> int:
        """How many are under way, one within the other."""
        return getattr(self._local, "depth", 0)

    def enter(self) -> None:
        """A forward starts."""
        if self.depth == 0:
            # A change in place through a view, such as `weight[0] = 0`, may have lost the sharding (torch_xla 2.9.0).
            for parameter, (use, version) in self._handed_out.items():
                if parameter._version != version:
                    use.engine.annotate(parameter, use.stored)
                    self._handed_out[parameter] = use, parameter._version
        self._local.depth = self.depth + 1

    def leave(self) -> None:
        """A forward ends."""
        self._local.depth = self.depth - 1

    def read(self, parameter: Tensor, use: Use) -> Tensor:
        """What code that reads a parameter gets."""
        if self.depth:
            return use(parameter)
        self._handed_out.setdefault(parameter, (use, parameter._version))
        return parameter


def read_in_forward(module: nn.Module, uses: Mapping[str, Use], forwards: Forwards) -> None:
    """Makes a module's own parameters read as they are used while a forward runs, and as they are stored otherwise.

    `module.weight` becomes a property of a subclass that is made for this module. It is the whole model's forward that
    counts, as the code of one module may read the parameters of another.

    Args:
      module: Changed in place.
      uses: By name of the parameter within the module; none for a module that has only those of its children.
      forwards: Shared by the modules of the model.
    """
    cls = type(module)

    def call(self: nn.Module, *args, **kwargs):
        forwards.enter()
        try:
            return cls.__call__(self, *args, **kwargs)
        finally:
            forwards.leave()

    def reading(name: str, use: Use) -> property:
        return property(lambda self: forwards.read(self._parameters[name], use))

    members = {"__call__": call} | {name: reading(name, use) for name, use in uses.items()}
    module.__class__ = type(cls.__name__, (cls,), members)
