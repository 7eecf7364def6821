"""Initial values by shard: a draw depends on the seed, the parameter's name and the row, not on the mesh."""

import difflib
import hashlib
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from shardtorch.engine import Index, ReadShard
from shardtorch.errors import ShardingError
from shardtorch.mesh import matches


class Initializer(Protocol):
    """What a parameter starts as."""

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Fills a part of the parameter in place."""
        ...


class _Uniform:
    def __init__(self, bound: float) -> None:
        self.bound = bound

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x.uniform_(-self.bound, self.bound, generator=generator)


class _Normal:
    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x.normal_(generator=generator)


class _Constant:
    def __init__(self, value: float) -> None:
        self.value = value

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x.fill_(self.value)


def read_initial(initializer: Initializer, seed: int, name: str, shape: torch.Size) -> ReadShard:
    """Draws boxes of a parameter, row by row of dim 0, each row from a generator of its own.

    Args:
      initializer: What to draw.
      seed: Of the run.
      name: The parameter's name, which gives each parameter its own draws.
      shape: Global shape. One row, `shape[1:]`, is drawn whole, in float32; a vector is one row.
    """

    def row(number: int, row_shape: tuple[int, ...]) -> Tensor:
        key = hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(key, "little") >> 1)
        return initializer.fill_(torch.empty(row_shape, dtype=torch.float32, device="cpu"), generator)

    def read(index: Index) -> Tensor:
        if len(shape) < 2:
            return row(0, tuple(shape))[index]
        rows, *rest = index
        return torch.stack([row(number, tuple(shape[1:]))[tuple(rest)] for number in range(rows.start, rows.stop)])

    return read


def default_initializer(module: nn.Module, parameter: str, name: str) -> Initializer:
    """What torch itself starts this parameter of a standard module with.

    Raises:
      ShardingError: The module is none of torch's standard ones, or starts or has parameters of its own.
    """
    if parameter in ("weight", "bias"):  # and not what a subclass adds, or starts in its own way
        start = getattr(type(module), "reset_parameters", None)
        if isinstance(module, nn.Linear) and start is nn.Linear.reset_parameters:
            return _Uniform(module.in_features**-0.5)  # kaiming_uniform_ with a = sqrt(5), and the bias's bound
        if start is nn.Embedding.reset_parameters:
            return _Normal()
        if start in (nn.LayerNorm.reset_parameters, nn.RMSNorm.reset_parameters, nn.GroupNorm.reset_parameters):
            return _Constant(1.0 if parameter == "weight" else 0.0)
    raise ShardingError(
        f"{name}: a parameter on the meta device needs a rule for its initial value.",
        got=f"a parameter of a {type(module).__name__}, for which there is no default",
        fix=f"pass init={{{name!r}: ...}} to fully_shard, or build the model on the CPU.",
    )


def check_rules(init: Mapping[str, Initializer], names: Collection[str]) -> None:
    """Raises for a rule that names no parameter.

    Raises:
      ShardingError: With the pattern.
    """
    for pattern in init:
        if not any(matches(pattern, name) for name in names):
            close = difflib.get_close_matches(pattern, names, n=1)
            raise ShardingError(
                f"init pattern {pattern!r} matches nothing.",
                got=f"{len(names)} parameters, such as {', '.join(list(names)[:3]) or 'none'}",
                fix=f"did you mean {close[0]!r}?" if close else "correct the pattern, or remove it.",
            )


def find_initializer(init: Mapping[str, Initializer], name: str) -> Initializer | None:
    """The first rule whose pattern matches."""
    return next((initializer for pattern, initializer in init.items() if matches(pattern, name)), None)
