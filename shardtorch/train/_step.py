"""One training step and one evaluation step, as plain functions of tensors."""

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from shardtorch.train._optim import set_learning_rate

TrainStep = Callable[[Tensor, Tensor, Tensor], Tensor]
EvalStep = Callable[[Tensor, Tensor], Tensor]


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    clip_norm: float,
    loss_chunks: int,
    microbatches: int = 1,
) -> TrainStep:
    """The step: forward, loss, backward, clipping, update.

    Everything that changes from step to step is an argument, so that the step compiles once.

    Args:
      model: Called as `model(tokens, targets, loss_chunks=...)`, gives the mean loss.
      optimizer: Over the model's parameters; updated in place, like them.
      clip_norm: Largest global L2 norm that the gradient keeps.
      loss_chunks: In how many pieces the loss is computed.
      microbatches: In how many parts the batch goes through the model, one after the other, to save memory; a divisor
        of the batch. The graph grows with them.

    Returns:
      `step(tokens, targets, lr) -> [loss, grad_norm]`: float32, before the update and before clipping.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def step(
        tokens: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"], lr: Float[Tensor, ""]
    ) -> Float[Tensor, "2"]:
        set_learning_rate(optimizer, lr)
        # A part takes every n-th row, so that each device has its share of every part.
        parts = [rearrange(x, "(batch n) seq -> n batch seq", n=microbatches) for x in (tokens, targets)]
        losses = []
        for part in zip(*parts, strict=True):
            loss = model(*part, loss_chunks=loss_chunks) / microbatches
            loss.backward()
            losses.append(loss.detach())
        grads = [p.grad for p in parameters if p.grad is not None]  # a frozen parameter has none
        grad_norm = torch.nn.utils.get_total_norm(grads, foreach=False)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, grad_norm, foreach=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack([torch.stack(losses).sum(), grad_norm]).float()

    return step


def make_eval_step(model: nn.Module, *, loss_chunks: int) -> EvalStep:
    """`eval_step(tokens, targets)`: summed negative log-likelihood of the targets, in nats, a float32 scalar."""

    @torch.no_grad()
    def eval_step(tokens: Int[Tensor, "batch seq"], targets: Int[Tensor, "batch seq"]) -> Float[Tensor, ""]:
        return model(tokens, targets, loss_chunks=loss_chunks, reduction="sum").float()

    return eval_step
