"""Initial values as data: what fills a parameter, without the parameter.

A tensor that is held by shards is never whole on a host, so a model says only from which distribution a parameter
comes; whoever holds the shards fills them. `shardtorch.fsdp` has classes of the same names for users' own models:
this package imports torch only, and the two agree by shape alone (a method `fill_`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normal:
    """Independent draws from a normal distribution of mean 0."""

    std: float
    """Standard deviation."""

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Draws a part of the parameter in place."""
        return x.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float
    """That value."""

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Fills a part of the parameter in place; draws nothing."""
        return x.fill_(self.value)
