"""What a plan did with parameters that one would not guess from the mesh."""

import math
from collections.abc import Mapping
from typing import Any

from shardtorch.aot._quantities import bytes_text
from shardtorch.engine import Argument, Lowered

_LARGE_BYTES = 16 * 2**20
"""On one device, what is worth a word if every other one holds it too."""


def layout_notes(lowered: Lowered, kinds: Mapping[str, Any]) -> tuple[str, ...]:
    """Parameters that are whole on every device though they are large, and those whose largest dim can't be divided, so
    that another one is; the largest first.

    Args:
      lowered: The step.
      kinds: Of the state's tensors, by name.
    """
    parameters = [argument for argument in lowered.arguments if kinds.get(argument.name) == "parameter"]
    parameters.sort(key=lambda argument: -math.prod(argument.shape))
    return tuple(note for argument in parameters if (note := _note(argument)))


def _note(argument: Argument) -> str:
    sharding, shape = argument.sharding, argument.shape
    if sharding is None or sharding.mesh.size == 1 or not shape:
        return ""
    num_bytes = sharding.bytes_per_device(shape, argument.dtype.itemsize)
    shards = sharding.mesh.size // sharding.num_replicas
    if shards == 1:
        if num_bytes < _LARGE_BYTES:
            return ""
        return f"{argument.name} {list(shape)} is whole on every device, {bytes_text(num_bytes)} each: give it a spec."
    largest = max(range(len(shape)), key=shape.__getitem__)
    if sharding.shard_shape(shape)[largest] < shape[largest] or shape[largest] % shards == 0:
        return ""
    return (
        f"{argument.name} {list(shape)} is sharded by {sharding.spec!r}, {bytes_text(num_bytes)} a device: its largest "
        f"dim, {shape[largest]:,}, can't be divided over {shards:,}."
    )
