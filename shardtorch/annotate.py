"""`mark_sharding`: the user's verb over any tensor."""

from collections.abc import Sequence

from torch import Tensor

from shardtorch.engine import running
from shardtorch.errors import ShardingError
from shardtorch.mesh import Mesh, NamedSharding, PartitionSpec


def mark_sharding(x: Tensor, mesh: Mesh, spec: PartitionSpec | Sequence, *, name: str | None = None) -> Tensor:
    """Says how a tensor lies on the mesh.

    Leaf data (a parameter, a batch) is cut up where it is, before it was ever replicated if no graph has used it yet.
    A value inside a graph is constrained, and its gradient too; this works inside scanned layers and remat as well.

    Args:
      x: A tensor on the engine's device.
      mesh: The mesh; an axis of -1 is inferred from the engine's devices.
      spec: A `P`, a tuple or a list, with at most one entry per dim.
      name: What to call the tensor in errors.

    Returns:
      The annotated tensor: for leaf data `x` itself, for a value of a graph a new one. Use it in place of `x`.

    Raises:
      ShardingError: The spec does not fit the tensor or the mesh, the mesh does not fit the devices, or the tensor is
        not on the engine's device.
      EngineUnavailableError: No engine was started.
    """
    engine = running()
    if not isinstance(x, Tensor):
        raise ShardingError("only tensors can be sharded.", got=f"{type(x).__name__}", fix="pass a torch.Tensor.")
    sharding = NamedSharding(bind(mesh, engine), PartitionSpec.of(spec))
    sharding.validate(tuple(x.shape), name)
    if x.device.type == "meta":
        raise ShardingError(
            f"{name or 'the tensor'}: a tensor on the meta device has no data to shard.",
            got=f"shape {tuple(x.shape)} on meta",
            fix="use fully_shard(model, mesh, init=...), which makes the data shard by shard.",
        )
    return engine.annotate(x, sharding)


def bind(mesh: Mesh, engine) -> Mesh:
    """The mesh on the engine's devices. The reference engine, which applies no sharding, takes any bound mesh."""
    if engine.name == "reference":
        return mesh if mesh.is_bound else mesh.bind(1)
    return mesh.bind(engine.inventory().num_devices)
