"""`mark_sharding`: the user's verb over any tensor."""

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardtorch.engine import Engine, running
from shardtorch.errors import ShardingError
from shardtorch.mesh import Mesh, NamedSharding, PartitionSpec, SpecLike


def mark_sharding(x: Tensor, mesh: Mesh, spec: SpecLike, *, name: str | None = None) -> Tensor:
    """Says how a tensor lies on the mesh.

    Leaf data (a parameter, a batch) is cut up where it is, before it was ever replicated if no graph has used it yet;
    gradients that accumulate in it carry the same sharding. A value inside a graph is constrained together with its
    gradient, inside scanned layers and remat as well.

    Args:
      x: A tensor on the engine's device.
      mesh: The mesh; an axis of -1 is inferred from the engine's devices.
      spec: A `P`, a tuple or a list, with at most one entry per dim; None for a tensor that is whole on every device.
      name: What to call the tensor in errors.

    Returns:
      The annotated tensor: for leaf data `x` itself, for a value of a graph a new one. Use it in place of `x`.

    Raises:
      ShardingError: The spec does not fit the tensor or the mesh, the mesh does not fit the devices, or the tensor is
        not on the engine's device.
      EngineUnavailableError: No engine was started.
    """
    engine = running()
    try:
        sharding = _checked(x, mesh, spec, engine)
        x = engine.annotate(x, sharding)
    except ShardingError as error:
        raise (error if name is None else error.within(name)) from None
    if x.is_leaf and x.requires_grad:
        constrain_gradient(x, sharding, engine)
    return x


def _checked(x: Tensor, mesh: Mesh, spec: SpecLike, engine: Engine) -> NamedSharding:
    if not isinstance(x, Tensor):
        raise ShardingError("only tensors can be sharded.", got=f"a {type(x).__name__}", fix="pass a torch.Tensor.")
    if not isinstance(mesh, Mesh):
        raise ShardingError(
            "tensors are sharded over a shardtorch.Mesh.",
            got=f"a {type(mesh).__name__} in its place",
            fix="call mark_sharding(x, Mesh(fsdp=8), P('fsdp')).",
        )
    sharding = NamedSharding(bind(mesh, engine), PartitionSpec.of(spec))
    sharding.validate(tuple(x.shape))
    if x.device.type == "meta":
        raise ShardingError(
            "a tensor on the meta device has no data to shard.",
            got=f"shape {tuple(x.shape)} on meta",
            fix="use fully_shard(model, mesh, init=...), which makes the data shard by shard.",
        )
    return sharding


def constrain_gradient(parameter: Tensor, sharding: NamedSharding, engine: Engine) -> None:
    """Gradients that accumulate in a leaf carry its sharding: left alone, the partitioner may give them another.

    Args:
      parameter: A leaf that requires a gradient. A second call takes the place of the first.
      sharding: Of the leaf.
      engine: Where it lies.
    """

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = engine.constrain(p.grad, sharding)

    if (earlier := _gradient_hooks.pop(parameter, None)) is not None:
        earlier.remove()
    _gradient_hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)


_gradient_hooks = WeakTensorKeyDictionary()


def bind(mesh: Mesh, engine: Engine) -> Mesh:
    """The mesh on the engine's devices. The reference engine, which applies no sharding, takes any bound mesh."""
    if engine.name == "reference":
        return mesh if mesh.is_bound else mesh.bind(1)
    return mesh.bind(engine.inventory().num_devices)
