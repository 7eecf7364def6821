"""`fully_shard`: from a model, on the meta device or real, to placed, sharded parameters."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from shardtorch.annotate import bind, constrain_gradient
from shardtorch.engine import Engine, ReadShard, running
from shardtorch.errors import ShardingError
from shardtorch.fsdp._gather import Forwards, Use, read_in_forward
from shardtorch.fsdp._hooks import constrain_input, constrain_output
from shardtorch.fsdp._initial import Initializer, check_rules
from shardtorch.fsdp._names import LAYER, Names
from shardtorch.fsdp._read import read_parameter, read_stack, read_tensor
from shardtorch.fsdp._stack import StackedLayers, check_alike, check_not_shared
from shardtorch.fsdp._state_dict import load_by_shard
from shardtorch.mesh import Mesh, NamedSharding, P, PartitionSpec, ShardingPlan, matches


@dataclass(frozen=True)
class Placement:
    """Where a sharded model lies."""

    mesh: Mesh
    engine: Engine
    parameters: Mapping[str, NamedSharding]
    """By name, as `named_parameters()` gives them; a stack of layers has one entry, `layers.*....`."""


_T = TypeVar("_T")
_placements: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()
_sharded: WeakSet[nn.Module] = WeakSet()
"""Every module of a model that has a placement."""


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
    cut up. Ties are kept. State dicts keep the model's names. Buffers are whole on every device. If anything does not
    fit, the model is left as it was.

    While the model or a part of it is called, `module.weight` is the parameter as it is used: gathered, and in
    `compute_dtype`. Otherwise it is the stored parameter.

    Args:
      model: Any module. Build it under `torch.device("meta")` if it is large.
      mesh: An axis of -1 is inferred from the devices.
      axis: Mesh axis, or axes taken together, of FSDP. Every large parameter is sharded over it: where the plan does
        not say how, along the largest dim that divides. It is gathered over it where it is used, and its gradient
        scattered; over the other axes of the plan it stays sharded, as in tensor parallelism. None leaves all to the
        plan and gathers nothing.
      plan: Specs of parameters, such as for tensor parallelism, and of the inputs and outputs of modules. A stack is
        matched as `layers.*....` by its specs for one layer. None or `P()` as the spec of a parameter replicates it
        on purpose: `axis` leaves it alone too. `plan.large` says what a large parameter is.
      init: Initial values of parameters on the meta device, by pattern of their names, such as `Normal(0.02)`; those
        not named start as torch starts them. The first pattern that matches wins. Draws depend on the seed and the
        name, not on the mesh.
      seed: Of the initial values.
      stack: Path of a `ModuleList` of equal layers, to be stored as stacks and run as one scan. The model's loop must
        be `for layer in layers: x = layer(x, ...)`, with the same further arguments for each; another one is an error.
        But a `break` can't be seen, and hidden states that it collects are all the last layer's: do not stack those.
      remat: With `stack`: keep each layer's input only and compute the layer again in the backward pass.
      compute_dtype: What parameters are cast to where they are used; they are stored in their own dtype.
      engine: Where to; the running one by default.

    Returns:
      The same model, on the engine's device.

    Raises:
      ShardingError: Something does not fit: an axis, a pattern, a size, an initial value, layers that differ.
      EngineUnavailableError: No engine was started.
    """
    _check_types(model, mesh, plan, init)
    engine = engine or running()
    mesh = bind(mesh, engine)
    plan = plan or ShardingPlan({})
    axes = () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    if again := [path for path, module in model.named_modules() if module in _sharded]:
        raise ShardingError(
            "a model is sharded once, with all that is in it.",
            got=f"{again[0] or 'the model'} ({type(model.get_submodule(again[0])).__name__}), which is sharded",
            fix="build it anew, and call fully_shard on the whole model only.",
        )
    if remat and stack is None:
        raise ShardingError(
            "remat applies to stacked layers.", got="remat=True, stack=None", fix="name the layers: stack='layers'."
        )

    # First what could go wrong, then the changes.
    names = Names(None) if stack is None else Names(stack, len(_layers(model, stack)))
    shapes = _stored(names, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    shardings = _shardings(plan, shapes, mesh, axes)  # of one layer, for a stack
    paths = list(_stored(names, dict(model.named_modules())))
    inputs, outputs = plan.resolve_modules(paths, mesh)
    check_rules(init or {}, dict(model.named_parameters()))
    reads = {name: _read_stored(names, name, lambda n: read_parameter(model, n, init or {}, seed)) for name in shapes}
    buffers = _stored_buffers(model, names)
    buffer_shardings = dict.fromkeys(buffers, NamedSharding(mesh, P()))  # every device gets every buffer whole
    buffer_reads = {name: _read_stored(names, name, lambda n: read_tensor(model.get_buffer(n))) for name in buffers}
    ties = dict(model.named_parameters(remove_duplicate=False))

    uses = {name: Use(engine, sharding, axes, compute_dtype) for name, sharding in shardings.items()}
    if stack is not None:
        prefix = f"{stack}.{LAYER}."
        layer_uses = {name.removeprefix(prefix): use for name, use in uses.items() if names.is_stacked(name)}
        layer = model.get_submodule(f"{stack}.0")
        layers = StackedLayers(layer, names.num_layers, stack, layer_uses, engine, remat=remat)
        parent, _, name = stack.rpartition(".")
        setattr(model.get_submodule(parent), name, layers)
    stored_shardings = {
        name: NamedSharding(mesh, P(None, *sharding.spec)) if names.is_stacked(name) else sharding
        for name, sharding in shardings.items()
    }
    _place_parameters(model, names, ties, stored_shardings, reads, uses, engine)
    _place_buffers(model, names, buffers, buffer_shardings, buffer_reads, engine)
    for path, sharding in inputs.items():
        constrain_input(model.get_submodule(path), path, sharding, engine)
    for path, sharding in outputs.items():
        constrain_output(model.get_submodule(path), path, sharding, engine)
    _placements[model] = Placement(mesh, engine, stored_shardings)
    _sharded.update(model.modules())
    load_by_shard(model, names, stored_shardings | buffer_shardings, engine)
    return model


def _check_types(model: object, mesh: object, plan: object, init: object) -> None:
    """Raises for what is passed most easily in place of the right thing."""
    for value, kind, law, fix in (
        (model, nn.Module, "the model must be a torch.nn.Module.", "call fully_shard(model, mesh)."),
        (
            mesh,
            Mesh,
            "the mesh must be a shardtorch.Mesh.",
            "write Mesh(fsdp=4), or Mesh(**sizes) for a dict of sizes.",
        ),
        (plan, ShardingPlan | None, "the plan must be a ShardingPlan.", "write plan=ShardingPlan({...})."),
        (init, Mapping | None, "init must be a mapping.", "write init={'**.weight': Normal(0.02)}."),
    ):
        if not isinstance(value, kind):
            raise ShardingError(law, got=f"{value!r}", fix=fix)


def _layers(model: nn.Module, path: str) -> nn.ModuleList:
    """The layers to stack.

    Raises:
      ShardingError: There is no such list, or one layer can't stand for all.
    """
    try:
        layers = model.get_submodule(path)
    except AttributeError as error:
        lists = [p for p, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        raise ShardingError(
            "stack must be the path of a ModuleList of the model.",
            got=repr(path),
            fix=f"use one of {lists}." if lists else "the model has no ModuleList; pass stack=None.",
        ) from error
    check_not_shared(model, path)
    return check_alike(layers, path)


def _stored(names: Names, things: Mapping[str, _T]) -> dict[str, _T]:
    """The same by stored name."""
    return {stored: thing for name, thing in things.items() if (stored := names.stored(name)) is not None}


def _shardings(
    plan: ShardingPlan, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, axes: tuple[str, ...]
) -> dict[str, NamedSharding]:
    """The plan's shardings, each large parameter that it does not replicate on purpose sharded over `axes` as well."""
    if not axes:
        return plan.resolve(shapes, mesh)
    mesh.check_axes(PartitionSpec(axes).axes)  # which raises if one comes twice
    shardings = replace(plan, large=sys.maxsize).resolve(shapes, mesh)  # none is forgotten: the axes take the rest
    return {
        name: _add_axes(name, shapes[name], sharding, axes)
        if math.prod(shapes[name]) >= plan.large and not _is_replicated(name, plan)
        else sharding
        for name, sharding in shardings.items()
    }


def _is_replicated(name: str, plan: ShardingPlan) -> bool:
    """Whether the plan names a parameter, with None or `P()` as its spec."""
    specs = (PartitionSpec.of(spec) for pattern, spec in plan.parameters.items() if matches(pattern, name))
    return next(specs, None) == P()


def _add_axes(name: str, shape: tuple[int, ...], sharding: NamedSharding, axes: tuple[str, ...]) -> NamedSharding:
    missing = tuple(axis for axis in axes if axis not in sharding.spec.axes)
    size = sharding.mesh.axis_size(missing)
    if size == 1:
        return sharding
    entries = [sharding.spec.axes_of(dim) for dim in range(len(shape))]
    fitting = [dim for dim, used in enumerate(entries) if shape[dim] % (size * sharding.mesh.axis_size(used)) == 0]
    if not fitting:
        raise ShardingError(
            f"{name}: no dim can be divided by mesh axis {' x '.join(missing)} of size {size}.",
            got=f"shape {shape}, spec {sharding.spec}, mesh {sharding.mesh}",
            fix=f"replicate it on purpose with {name!r}: None in the plan, or choose another size of the axis.",
        )
    # One that the plan leaves whole if there is any, and of those the largest.
    dim = max(fitting, key=lambda dim: (not entries[dim], shape[dim]))
    entries[dim] = (*entries[dim], *missing)
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def _read_stored(names: Names, stored: str, read_single) -> ReadShard:
    """How to read a stored tensor, given how to read one of the model's."""
    reads = [read_single(single) for single in names.singles(stored)]
    return read_stack(reads) if names.is_stacked(stored) else reads[0]


def _place_parameters(
    model: nn.Module,
    names: Names,
    ties: Mapping[str, nn.Parameter],
    shardings: Mapping[str, NamedSharding],
    reads: Mapping[str, ReadShard],
    uses: Mapping[str, Use],
    engine: Engine,
) -> None:
    """Puts placed parameters in the place of the model's, one for all owners of a tied one."""
    module_uses: dict[nn.Module, dict[str, Use]] = {}
    owners: dict[int, list[str]] = {}
    for name, parameter in ties.items():
        if (stored := names.stored(name)) is not None:
            owners.setdefault(id(parameter), []).append(stored)
    for first, *others in owners.values():
        old = model.get_parameter(first)
        shape = (names.num_layers, *old.shape) if names.is_stacked(first) else tuple(old.shape)
        data = engine.materialize(shape, old.dtype, shardings[first], reads[first])
        parameter = nn.Parameter(data, requires_grad=data.is_floating_point() or data.is_complex())
        if parameter.requires_grad:  # or can be: the hook stays with a frozen parameter for when it is thawed
            constrain_gradient(parameter, shardings[first], engine)
            parameter.requires_grad_(old.requires_grad)
        for owner in (first, *others):
            path, _, name = owner.rpartition(".")
            module = model.get_submodule(path)
            module.register_parameter(name, parameter)
            if not names.is_stacked(owner):  # the scan does it for these
                module_uses.setdefault(module, {})[name] = uses[first]
    forwards = Forwards()
    for path, module in model.named_modules():
        if not names.is_stacked(path) and next(module.parameters(), None) is not None:
            read_in_forward(module, module_uses.get(module, {}), forwards)


def _stored_buffers(model: nn.Module, names: Names) -> dict[str, Tensor]:
    """The model's buffers by stored name, a shared one by each of its names; for a stack, the first layer's.

    Raises:
      ShardingError: One has no values.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in buffers.items():
        if buffer.is_meta:
            raise ShardingError(
                f"{name}: a buffer must have its values before the model is sharded.",
                got="a buffer on the meta device",
                fix="compute it in forward, or make it with device='cpu'.",
            )
    return _stored(names, buffers)


def _place_buffers(
    model: nn.Module,
    names: Names,
    buffers: Mapping[str, Tensor],
    shardings: Mapping[str, NamedSharding],
    reads: Mapping[str, ReadShard],
    engine: Engine,
) -> None:
    """Puts placed buffers in the place of the model's, one for all owners of a shared one; each stack is its own."""
    placed: dict[int | str, Tensor] = {}
    for name, buffer in buffers.items():
        is_stacked = names.is_stacked(name)
        key = name if is_stacked else id(buffer)
        if key not in placed:
            shape = (names.num_layers, *buffer.shape) if is_stacked else tuple(buffer.shape)
            placed[key] = engine.materialize(shape, buffer.dtype, shardings[name], reads[name])
        path, _, short_name = name.rpartition(".")
        model.get_submodule(path)._buffers[short_name] = placed[key]
