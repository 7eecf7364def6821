"""Parameters stored in one dtype and used in another."""

import torch
from torch import nn


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Makes a module's own parameters read as `dtype`; optimizers and state dicts still see what is stored.

    `module.weight` becomes a property of a subclass made for this module. The cast is part of the graph, before the
    gather, so that parameters travel in `dtype`; gradients come back in the stored dtype.
    """
    names = [n for n, p in module._parameters.items() if p is not None and p.is_floating_point()]
    if not names:
        return

    def cast(name: str) -> property:
        return property(lambda self: self._parameters[name].to(dtype))

    module.__class__ = type(type(module).__name__, (type(module),), {name: cast(name) for name in names})
