"""AdamW, and the learning rate as a function of the step."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from shardtorch.errors import ConfigError
from shardtorch.fsdp import layer_ndim, placement, shard_optimizer


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then half a cosine down to a fraction of the peak (arXiv:1608.03983, without restarts)."""

    peak: float
    """Highest learning rate."""
    warmup_steps: int
    """Steps that climb to the peak, in updates."""
    decay_steps: int
    """Length of the whole schedule, warm-up included, in updates."""
    final_fraction: float = 0.1
    """What is left of the peak at the end."""

    def __post_init__(self) -> None:
        if not (0 <= self.warmup_steps < self.decay_steps and self.peak > 0 and 0 <= self.final_fraction <= 1):
            raise ConfigError(
                "the warm-up must be shorter than the schedule, the peak positive, and the final fraction in 0..1.",
                got=f"{self}",
                fix="use, for example, peak=3e-3, warmup_steps=20, decay_steps=300, final_fraction=0.1.",
            )

    def __call__(self, step: int) -> float:
        """Learning rate of an update.

        Args:
          step: The update's number, from 1; at most `decay_steps`.

        >>> schedule = Schedule(peak=1.0, warmup_steps=2, decay_steps=10, final_fraction=0.1)
        >>> [round(schedule(step), 3) for step in (1, 2, 6, 10)]
        [0.5, 1.0, 0.55, 0.1]
        """
        assert 1 <= step <= self.decay_steps, f"step {step} of a schedule of {self.decay_steps}"
        if step <= self.warmup_steps:
            return self.peak * (step / self.warmup_steps)
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * cosine)


def adamw(
    model: nn.Module, *, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8, weight_decay: float = 0.1
) -> torch.optim.AdamW:
    """torch's AdamW (arXiv:1711.05101) over a sharded model, its moments sharded as the parameters.

    Matrices decay, vectors (norm weights, biases) don't. The learning rate is a tensor that `set_learning_rate` puts
    in, so that changing it compiles nothing.

    Args:
      model: Placed by `fully_shard`.
      beta1: Decay of the first moment.
      beta2: Decay of the second moment.
      eps: Added to the root of the second moment.
      weight_decay: Per update, times the learning rate.
    """
    where = placement(model)
    matrices = [p for name, p in model.named_parameters() if layer_ndim(name, p) >= 2]
    vectors = [p for name, p in model.named_parameters() if layer_ndim(name, p) < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=torch.tensor(0.0),
        betas=(beta1, beta2),
        eps=eps,
        foreach=False,  # one loop over the few stacks; torch has no fused kernels for XLA
        capturable=where.engine.device.type != "cpu",
    )
    shard_optimizer(optimizer, model)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: torch.Tensor) -> None:
    """Makes the next update use `lr`, a 0-d float32 tensor on the engine's device."""
    for group in optimizer.param_groups:
        group["lr"] = lr
