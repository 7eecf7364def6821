"""What an operation of a compiled program costs: a stated model, on top of the compiler's own estimates.

- An operation that carries the compiler's estimate takes its cycles over the chip's clock.
- A kernel carries none. Attention kernels take the FLOPs of their shapes over a fraction of the peak; any other kernel,
  its HBM traffic over the bandwidth.
- A copy between HBM and the chip's vector memory takes its bytes over the bandwidth, beside the core.
- A collective takes its bytes over the links that its devices have along the dims of the slice that it spans, both
  directions and all dims at once, and a latency per hop; over slices, in addition, its share over the data centre
  network. These are the bandwidth bounds of ring algorithms on a torus (Chan et al., Collective communication: theory,
  practice, and experience, 2007), which XLA's own approach.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardtorch.aot._hlo import Array, Instruction, Module, replica_groups
from shardtorch.mesh import Mesh, SliceTopology

LINK_EFFICIENCY = 0.9
"""Of a link's published bandwidth, what a large transfer gets."""
HOP_LATENCY_S = 1e-6
"""Per chip that a message passes."""
DCN_LATENCY_S = 100e-6
"""Per collective over several slices."""
KERNEL_EFFICIENCY = {"v4": 0.5, "v5e": 0.5, "v5p": 0.5, "v6e": 0.35, "tpu7x": 0.35}
"""Of the peak, what attention kernels reach at head_dim 128, counting the causal half: a 256x256 matrix unit, from v6e
on, is half empty at that width."""
_ATTENTION = (("_fwd", 2), ("_dkv", 4), ("_dq", 3))
"""Products of [seq, head_dim] with [head_dim, seq], or of that size, by part of a splash kernel's name."""

_MOVES = ("copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "broadcast")

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Work:
    """What an operation on the core does in one call."""

    seconds: float
    flops: float
    """Of matrix products."""
    bytes: int
    """HBM read and written."""
    category: str
    """`matmul`, `kernel`, `elementwise` or `copy`."""


class CoreCost:
    """Cost of operations on one device's core.

    Args:
      module: The program.
      topology: The slices.
    """

    def __init__(self, module: Module, topology: SliceTopology) -> None:
        self._module = module
        self._clock = topology.clock_hz
        self._peak = topology.bf16_flops / topology.devices_per_chip
        self._bandwidth = topology.hbm_bandwidth / topology.devices_per_chip
        self._kernel_flops = self._peak * KERNEL_EFFICIENCY[topology.generation]

    def work(self, instruction: Instruction, operands: Sequence[Instruction]) -> Work:
        """The work of one call.

        Args:
          instruction: Any that runs on the core.
          operands: The instructions that make its operands.
        """
        inner = self._module.inner(instruction) or [instruction]
        flops = sum(_product_flops(part, self._operands(part, inner, operands)) for part in inner)
        num_bytes = self._traffic(instruction, operands)
        if instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes:
            flops = _attention_flops(instruction, operands)
            seconds = max(flops / self._kernel_flops, num_bytes / self._bandwidth)
            return Work(seconds, flops, num_bytes, "kernel")
        cycles = instruction.estimated_cycles
        seconds = max(flops / self._peak, num_bytes / self._bandwidth) if cycles is None else cycles / self._clock
        without_flops = "copy" if instruction.opcode in _MOVES else "elementwise"
        return Work(seconds, flops, num_bytes, "matmul" if flops else without_flops)

    def copy_seconds(self, num_bytes: int) -> float:
        """Time of a copy from or to HBM."""
        return num_bytes / self._bandwidth

    @staticmethod
    def _operands(part: Instruction, inner: list[Instruction], operands: Sequence[Instruction]) -> list[Instruction]:
        if len(inner) == 1:
            return list(operands)
        names = {instruction.name: instruction for instruction in inner}
        return [names[name] for name in part.operands if name in names]

    def _traffic(self, instruction: Instruction, operands: Sequence[Instruction]) -> int:
        """HBM bytes that a call reads and writes. Of what is only sliced or updated in place, the part counts."""
        called = self._module.computations.get(instruction.called.get("calls", ""))
        if called is None:
            return _hbm(instruction.arrays) + sum(_hbm(operand.arrays) for operand in operands)
        users: dict[str, list[Instruction]] = {}
        for part in called.instructions:
            for name in part.operands:
                users.setdefault(name, []).append(part)
        parameters = [part for part in called.instructions if part.opcode == "parameter"]
        parameters.sort(key=lambda part: int(part.arguments))
        read = 0
        for parameter, operand in zip(parameters, operands, strict=False):
            if not _hbm(operand.arrays):
                continue
            uses = users.get(parameter.name, [])
            first = bool(uses) and all(use.operands[0] == parameter.name for use in uses)  # not as an index
            if first and all(use.opcode in ("dynamic-slice", "slice", "gather") for use in uses):
                read += sum(use.bytes for use in uses)
            elif first and all(use.opcode == "dynamic-update-slice" for use in uses):
                continue  # updated in place
            else:
                read += _hbm(operand.arrays)
        written = _hbm(instruction.arrays)
        updates = [part for part in called.instructions if part.opcode == "dynamic-update-slice"]
        if updates and written:
            whole = sum(part.bytes for part in updates)
            pieces = sum(called.by_name[part.operands[1]].bytes for part in updates)
            written = max(written - whole, 0) + pieces
        return read + written


def _hbm(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays if array.memory_space == 0)


def _product_flops(instruction: Instruction, operands: Sequence[Instruction]) -> float:
    """Multiply-adds of a dot or a convolution, times two."""
    if instruction.opcode not in ("convolution", "dot") or len(operands) < 2:
        return 0.0
    out = math.prod(instruction.arrays[0].dims)
    right = operands[1].arrays[0].dims
    if instruction.opcode == "dot":
        match = re.search(r"rhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = map(int, filter(None, match[1].split(","))) if match else ()
        return 2.0 * out * math.prod(right[dim] for dim in dims)
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    if labels is None:
        return 0.0
    # A spatial dim of a matrix product is a batch dim in disguise (dilated or with as many groups), and contracts
    # nothing; one that is summed over has a window without padding.
    contracted = right[labels[1].index("i")]
    if "pad=" not in instruction.attributes and "lhs_dilate=" not in instruction.attributes:
        contracted *= math.prod(size for size, label in zip(right, labels[1], strict=True) if label.isdigit())
    return 2.0 * out * contracted


def _attention_flops(instruction: Instruction, operands: Sequence[Instruction]) -> float:
    """FLOPs of a splash attention kernel over a causal mask; 0 for another kernel.

    Queries are its first operand of three dims with a floating dtype: [heads, seq, head_dim].
    """
    products = next((n for part, n in _ATTENTION if f"splash_mha{part}" in instruction.name), 0)
    if not products:
        return 0.0
    arrays = [operand.arrays[0] for operand in operands]
    queries = next((each for each in arrays if len(each.dims) >= 3 and each.dtype in ("bf16", "f32")), None)
    if queries is None:
        return 0.0
    *heads, seq, head_dim = queries.dims
    return products * 2.0 * math.prod(heads) * seq * seq * head_dim / 2


@dataclass(frozen=True)
class Route:
    """Where a collective runs."""

    axes: tuple[str, ...]
    """Mesh axes; empty if its groups are no product of axes."""
    group_size: int
    num_slices: int
    """Slices that a group spans."""
    ici_size: int
    """Devices of a group within one slice."""
    ici_bandwidth: float
    """Bytes/s that a device sends over all links that the group can use."""
    hops: int
    """Chips that the farthest message passes."""
    width: int
    """Chips of a group within one slice along each dim that it spans, added up."""


class NetworkCost:
    """Cost of collectives.

    Args:
      topology: The slices.
      mesh: Over their devices, by our ids.
    """

    def __init__(self, topology: SliceTopology, mesh: Mesh) -> None:
        self._topology, self._mesh = topology, mesh
        self._link = topology.ici_link_bandwidth * LINK_EFFICIENCY
        self._dcn = topology.dcn_bandwidth / topology.devices_per_chip
        self._routes: dict[tuple[int, ...] | None, Route] = {}

    def route(self, instruction: Instruction) -> Route:
        """Where a collective runs."""
        groups = replica_groups(instruction)
        if instruction.opcode.startswith("collective-permute"):
            return self._permute_route(groups or [])
        key = None if groups is None else tuple(groups[0])
        if key not in self._routes:
            one_slice = self._mesh.size // self._topology.num_slices  # a program is that of one slice
            self._routes[key] = self._route(range(one_slice) if key is None else key)
        return self._routes[key]

    def seconds(self, kind: str, num_bytes: int, route: Route) -> float:
        """Time of one call.

        Args:
          kind: One of `COLLECTIVES`.
          num_bytes: Of the gathered result, of what is reduced, or of what a device sends in all, on one device.
          route: Where it runs.
        """
        if kind == "collective-permute":
            if route.num_slices > 1:
                return num_bytes / self._dcn + DCN_LATENCY_S
            return num_bytes / route.ici_bandwidth + route.hops * HOP_LATENCY_S
        if kind == "all-to-all" and route.num_slices > 1:
            share = (route.num_slices - 1) / route.num_slices
            return num_bytes * share / self._dcn + DCN_LATENCY_S
        # In an all-to-all over a ring, a message passes a quarter of its chips on average; within a chip, none.
        passes = {"all-reduce": 2.0, "all-to-all": max(0.25 * route.width, 0.5)}.get(kind, 1.0)
        seconds = 0.0
        if route.ici_size > 1:
            share = (route.ici_size - 1) / route.ici_size
            seconds += passes * (num_bytes * share / route.ici_bandwidth + route.hops * HOP_LATENCY_S)
        if route.num_slices > 1:
            # Within a slice first, so that a chip sends only its part of the result over the slower network.
            part = num_bytes / route.ici_size * (route.num_slices - 1) / route.num_slices
            seconds += passes * (part / self._dcn + DCN_LATENCY_S)
        return seconds

    def _route(self, group: Sequence[int]) -> Route:
        places = [self._topology.place(device) for device in group]
        num_slices = len({slice_index for slice_index, _ in places})
        home = [place for slice_index, place in places if slice_index == places[0][0]]
        bandwidth, hops, width = 0.0, 0, 0
        for dim, size in enumerate(self._topology.ici_shape):
            used = sorted({place[dim] for place in home})
            if len(used) == 1:
                continue
            span = used[-1] - used[0] + 1
            ring = len(used) == size and self._topology.wraps(dim)
            # In a line the link at its end carries all that the last chip needs; chips in between that belong to other
            # groups share the links.
            bandwidth += (2 if ring else 1) * self._link * len(used) / span
            hops += span // 2 if ring else span - 1
            width += len(used)
        # The devices of a chip share its links, also if they are in groups of their own.
        bandwidth *= len(home) / len(set(home)) / self._topology.devices_per_chip
        ici_size = len(group) // num_slices
        return Route(
            self._axes(group),
            len(group),
            num_slices,
            ici_size,
            bandwidth or self._topology.hbm_bandwidth,  # the devices of one chip
            hops,
            width,
        )

    def _permute_route(self, pairs: Sequence[Sequence[int]]) -> Route:
        distance, crosses = 0, False
        moving: set[str] = set()
        for source, target in (pair for pair in pairs if pair[0] != pair[-1]):
            (slice_a, a), (slice_b, b) = self._topology.place(source), self._topology.place(target)
            crosses |= slice_a != slice_b
            hops = 0
            for dim, size in enumerate(self._topology.ici_shape):
                apart = abs(a[dim] - b[dim])
                hops += min(apart, size - apart) if self._topology.wraps(dim) else apart
            distance = max(distance, hops)
            here, there = self._mesh.coordinates(source), self._mesh.coordinates(target)
            moving |= {axis for axis in self._mesh.axis_names if here[axis] != there[axis]}
        axes = tuple(axis for axis in self._mesh.axis_names if axis in moving)
        size = self._mesh.axis_size(axes) if axes else 1
        link = self._link / self._topology.devices_per_chip
        return Route(axes, size, 2 if crosses else 1, size, link, distance, 2)

    def _axes(self, group: Sequence[int]) -> tuple[str, ...]:
        places = [self._mesh.coordinates(device) for device in group]
        axes = tuple(axis for axis in self._mesh.axis_names if len({place[axis] for place in places}) > 1)
        # Of an axis that spans slices, a group may have the part in one slice, or the part over slices.
        parts = (self._mesh.shape, self._mesh.ici, self._mesh.dcn)
        return axes if any(math.prod(part[axis] for axis in axes) == len(group) for part in parts) else ()
