"""Everything that a checkpoint restores."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardtorch.errors import CheckpointError
from shardtorch.fsdp import Placement, layer_ndim, placement
from shardtorch.mesh import NamedSharding, P
from shardtorch.train._checkpoint import Placed, load_checkpoint, save_checkpoint


@dataclass
class TrainState:
    """A run between two steps.

    The position in the data is the step, since batch k is a pure function of the data's seed and k; a step draws no
    random numbers, so there is no random state.
    """

    step: int
    """Updates done so far: step k is the state after k updates."""
    model: nn.Module
    """Placed by `fully_shard`."""
    optimizer: torch.optim.Optimizer
    """Its state exists already: see `fsdp.shard_optimizer`."""

    def tensors(self) -> dict[str, Placed]:
        """Every tensor of the state: `model.NAME`, and `optimizer.KEY.NAME` for the state of each parameter.

        A stack of layers has `*` for the layer in its name, and stands for one tensor per layer. The optimizer counts
        the updates of a stack once; here every layer has its count, as if the layers were not stacked.
        """
        where = placement(self.model)
        replicated = NamedSharding(where.mesh, P())
        tensors = {}
        for name, parameter in self.model.named_parameters():
            sharding = where.parameters[name]
            tensors[f"model.{name}"] = Placed(parameter.detach(), sharding)
            for key, value in self.optimizer.state[parameter].items():
                if value.ndim == 0:
                    layers = parameter.shape[: parameter.ndim - layer_ndim(name, parameter)]
                    placed = Placed(_reshaped(value, layers, where), replicated)
                else:
                    placed = Placed(value, sharding)
                tensors[f"optimizer.{key}.{name}"] = placed
        buffers = {f"model.{name}": Placed(buffer, replicated) for name, buffer in self.model.named_buffers()}
        return tensors | buffers

    def save(self, directory: Path, extra: Mapping[str, Any], *, keep: int | None = None) -> Path:
        """Writes a checkpoint of this step under `directory`; see `save_checkpoint`."""
        return save_checkpoint(
            directory, self.step, self.tensors(), {**extra, "step": self.step}, placement(self.model).engine, keep=keep
        )

    def restore(self, path: Path) -> dict[str, Any]:
        """Takes the place of the state in a checkpoint, which may be of another mesh.

        Returns:
          What was saved beside the tensors.

        Raises:
          CheckpointError: Damaged, or of another model or optimizer.
        """
        where = placement(self.model)
        tensors, extra = load_checkpoint(path, self.tensors(), where.engine)
        step = extra.get("step")
        if not isinstance(step, int):
            raise CheckpointError(
                f"{path}: a checkpoint of a training run must name its step.",
                got=f"step={step!r}",
                fix="use a checkpoint that shardtorch train has written.",
            )
        for name, parameter in self.model.named_parameters():
            parameter.data = tensors[f"model.{name}"]
            state = self.optimizer.state[parameter]
            for key, value in state.items():
                loaded = tensors[f"optimizer.{key}.{name}"]
                state[key] = _reshaped(loaded, value.shape, where) if value.ndim == 0 else loaded
        for name, buffer in self.model.named_buffers():
            buffer.data = tensors[f"model.{name}"]
        self.step = step
        return extra


def _reshaped(count: Tensor, shape: torch.Size, where: Placement) -> Tensor:
    """A count of updates as one number or as one number per layer, replicated.

    Raises:
      CheckpointError: It was one number per layer, and they differ.
    """
    if count.shape == shape:
        return count
    replicated = NamedSharding(where.mesh, P())
    values = where.engine.local_shards(count, replicated)[0].data.flatten()
    if not bool((values == values[0]).all()):
        raise CheckpointError(
            "the layers of a stack must have been updated equally often.",
            got=f"counts of {values.tolist()}",
            fix="restore into a model without a stack: fully_shard(..., stack=None).",
        )
    return where.engine.materialize(shape, count.dtype, replicated, lambda index: values[0].expand(shape)[index])
