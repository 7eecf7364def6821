"""Optimizer state that carries its parameter's sharding, from before the first step."""

import torch
from torch import nn

from shardtorch.errors import ShardingError
from shardtorch.fsdp._fully_shard import placement
from shardtorch.mesh import NamedSharding, P


def shard_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Makes the moments of an Adam optimizer, sharded as their parameters.

    Left to its first step, the optimizer would make them inside the graph: a second compile, and a step in which every
    moment may be whole on every device.

    Args:
      optimizer: `torch.optim.Adam` or `AdamW`, fresh, over the parameters of `model`. On an XLA device it must be
        `capturable=True`, so that its step count is part of the graph.
      model: Placed by `fully_shard`.

    Returns:
      The same optimizer.

    Raises:
      ShardingError: Another optimizer, one that has stepped, or a parameter that is not the model's.
    """
    where = placement(model)
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        raise ShardingError(
            "the optimizer must be one whose state is known before its first step.",
            got=type(optimizer).__name__,
            fix="use torch.optim.AdamW or torch.optim.Adam.",
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:  # first what could go wrong, then the changes
        if where.engine.device.type != "cpu" and not group["capturable"]:
            raise ShardingError(
                "the optimizer's step count must be a tensor of the graph.",
                got="capturable=False",
                fix=f"use {type(optimizer).__name__}(..., capturable=True, foreach=False).",
            )
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ShardingError(
                    "every parameter of the optimizer must be one of the sharded model.",
                    got=f"a parameter of shape {tuple(parameter.shape)} that is not",
                    fix="make the optimizer after fully_shard, from model.parameters().",
                )
            if optimizer.state.get(parameter):
                raise ShardingError(
                    "the optimizer must be fresh.", got="one that has stepped", fix="shard it before its first step."
                )
    replicated = NamedSharding(where.mesh, P())
    for group in optimizer.param_groups:
        moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for parameter in group["params"]:
            sharding = where.parameters[names[id(parameter)]]
            optimizer.state[parameter] = {
                "step": where.engine.zeros((), torch.float32, replicated),
                **{m: where.engine.zeros(parameter.shape, parameter.dtype, sharding) for m in moments},
            }
    return optimizer
