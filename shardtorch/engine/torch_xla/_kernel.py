"""A jax function as one op of the graph.

Lowered through `jax.export`, which pins a version of Mosaic's format that every libtpu accepts, and over an abstract
mesh, so that it needs no device of its platform: here for a TPU as well.

Private symbols of jax and jaxlib 0.7.1: `jax._src.config.traceback_in_locations_limit`,
`jax._src.lib.xla_client._xla.mlir`; of torch_xla 2.9.0: `_XLAC._xla_user_computation` through `xla_builder`.
tests/pallas and tests/engine exercise them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch_xla.core.xla_builder as xb
from torch import Tensor

from shardtorch.engine._contract import Kernel
from shardtorch.errors import EngineUnavailableError, ShardingError
from shardtorch.mesh import Mesh, NamedSharding, PartitionSpec

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int32: "int32", torch.bool: "bool"}


@dataclass(frozen=True)
class _Lowered:
    call: Callable[..., Sequence[Tensor]]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]


_kernels: list[tuple[Kernel, str]] = []
"""What the op's number stands for: an op of torch takes no Python objects."""
_numbers: dict[tuple[Kernel, str], int] = {}


def call_kernel(kernel: Kernel, tensors: Sequence[Tensor], platform: str) -> list[Tensor]:
    """See `Engine.call_kernel`."""
    if len(tensors) != len(kernel.in_specs) or not tensors:
        raise ShardingError(
            f"{kernel.name}: a kernel takes one tensor per spec, and at least one.",
            got=f"{len(tensors)} tensors, {len(kernel.in_specs)} specs",
            fix="pass as many tensors as in_specs has entries.",
        )
    for number, (x, spec) in enumerate(zip(tensors, kernel.in_specs, strict=True)):
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.device.type != "xla":
            raise ShardingError(
                f"{kernel.name}: a kernel takes tensors on the engine's device, of {', '.join(_DTYPES.values())}.",
                got=f"argument {number}: " + (f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else repr(x)),
                fix="convert it first.",
            )
        NamedSharding(kernel.mesh, spec).validate(tuple(x.shape), f"{kernel.name}: argument {number}")
    key = (kernel, platform)
    if key not in _numbers:
        _numbers[key] = len(_kernels)
        _kernels.append(key)
    return _call(list(tensors), _numbers[key])


@torch.library.custom_op("shardtorch::kernel", mutates_args=())
def _call(tensors: list[Tensor], number: int) -> list[Tensor]:
    return list(_lowered_for(tensors, number).call(tensors))


@_call.register_fake
def _(tensors, number):
    outputs = _lowered_for(tensors, number).outputs
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in outputs]


def _lowered_for(tensors: Sequence[Tensor], number: int) -> _Lowered:
    return _lower(*_kernels[number], tuple((tuple(x.shape), x.dtype) for x in tensors))


@lru_cache(maxsize=256)
def _lower(kernel: Kernel, platform: str, avals: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> _Lowered:
    jax = import_jax()
    mesh, specs = _jax_mesh(jax, kernel.mesh)
    local = jax.shard_map(
        kernel.fn,
        mesh=mesh,
        in_specs=tuple(map(specs, kernel.in_specs)),
        out_specs=tuple(map(specs, kernel.out_specs)),
        check_vma=False,
    )
    structs = [jax.ShapeDtypeStruct(shape, _DTYPES[dtype]) for shape, dtype in avals]
    from jax._src import config

    try:
        # A kernel carries where it was traced. Without that, the same one is the same wherever it is called from.
        with config.traceback_in_locations_limit(0):
            exported = jax.export.export(jax.jit(local, keep_unused=True), platforms=[platform])(*structs)
    except ValueError as error:
        if "out_specs" not in str(error):
            raise
        raise _wrong_results(kernel, str(error)) from error
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    if any(str(aval.dtype) not in dtypes for aval in exported.out_avals):
        raise _wrong_results(kernel, ", ".join(str(aval.dtype) for aval in exported.out_avals))
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    mlir: Any = xla_client._xla.mlir  # pyright: ignore[reportPrivateImportUsage]
    hlo = mlir.mlir_module_to_xla_computation(exported.mlir_module(), return_tuple=True)
    computation = xb.computation_from_module_proto(kernel.name, hlo.as_serialized_hlo_module_proto())
    return _Lowered(
        xb.xla_computation_as_func(computation, kernel.name),
        tuple((tuple(aval.shape), dtypes[str(aval.dtype)]) for aval in exported.out_avals),
    )


def _wrong_results(kernel: Kernel, got: str) -> ShardingError:
    return ShardingError(
        f"{kernel.name}: a kernel returns a tuple with an array for each of its out_specs, of as many dims or more, "
        f"and of {', '.join(_DTYPES.values())}.",
        got=got.splitlines()[0],
        fix="make fn and out_specs agree.",
    )


def import_jax() -> Any:
    """jax, set to the partitioner that torch_xla 2.9.0 uses.

    Raises:
      EngineUnavailableError: It isn't installed.
    """
    try:
        import jax
        import jax.export
    except ImportError as error:
        raise EngineUnavailableError(
            "kernels are written in jax, and lowered by it.",
            got=f"import failed: {error}",
            fix="pip install 'shardtorch[kernels]', or choose attention='torch'.",
        ) from error
    jax.config.update("jax_use_shardy_partitioner", False)
    return jax


def _jax_mesh(jax: Any, mesh: Mesh) -> tuple[Any, Callable[[PartitionSpec], Any]]:
    """The mesh in jax's terms, in the order of our device ids, and the way from our specs to its.

    Our ids count slices first, so an axis that spans slices becomes two.
    """
    sizes = {f"{axis}_dcn": factor for axis, factor in mesh.dcn.items() if factor > 1} | dict(mesh.ici)
    abstract = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))

    def spec(ours: PartitionSpec) -> Any:
        entries = []
        for dim in range(len(ours)):
            axes = [part for axis in ours.axes_of(dim) for part in (f"{axis}_dcn", axis) if part in sizes]
            entries.append(tuple(axes) or None)
        return jax.sharding.PartitionSpec(*entries)

    return abstract, spec
