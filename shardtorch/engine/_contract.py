"""What an engine does for the rest of shardtorch, in our nouns and torch tensors only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from shardtorch.errors import ShardingError, ShardtorchError
from shardtorch.mesh import Mesh, NamedSharding, PartitionSpec

Index = tuple[slice, ...]
"""One slice per dim, with concrete start and stop: a box of a global tensor."""

ReadShard = Callable[[Index], Tensor]
"""Gives the part of a global tensor that `Index` names, on the CPU."""

LayerBody = Callable[..., Tensor]
"""`body(x, weights, *constants) -> x`: one layer, with `weights` by name and without the layer dim."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Inventory:
    """The devices that an engine runs on."""

    platform: str
    """`cpu` or `tpu`."""
    device_kind: str
    """The runtime's own name of the chip, such as `TPU v5p`, or `cpu`."""
    num_devices: int
    """Devices of all processes together; what a mesh is bound to."""
    process_index: int
    """This process, from 0."""
    process_count: int
    """Processes (hosts) that take part."""


@dataclass(frozen=True)
class Shard:
    """The piece of a global tensor that one device holds."""

    index: Index
    """Where the piece lies in the global tensor."""
    data: Tensor
    """The piece itself, on the CPU."""
    replica: int
    """0 for the one copy that a checkpoint writes, higher for further copies of the same box."""


@dataclass(frozen=True)
class Kernel:
    """A function in jax that runs on each device, on the pieces that it holds.

    Equal kernels are lowered once, so `fn` must be hashable by value: a frozen dataclass with `__call__`, say.
    """

    name: str
    fn: Callable[..., tuple]
    """Takes the local pieces as jax arrays, and returns a tuple of them."""
    mesh: Mesh
    in_specs: tuple[PartitionSpec, ...]
    """How each argument lies on the mesh."""
    out_specs: tuple[PartitionSpec, ...]


@dataclass(frozen=True)
class Origin:
    """Where in the user's code an operation comes from."""

    module: str = ""
    """Path in the model, such as `layers.*.mlp.w_up`; empty outside of modules."""
    source: str = ""
    """`file:line`; empty if it isn't known."""
    phase: Literal["forward", "backward", "update", ""] = ""
    """Which part of the step it belongs to; empty if it isn't known."""


@dataclass(frozen=True)
class Argument:
    """A parameter of a lowered step."""

    name: str
    """Of the state or batch tensor; `constant N` for what the code makes itself."""
    shape: tuple[int, ...]
    """Global shape."""
    dtype: torch.dtype
    sharding: NamedSharding | None
    """None for constants: whole on every device."""
    result: int | None = None
    """Number of the result that takes its place, if the step updates it: its memory is donated."""


@dataclass(frozen=True)
class Lowered:
    """A step as the compiler gets it, before it is partitioned."""

    hlo: bytes
    """A serialized `HloModuleProto`."""
    arguments: tuple[Argument, ...]
    """By number of the module's parameter."""
    result_shardings: tuple[NamedSharding | None, ...]
    """By number of the module's result; None leaves it to the partitioner."""
    origins: tuple[Origin, ...]
    """What the number in a scope `~7~`, which is part of an operation's `op_name`, stands for."""


def is_stack(shape: Sequence[int], sharding: NamedSharding) -> bool:
    """Whether a tensor is materialized one index of dim 0 at a time: a stack of layers, whole along dim 0."""
    return len(shape) >= 3 and sharding.mesh.axis_size(sharding.spec.axes_of(0)) == 1


def check_part(part: Tensor, global_shape: Sequence[int], process_count: int) -> None:
    """Checks that one process's rows are of the global tensor.

    Raises:
      ShardingError: The shapes disagree, or the rows are not on the CPU.
    """
    want = list(global_shape)
    if want:
        want[0] //= process_count
    if list(part.shape) != want or part.device.type != "cpu":
        raise ShardingError(
            f"each of {process_count} processes must give its equal share of the rows of a tensor of shape "
            f"{tuple(global_shape)}, on the CPU.",
            got=f"a part of shape {tuple(part.shape)} on {part.device}",
            fix=f"give a part of shape {tuple(want)} on the CPU.",
        )


def check_scan(weights: Mapping[str, Tensor], constants: Sequence[Tensor]) -> int:
    """The number of layers that a scan goes over.

    Raises:
      ShardtorchError: The weights do not say, or a constant requires a gradient.
    """
    num_layers = {name: len(w) if w.ndim else None for name, w in weights.items()}
    first = next(iter(num_layers.values()), None)
    if not first or any(count != first for count in num_layers.values()):
        raise ShardtorchError(
            "the weights of a scan must all have the same number of layers, at least one, as their dim 0.",
            got=", ".join(f"{name} {tuple(w.shape)}" for name, w in weights.items()) or "no weights",
            fix="stack one slice per layer for every weight.",
        )
    if any(constant.requires_grad for constant in constants):
        raise ShardtorchError(
            "a constant of a scan must not require a gradient.",
            got="an argument of the layers, besides the first, that depends on parameters",
            fix="detach it, or make it part of the first argument.",
        )
    return first


def check_layer_output(x: Tensor, y: Tensor) -> Tensor:
    """The output `y` of a scanned layer with input `x`.

    Raises:
      ShardtorchError: It can't be the input of the next layer.
    """
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ShardtorchError(
            "a scanned layer must return a tensor of the shape and dtype of its input.",
            got=f"input {tuple(x.shape)} {x.dtype}, output {tuple(y.shape)} {y.dtype}",
            fix="cast the output, and norm weights too: float32 weights make bfloat16 activations float32.",
        )
    return y


class Engine(Protocol):
    """The only way to a runtime.

    Every engine passes the same contract tests. Tensors that an engine hands out live on its `device`.
    """

    name: str
    device: torch.device

    def inventory(self) -> Inventory:
        """The devices that a mesh can be bound to."""
        ...

    def materialize(self, shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding, read: ReadShard) -> Tensor:
        """Makes a global tensor from its shards.

        `read` is called for boxes that this process's devices hold, never for more than one index of dim 0 at a time
        if `sharding` leaves dim 0 of a tensor with three or more dims whole (a stack of layers): no process holds
        more than one layer of such a tensor at once.

        Args:
          shape: Global shape.
          dtype: What the tensor is stored in; `read` may return another one, which is converted.
          sharding: Where the pieces go. Every sharded dim is divisible.
          read: Gives a box of the global tensor on the CPU.
        """
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, sharding: NamedSharding) -> Tensor:
        """A global tensor of zeros that is never whole on a device (unless `sharding` replicates it)."""
        ...

    def constrain(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        """Fixes the sharding of a value inside a graph, and of its gradient.

        Args:
          x: A value of the graph that is being traced.

        Returns:
          The same value, annotated. Use it in place of `x`.

        Raises:
          ShardingError: The sharding does not fit `x`, or `x` is not on the engine's device.
        """
        ...

    def in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same values, none of which is used before all are there: what follows in the graph waits for what came
        before. No gradient flows through it.

        Raises:
          ShardingError: A tensor is not on the engine's device.
        """
        ...

    def annotate(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        """Shards leaf data in place, before it is ever replicated if it has not been used yet, and returns `x`;
        for a value of a graph, does what `constrain` does.

        Raises:
          ShardingError: The sharding does not fit `x`, or `x` is not on the engine's device.
        """
        ...

    def put(self, part: Tensor, sharding: NamedSharding, global_shape: Sequence[int]) -> Tensor:
        """Makes a global tensor from what this process has of it.

        Args:
          part: On the CPU: `global_shape[0] / process_count` rows of dim 0. They become the rows that this process's
            devices hold, in order; with several processes these need not be neighbours in the global tensor.
          global_shape: Shape of the tensor over all processes.

        Raises:
          ShardingError: The part, or the sharding, is not of a tensor of that shape.
        """
        ...

    def scan(
        self, body: LayerBody, x: Tensor, weights: Mapping[str, Tensor], constants: Sequence[Tensor], *, remat: bool
    ) -> Tensor:
        """Applies `body` once per index of the weights' dim 0, as one loop of the graph, with gradients.

        Args:
          body: Pure. Its output has the shape and dtype of `x`.
          x: What goes from one layer to the next.
          weights: By name, each `[num_layers, ...]`.
          constants: Further tensors that every layer gets; no gradient flows to them.
          remat: Save only each layer's input and compute the layer again in the backward pass.

        Raises:
          ShardtorchError: The weights have no common number of layers, a constant requires a gradient, or the output
            of `body` is unlike its input.
        """
        ...

    def call_kernel(self, kernel: Kernel, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs a kernel as one op of the graph. No gradient flows through it.

        Args:
          kernel: What to run.
          tensors: Global, one for each of its `in_specs`, float32, bfloat16, int32 or bool.

        Returns:
          One global tensor for each of its `out_specs`.

        Raises:
          ShardingError: A tensor has another dtype, is elsewhere, or its spec does not fit.
          EngineUnavailableError: jax is not installed, or the engine runs no kernels.
        """
        ...

    def compile(self, step: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """The same function, run as one graph: everything it computes is dispatched once, when it returns."""
        ...

    def local_shards(self, x: Tensor, sharding: NamedSharding) -> list[Shard]:
        """The pieces of `x` on this process's devices, copied to the CPU, in the order of the devices' ids.

        Raises:
          ShardingError: `x` does not lie on the devices as `sharding` says.
        """
        ...

    def sharding_of(self, x: Tensor) -> str:
        """The sharding that the runtime itself reports for `x`, in XLA's notation; `""` if it reports none."""
        ...

    def num_compiles(self) -> int:
        """Graphs compiled by this process so far."""
        ...

    def sync(self) -> None:
        """Runs what is pending and waits until every device has finished."""
        ...
