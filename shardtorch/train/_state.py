"""Everything that a checkpoint restores."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardtorch.errors import CheckpointError
from shardtorch.fsdp import placement
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

        A stack of layers has `*` for the layer in its name.
        """
        where = placement(self.model)
        replicated = NamedSharding(where.mesh, P())
        tensors = {}
        for name, parameter in self.model.named_parameters():
            sharding = where.parameters[name]
            tensors[f"model.{name}"] = Placed(parameter.detach(), sharding)
            for key, value in self.optimizer.state[parameter].items():
                # The count of updates is one number for a whole stack, so its name must not promise one per layer.
                if value.ndim == 0:
                    tensors[f"optimizer.{key}.{name.replace('*', 'all')}"] = Placed(value, replicated)
                else:
                    tensors[f"optimizer.{key}.{name}"] = Placed(value, sharding)
        return tensors

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
        tensors, extra = load_checkpoint(path, self.tensors(), placement(self.model).engine)
        if not isinstance(extra.get("step"), int):
            raise CheckpointError(
                f"{path}: a checkpoint of a training run must name its step.",
                got=f"step={extra.get('step')!r}",
                fix="use a checkpoint that shardtorch train has written.",
            )
        for name, parameter in self.model.named_parameters():
            parameter.data = tensors[f"model.{name}"]
            state = self.optimizer.state[parameter]
            for key, value in state.items():
                state[key] = tensors[f"optimizer.{key}.{name.replace('*', 'all') if value.ndim == 0 else name}"]
        self.step = extra["step"]
        return extra
