"""Initial values by shard: a draw depends on the seed, the parameter's name and the place in it, not on the mesh."""

import difflib
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shardtorch.engine import Index, ReadShard
from shardtorch.errors import ShardingError
from shardtorch.mesh import matches

BLOCK = 1024
"""Elements that are drawn together. More would draw what a device does not hold; fewer, seed a generator too often."""


@runtime_checkable
class Initializer(Protocol):
    """What a parameter starts as. Elements are independent: none knows its place, or the shape of the parameter."""

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Fills a part of the parameter in place.

        Args:
          x: A float32 vector on the CPU, of at most 1024 elements.
          generator: All randomness comes from it.

        Returns:
          `x`.
        """
        ...


@dataclass(frozen=True)
class Normal(Initializer):
    """Independent draws from a normal distribution of mean 0."""

    std: float
    """Standard deviation."""

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Independent draws from between `-bound` and `bound`."""

    bound: float
    """The largest absolute value."""

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x.uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True)
class Constant(Initializer):
    """The same value everywhere."""

    value: float
    """That value."""

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x.fill_(self.value)


_KEPT_BLOCKS = 4096  # of a parameter, up to 16 MiB: the boxes of several devices touch the same blocks


def read_initial(initializer: Initializer, seed: int, name: str, shape: torch.Size) -> ReadShard:
    """Draws boxes of a parameter, block by block, each block from a generator of its own.

    A block is 1024 elements of a row, and a row is one index of dim 0, flat; a vector is one row. Of a row, only the
    blocks that a box touches are drawn.

    Args:
      initializer: What to draw.
      seed: Of the run.
      name: The parameter's name, which gives each parameter its own draws.
      shape: Global shape.
    """
    row_shape = tuple(shape[1:] if len(shape) > 1 else shape)
    row_size = math.prod(row_shape)

    @lru_cache(maxsize=_KEPT_BLOCKS)
    def draw(row: int, block: int) -> Tensor:
        key = hashlib.blake2b(f"{seed}/{name}/{row}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(key, "little") >> 1)
        size = min(BLOCK, row_size - block * BLOCK)
        return initializer.fill_(torch.empty(size, dtype=torch.float32, device="cpu"), generator)

    def read(index: Index) -> Tensor:
        rows, columns = (index[0], index[1:]) if len(shape) > 1 else (slice(0, 1), index)
        places = _places(columns, row_shape)
        blocks, order = torch.unique(places // BLOCK, return_inverse=True)
        places = order * BLOCK + places % BLOCK  # within the blocks that are drawn, of which only the last can be short
        wanted = blocks.tolist()
        drawn = torch.stack([torch.cat([draw(row, b) for b in wanted]) for row in range(rows.start, rows.stop)])
        return drawn[:, places] if len(shape) > 1 else drawn[0, places]

    return read


def _places(index: Index, shape: tuple[int, ...]) -> Tensor:
    """Where the elements of a box lie in a flat tensor of that shape."""
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for dim, size in zip(index, shape, strict=True):
        places = places[..., None] * size + torch.arange(dim.start, dim.stop, device="cpu")
    return places


def default_initializer(module: nn.Module, parameter: str, name: str) -> Initializer:
    """What torch itself starts this parameter of a standard module with.

    Raises:
      ShardingError: The module is none of torch's standard ones, or starts or has parameters of its own.
    """
    if parameter in ("weight", "bias"):  # and not what a subclass adds, or starts in its own way
        start = getattr(type(module), "reset_parameters", None)
        if isinstance(module, nn.Linear) and start is nn.Linear.reset_parameters:
            return Uniform(module.in_features**-0.5)  # kaiming_uniform_ with a = sqrt(5), and the bias's bound
        if start is nn.Embedding.reset_parameters:
            return Normal(1.0)
        if start in (nn.LayerNorm.reset_parameters, nn.RMSNorm.reset_parameters, nn.GroupNorm.reset_parameters):
            return Constant(1.0 if parameter == "weight" else 0.0)
    raise ShardingError(
        f"{name}: a parameter on the meta device needs a rule for its initial value.",
        got=f"a parameter of a {type(module).__name__}, for which there is no default",
        fix=f"pass init={{{name!r}: ...}} to fully_shard, or build the model on the CPU.",
    )


def check_rules(init: Mapping[str, Initializer], parameters: Mapping[str, Tensor]) -> None:
    """Checks rules for initial values before any is used.

    Raises:
      ShardingError: With the pattern of a rule that is none, that names no parameter, or that is for one with values.
    """
    for pattern, initializer in init.items():
        if not isinstance(initializer, Initializer) or isinstance(initializer, type | Tensor):  # which have a fill_
            raise ShardingError(
                f"init pattern {pattern!r}: an initial value is an object with a method fill_(x, generator).",
                got=f"{initializer!r}",
                fix="use shardtorch.fsdp.Normal, Uniform or Constant, or write a class like them.",
            )
        if not any(matches(pattern, name) for name in parameters):
            close = difflib.get_close_matches(pattern, parameters, n=1)
            raise ShardingError(
                f"init pattern {pattern!r} matches nothing.",
                got=f"{len(parameters)} parameters, such as {', '.join(list(parameters)[:3]) or 'none'}",
                fix=f"did you mean {close[0]!r}?" if close else "correct the pattern, or remove it.",
            )
    for name, parameter in parameters.items():
        if not parameter.is_meta and (pattern := _first_match(init, name)) is not None:
            raise ShardingError(
                f"{name}: only a parameter on the meta device takes an initial value; this one has values already.",
                got=f"init pattern {pattern!r}, a parameter on {parameter.device}",
                fix="build the model under torch.device('meta'), or leave it out of init to keep its values.",
            )


def find_initializer(init: Mapping[str, Initializer], name: str) -> Initializer | None:
    """The first rule whose pattern matches."""
    pattern = _first_match(init, name)
    return None if pattern is None else init[pattern]


def _first_match(init: Mapping[str, Initializer], name: str) -> str | None:
    return next((pattern for pattern in init if matches(pattern, name)), None)
