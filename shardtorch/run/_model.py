"""A preset on a mesh: the model on the meta device and its plan."""

import difflib

import torch

from shardtorch.errors import ConfigError
from shardtorch.mesh import AxisRules, Mesh, ShardingPlan
from shardtorch.models import DEFAULT_RULES, PRESETS, Llama, LlamaConfig


def model_config(name: str) -> LlamaConfig:
    """The preset of that name.

    Raises:
      ConfigError: There is none.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        raise ConfigError(
            "the model must be one of the presets.",
            got=repr(name),
            fix=f"did you mean {close[0]}?" if close else f"use one of {', '.join(PRESETS)}.",
        )
    return PRESETS[name]


def build_model(config: LlamaConfig, mesh: Mesh) -> tuple[Llama, ShardingPlan]:
    """The model on the meta device, and its plan by the default rules.

    Raises:
      ShardingError: The mesh has an axis that shards nothing in this model.
    """
    rules = AxisRules(DEFAULT_RULES)
    rules.check(mesh)
    with torch.device("meta"):
        model = Llama(config)
    return model, ShardingPlan.from_logical(model.parameter_axes(), model.activation_axes(), rules, mesh)


def batch_axes(mesh: Mesh) -> tuple[tuple[str, ...] | str | None, ...]:
    """What shards a batch of tokens, `[batch, seq]`, by the default rules."""
    return tuple(AxisRules(DEFAULT_RULES).spec(("batch", "seq"), mesh))
