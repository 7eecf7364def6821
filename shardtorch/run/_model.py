"""A preset on a mesh: the model on the meta device and its plan."""

import difflib
from typing import Literal

import torch

from shardtorch.engine import Engine
from shardtorch.errors import ConfigError
from shardtorch.mesh import AxisRules, Mesh, NamedSharding, PartitionSpec, ShardingPlan
from shardtorch.models import DEFAULT_RULES, PRESETS, Llama, LlamaConfig
from shardtorch.pallas import FlashAttention, why_not_flash


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
    axes = batch_spec(mesh)
    model.loss.num_groups = (mesh.axis_size(axes.axes_of(0)), mesh.axis_size(axes.axes_of(1)))
    return model, ShardingPlan.from_logical(model.parameter_axes(), model.activation_axes(), rules, mesh)


def parameter_shardings(config: LlamaConfig, mesh: Mesh) -> dict[str, tuple[tuple[int, ...], NamedSharding]]:
    """Global shape and sharding of each parameter; one layer, with the number `*`, stands for all.

    Raises:
      ShardingError: The plan does not fit the mesh.
    """
    model, plan = build_model(config, mesh)
    shapes = {
        name.replace("layers.0.", "layers.*."): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if not name.startswith("layers.") or name.startswith("layers.0.")
    }
    return {name: (shapes[name], sharding) for name, sharding in plan.resolve(shapes, mesh).items()}


def check_seq_len(name: str, config: LlamaConfig, seq_len: int) -> None:
    """Checks that a model can read so many tokens.

    Raises:
      ConfigError: It can't.
    """
    if seq_len > config.max_seq_len:
        raise ConfigError(
            f"{name} reads at most {config.max_seq_len} tokens.",
            got=f"seq_len={seq_len}",
            fix=f"use --seq-len {config.max_seq_len}.",
        )


def fit_to_engine(
    model: Llama, mesh: Mesh, engine: Engine, seq_len: int, how: Literal["auto", "flash", "torch"]
) -> str:
    """Puts the attention that is asked for into every layer, and tells the loss how to keep its chunks apart.

    Args:
      model: On the meta device.
      mesh: Bound.
      engine: Where it will run.
      seq_len: Of the training sequences.
      how: `flash` is the kernel, `torch` torch's own op, and `auto` the kernel on TPUs where it fits.

    Returns:
      What was chosen, and why if it isn't the kernel, in words.

    Raises:
      ConfigError: `flash` is asked for and does not fit.
    """
    model.loss.in_order = engine.in_order
    spec = AxisRules(DEFAULT_RULES).spec(("batch", "heads", "seq", None), mesh)
    reason = why_not_flash(seq_len, model.config.head_dim, model.config.num_kv_heads, mesh, spec)
    if how == "flash" and reason is not None:
        raise ConfigError(
            "the flash attention kernel must fit the model and the mesh.", got=reason, fix="use --attention auto."
        )
    if how == "torch":
        return "torch's attention, as asked"
    if how == "auto" and engine.inventory().platform != "tpu":
        return "torch's attention: kernels are for TPUs"
    if reason is not None:
        return f"torch's attention, as {reason}"
    for layer in model.layers:
        layer.attention.attend = FlashAttention(mesh, spec, engine)  # pyright: ignore[reportAttributeAccessIssue]
    return "the flash attention kernel"


def loss_chunks(seq_len: int, vocab_size: int, per_device: int = 1) -> int:
    """The fewest chunks that keep the logits at 512 MiB of float32.

    Args:
      seq_len: Tokens of a sequence.
      vocab_size: Logits of a token.
      per_device: Sequences that a device has at once.
    """
    divisors = (n for n in range(1, seq_len + 1) if seq_len % n == 0)
    return next((n for n in divisors if per_device * (seq_len // n) * vocab_size <= 2**27), seq_len)


def batch_spec(mesh: Mesh) -> PartitionSpec:
    """How a batch of tokens, `[batch, seq]`, lies on a mesh by the default rules."""
    return AxisRules(DEFAULT_RULES).spec(("batch", "seq"), mesh)
