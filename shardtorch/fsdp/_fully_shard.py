"""`fully_shard`: from a model, on the meta device or real, to placed, sharded parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardtorch.annotate import bind
from shardtorch.engine import Engine, ReadShard, running
from shardtorch.errors import ShardingError
from shardtorch.fsdp._gather import Use, read_as
from shardtorch.fsdp._initial import Initializer, default_initializer, find_initializer, read_initial
from shardtorch.fsdp._stack import LAYER, StackedLayers
from shardtorch.fsdp._state_dict import load_by_shard
from shardtorch.mesh import Mesh, NamedSharding, P, PartitionSpec, ShardingPlan


@dataclass(frozen=True)
class Placement:
    """Where a sharded model lies."""

    mesh: Mesh
    engine: Engine
    parameters: Mapping[str, NamedSharding]
    """By name, as `named_parameters()` gives them; a stack of layers has one entry, `layers.*....`."""


_placements: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()


def placement(model: nn.Module) -> Placement:
    """Where a model lies that `fully_shard` has placed.

    Raises:
      ShardingError: It has not.
    """
    if model not in _placements:
        raise ShardingError(
            "the model must be sharded first.",
            got=f"a {type(model).__name__} that fully_shard has not seen",
            fix="call model = fully_shard(model, mesh).",
        )
    return _placements[model]


def fully_shard(
    model: nn.Module,
    mesh: Mesh,
    *,
    axis: str | tuple[str, ...] | None = "fsdp",
    plan: ShardingPlan | None = None,
    init: Mapping[str, Initializer] | None = None,
    seed: int = 0,
    stack: str | None = None,
    remat: bool = False,
    compute_dtype: torch.dtype | None = None,
    engine: Engine | None = None,
) -> nn.Module:
    """Shards every parameter of a model over the mesh, in place, and with it its gradient.

    A parameter on the meta device is made shard by shard, so that no device ever holds it whole; one with values is
    cut up. Ties are kept. State dicts keep the model's names.

    Args:
      model: Any module. Build it under `torch.device("meta")` if it is large.
      mesh: An axis of -1 is inferred from the devices.
      axis: Mesh axis, or axes taken together, of FSDP. Every large parameter is sharded over it: where the plan does
        not say how, along the largest dim that divides. It is gathered over it where it is used, and its gradient
        scattered; over the other axes of the plan it stays sharded, as in tensor parallelism. None leaves all to the
        plan and gathers nothing.
      plan: Specs of parameters, such as for tensor parallelism, and of the inputs and outputs of modules. A stack is
        matched as `layers.*....` by its specs for one layer.
      init: Initial values by pattern of parameter names; those not named start as torch starts them. The first
        pattern that matches wins. Draws depend on the seed and the name, not on the mesh.
      seed: Of the initial values.
      stack: Path of a `ModuleList` of equal layers, to be stored as stacks and run as one scan.
      remat: With `stack`: keep each layer's input only and compute the layer again in the backward pass.
      compute_dtype: What parameters are cast to where they are used; they are stored in their own dtype.
      engine: Where to; the running one by default.

    Returns:
      The same model, on the engine's device.

    Raises:
      ShardingError: Something does not fit: an axis, a pattern, a size, an initial value, layers that differ.
      EngineUnavailableError: No engine was started.
    """
    engine = engine or running()
    mesh = bind(mesh, engine)
    plan = plan or ShardingPlan({}, large=2**63)
    if remat and stack is None:
        raise ShardingError(
            "remat applies to stacked layers.", got="remat=True, stack=None", fix="name the layers: stack='layers'."
        )
    sources = dict(model.named_parameters())
    layers = _stack(model, stack, engine, remat) if stack is not None else None
    parameters = dict(model.named_parameters())
    prefix = f"{stack}.{LAYER}." if stack is not None else None

    def is_stack(name: str) -> bool:
        return prefix is not None and name.startswith(prefix)

    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    one_layer = _with_axis(plan, shapes, mesh, axis)
    shardings = {
        name: NamedSharding(mesh, P(None, *sharding.spec)) if is_stack(name) else sharding
        for name, sharding in one_layer.items()
    }
    inputs, outputs = plan.resolve_modules([path for path, _ in model.named_modules()], mesh)

    placed: dict[int, nn.Parameter] = {}
    for name, parameter in parameters.items():
        read, shape = _reader(model, name, sources, init or {}, seed, layers.num_layers if is_stack(name) else None)
        data = engine.materialize(shape, parameter.dtype, shardings[name], read)
        placed[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        _constrain_gradient(placed[id(parameter)], shardings[name], engine)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = placed[id(parameter)]
    canonical = {id(placed[id(parameter)]): name for name, parameter in parameters.items()}
    _place_buffers(model, mesh, engine)
    axes = () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    uses = {name: Use(engine, one_layer[name], axes, compute_dtype) for name in parameters}
    if layers is not None and prefix is not None:
        layers.uses = {name.removeprefix(prefix): use for name, use in uses.items() if is_stack(name)}
    for path, module in model.named_modules():
        own = {name: uses[canonical[id(p)]] for name, p in module._parameters.items() if p is not None}
        if not is_stack(f"{path}."):  # the scan does it for these
            read_as(module, own)
    modules = dict(model.named_modules())
    for path, sharding in inputs.items():
        _constrain_input(modules[path], path, sharding, engine)
    for path, sharding in outputs.items():
        _constrain_output(modules[path], path, sharding, engine)
    _placements[model] = Placement(mesh, engine, shardings)
    load_by_shard(model, shardings, engine, prefix, layers.num_layers if layers is not None else 0)
    return model


def _stack(model: nn.Module, path: str, engine: Engine, remat: bool) -> StackedLayers:
    parent_path, _, name = path.rpartition(".")
    try:
        parent, layers = model.get_submodule(parent_path), model.get_submodule(path)
    except AttributeError as error:
        lists = [p for p, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        raise ShardingError(
            "stack must be the path of a ModuleList of the model.",
            got=repr(path),
            fix=f"use one of {lists}." if lists else "the model has no ModuleList; pass stack=None.",
        ) from error
    stacked = StackedLayers(layers, path, engine, remat=remat)
    setattr(parent, name, stacked)
    return stacked


def _with_axis(
    plan: ShardingPlan, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, axis: str | tuple[str, ...] | None
) -> dict[str, NamedSharding]:
    """The plan's shardings, each large parameter sharded over `axis` as well."""
    if axis is None:
        return plan.resolve(shapes, mesh)
    axes = (axis,) if isinstance(axis, str) else axis
    mesh.check_axes(axes)
    shardings = replace(plan, large=2**63).resolve(shapes, mesh)  # none is forgotten: the axis takes the rest
    return {
        name: sharding
        if math.prod(shapes[name]) < min(plan.large, ShardingPlan({}).large)
        else _add_axis(name, shapes[name], sharding, axes)
        for name, sharding in shardings.items()
    }


def _add_axis(name: str, shape: tuple[int, ...], sharding: NamedSharding, axes: tuple[str, ...]) -> NamedSharding:
    missing = tuple(axis for axis in axes if axis not in sharding.spec.axes)
    size = sharding.mesh.axis_size(missing)
    if size == 1:
        return sharding
    entries = [sharding.spec.axes_of(dim) for dim in range(len(shape))]
    free = [dim for dim, used in enumerate(entries) if not used and shape[dim] % size == 0]
    if not free:
        raise ShardingError(
            f"{name}: no dim that is free can be divided by mesh axis {' x '.join(missing)} of size {size}.",
            got=f"shape {shape}, spec {sharding.spec}, mesh {sharding.mesh}",
            fix="give the parameter a spec in the plan and pass axis=None, or choose another size of the axis.",
        )
    entries[max(free, key=lambda dim: shape[dim])] = missing
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def _reader(
    model: nn.Module,
    name: str,
    sources: Mapping[str, nn.Parameter],
    init: Mapping[str, Initializer],
    seed: int,
    num_layers: int | None,
) -> tuple[ReadShard, tuple[int, ...]]:
    """How to read boxes of a parameter, or of a stack of one per layer, and its global shape."""

    def read_single(single: str) -> ReadShard:
        source = sources[single]
        if not source.is_meta:
            return lambda index: source.detach()[index].cpu()
        initializer = find_initializer(init, single)
        if initializer is None:
            owner, _, parameter = name.rpartition(".")
            initializer = default_initializer(model.get_submodule(owner), parameter, single)
        return read_initial(initializer, seed, single, source.shape)

    if num_layers is None:
        return read_single(name), tuple(sources[name].shape)
    reads = [read_single(name.replace(f".{LAYER}.", f".{layer}.", 1)) for layer in range(num_layers)]

    def read(index: tuple[slice, ...]) -> Tensor:
        layers, *rest = index
        return torch.stack([reads[layer](tuple(rest)) for layer in range(layers.start, layers.stop)])

    first = sources[name.replace(f".{LAYER}.", ".0.", 1)]
    return read, (num_layers, *first.shape)


def _place_buffers(model: nn.Module, mesh: Mesh, engine: Engine) -> None:
    """Buffers are small: every device gets them whole."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise ShardingError(
                    f"{path}.{name}: a buffer must have its values before the model is sharded.",
                    got="a buffer on the meta device",
                    fix="compute it in forward, or register it on the CPU: torch.tensor(..., device='cpu').",
                )
            read = lambda index, buffer=buffer: buffer[index].cpu()  # noqa: E731
            module._buffers[name] = engine.materialize(buffer.shape, buffer.dtype, NamedSharding(mesh, P()), read)


def _constrain_gradient(parameter: nn.Parameter, sharding: NamedSharding, engine: Engine) -> None:
    """Gradients carry the parameter's sharding: left alone, the partitioner may give them another."""

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = engine.constrain(p.grad, sharding)

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(hook)


def _constrain_output(module: nn.Module, path: str, sharding: NamedSharding, engine: Engine) -> None:
    def hook(_: nn.Module, args: Sequence, output):
        return _constrained(output, f"output of {path}", sharding, engine)

    module.register_forward_hook(hook)


def _constrain_input(module: nn.Module, path: str, sharding: NamedSharding, engine: Engine) -> None:
    def hook(_: nn.Module, args: tuple):
        if not args:
            raise ShardingError(
                f"input of {path}: the plan shards the first positional argument.",
                got="none",
                fix="pass the tensor by position, or shard the output of the module before.",
            )
        return (_constrained(args[0], f"input of {path}", sharding, engine), *args[1:])

    module.register_forward_pre_hook(hook)


def _constrained(value, name: str, sharding: NamedSharding, engine: Engine) -> Tensor:
    if not isinstance(value, Tensor):
        raise ShardingError(
            f"{name}: a plan shards modules that take and return a tensor.",
            got=type(value).__name__,
            fix="name a module inside or around it, or use mark_sharding in its code.",
        )
    sharding.validate(tuple(value.shape), name)
    return engine.constrain(value, sharding)
