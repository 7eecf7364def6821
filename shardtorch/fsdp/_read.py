"""Where the values of a stored tensor come from: boxes of it, on the CPU."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardtorch.engine import Index, ReadShard
from shardtorch.fsdp._initial import Initializer, default_initializer, find_initializer, read_initial


def read_tensor(source: Tensor) -> ReadShard:
    """Boxes of a tensor that has values."""
    return lambda index: source.detach()[index].cpu()


def read_stack(reads: Sequence[ReadShard]) -> ReadShard:
    """Boxes of a stack, dim 0 of which counts `reads`."""

    def read(index: Index) -> Tensor:
        layers, *rest = index
        return torch.stack([reads[layer](tuple(rest)) for layer in range(layers.start, layers.stop)])

    return read


def read_parameter(model: nn.Module, name: str, init: Mapping[str, Initializer], seed: int) -> ReadShard:
    """Boxes of a parameter: its values, or on the meta device its initial values.

    Raises:
      ShardingError: It has neither values nor a rule for its initial values.
    """
    owner, _, short_name = name.rpartition(".")
    module = model.get_submodule(owner)
    source = module.get_parameter(short_name)
    if not source.is_meta:
        return read_tensor(source)
    if (initializer := find_initializer(init, name)) is not None:
        return read_initial(initializer, seed, name, source.shape)
    read = read_initial(default_initializer(module, short_name, name), seed, name, source.shape)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        return _zero_row(read, module.padding_idx)
    return read


def _zero_row(read: ReadShard, row: int) -> ReadShard:
    """The same boxes, in which one index of dim 0 is zero."""

    def read_zeroed(index: Index) -> Tensor:
        box = read(index)
        if index[0].start <= row < index[0].stop:
            box[row - index[0].start] = 0.0
        return box

    return read_zeroed
