"""Optimizer state that carries its parameter's sharding, from before the first step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardtorch.errors import ShardingError
from shardtorch.fsdp._fully_shard import Placement, placement
from shardtorch.fsdp._read import read_tensor
from shardtorch.mesh import NamedSharding, P

_HOW = ("capturable", "foreach", "fused")
"""Settings of an optimizer that say how it computes, and not what: they belong to this run, not to what is loaded."""


def shard_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Makes the moments of an Adam optimizer, sharded as their parameters.

    Left to its first step, the optimizer would make them inside the graph: a second compile, and a step in which every
    moment may be whole on every device. From now on, `optimizer.load_state_dict` places what it loads shard by shard,
    and leaves `capturable`, `foreach` and `fused` as they are.

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
    shardings = {parameter: where.parameters[name] for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = _state(parameter, shardings[parameter], group["amsgrad"], {}, where)

    def place(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any] | None:
        # Before torch's own pass, which would put whole tensors on the device; it takes what is there already as it is.
        pairs = list(zip(loaded["param_groups"], optimizer.param_groups, strict=False))
        if len(loaded["param_groups"]) != len(optimizer.param_groups) or any(
            len(saved["params"]) != len(group["params"]) for saved, group in pairs
        ):
            return None  # which torch refuses
        state = {
            number: _state(
                parameter, shardings[parameter], saved.get("amsgrad", False), loaded["state"].get(number, {}), where
            )
            for saved, group in pairs
            for number, parameter in zip(saved["params"], group["params"], strict=True)
        }
        groups = [saved | {key: group[key] for key in _HOW} for saved, group in pairs]
        return loaded | {"state": state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(place)
    return optimizer


def _state(
    parameter: Tensor, sharding: NamedSharding, amsgrad: bool, saved: Mapping[str, Any], where: Placement
) -> dict[str, Tensor]:
    """The state of one parameter on the devices: what is saved of it, and zeros for the rest.

    Raises:
      ShardingError: What is saved is not Adam's state of such a parameter.
    """
    moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    state = {"step": (torch.Size(), torch.float32, NamedSharding(where.mesh, P()))}
    state |= dict.fromkeys(moments, (parameter.shape, parameter.dtype, sharding))
    values = {key: torch.as_tensor(value) for key, value in saved.items()}
    for key, value in values.items():
        if key not in state or value.shape != state[key][0]:
            raise ShardingError(
                "the state that is loaded must be that of the same optimizer over the same parameters.",
                got=f"{key} of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}",
                fix="load what such an optimizer's state_dict() gave, its parameters stacked and grouped alike.",
            )
    engine = where.engine
    return {
        key: engine.materialize(shape, dtype, to, read_tensor(values[key]))
        if key in values
        else engine.zeros(shape, dtype, to)
        for key, (shape, dtype, to) in state.items()
    }
