"""`compile_report`: from a user's step to what it would be like on a slice."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from shardtorch.aot._advice import time_advice
from shardtorch.aot._cache import cached_compile
from shardtorch.aot._calibration import efficiency_of
from shardtorch.aot._collectives import collectives_of
from shardtorch.aot._cost import KERNEL_EFFICIENCY, LINK_EFFICIENCY, CoreCost, NetworkCost
from shardtorch.aot._hlo import Module
from shardtorch.aot._layout import layout_notes
from shardtorch.aot._memory import advice_for_memory, memory_of, out_of_memory
from shardtorch.aot._origins import Origins
from shardtorch.aot._replication import involuntary_replications
from shardtorch.aot._report import CompileReport, Event, Operation, StepTime
from shardtorch.aot._schedule import Schedule, Simulation
from shardtorch.aot._state import State
from shardtorch.engine import Lowered, running
from shardtorch.engine.libtpu import Compiled, OutOfMemory
from shardtorch.errors import EngineUnavailableError, ShardingError, TopologyError
from shardtorch.mesh import Mesh, SliceTopology

_MAX_OPERATIONS = 400
_LARGE_BYTES = 2**20
"""More than a constant of a step has."""


def compile_report(
    step: Callable[..., Any],
    state: Any,
    batch: Sequence[Tensor],
    topology: SliceTopology | str,
    *,
    title: str = "step",
    tokens_per_step: int | None = None,
    model_flops: float | None = None,
    model_flops_full_attention: float | None = None,
    flags: Mapping[str, str] | None = None,
    cache: Path | None = None,
) -> CompileReport:
    """Compiles a training step for TPU slices that need not exist, and says what it would be like there.

    Everything is built as for a run, on the engine that `start("libtpu", topology=...)` gives: there, tensors take no
    memory.

    Args:
      step: Called once, with `batch`; may update the state in place. The same function that trains.
      state: What it updates: `(model, optimizer)`, or any nesting of modules, optimizers and tensors.
      batch: Its arguments, made with `engine.zeros(shape, dtype, sharding)`.
      topology: The slices, as `start` was told.
      title: What the report calls it.
      tokens_per_step: Over all chips, for throughput.
      model_flops: What the model needs for one step over all chips, causal attention counted half, in FLOP, for MFU.
      model_flops_full_attention: The same with attention counted whole.
      flags: Further options of the compiler, by name.
      cache: Folder that keeps what was compiled, by graph, flags and libtpu's version; None compiles anew.

    Returns:
      The report; if memory does not suffice, one with `fits=False` and without times.

    Raises:
      EngineUnavailableError: The engine `libtpu` isn't running, or the extra `plan` isn't installed.
      TopologyError: The topology is another one, does not exist, or the mesh does not fit it.
      ShardingError: What the step works on lies on several meshes, or was not made by the engine.
      ShardtorchError: The step reads a value while it is traced, or the compiler refuses it.
    """
    topology = SliceTopology.parse(topology) if isinstance(topology, str) else topology
    engine = running()
    if engine.name != "libtpu":
        raise EngineUnavailableError(
            "a step is planned on the engine 'libtpu', whose tensors take no memory.",
            got=f"the engine {engine.name!r}",
            fix=f"build the step after shardtorch.start('libtpu', topology={str(topology)!r}).",
        )
    from shardtorch.engine.libtpu._engine import LibtpuEngine  # which loads torch_xla

    assert isinstance(engine, LibtpuEngine)
    if engine.topology != topology:
        raise TopologyError(
            "a step is compiled for the slices that it was built for.",
            got=f"{topology}, and the engine's {engine.topology}",
            fix=f"call shardtorch.start('libtpu', topology={str(topology)!r}) and build the step again.",
        )
    named = State(state)
    start = time.monotonic()
    lowered = engine.lower(step, batch, named.tensors, named.modules)
    trace_s = time.monotonic() - start
    _check_state(lowered, named, State(state))
    topology.check(_mesh(lowered))
    compiled = cached_compile(lowered, topology, flags, cache)
    report = analyse(compiled, lowered, topology, named.kinds)
    return replace(
        report,
        title=title,
        trace_s=trace_s,
        tokens_per_step=tokens_per_step,
        model_flops=model_flops,
        model_flops_full_attention=model_flops_full_attention,
    )


def analyse(
    compiled: Compiled | OutOfMemory, lowered: Lowered, topology: SliceTopology, kinds: Mapping[str, Any]
) -> CompileReport:
    """What the compiler's output says.

    Args:
      compiled: The output.
      lowered: What was compiled.
      topology: For which slices.
      kinds: Of the state's tensors, by name.
    """
    mesh = _mesh(lowered)
    facts: dict[str, Any] = {
        "title": "step",
        "topology": str(topology),
        "mesh": _mesh_text(mesh),
        "num_chips": topology.num_chips,
        "libtpu_version": compiled.libtpu_version,
        "peak_flops": topology.bf16_flops,
        "hbm_bandwidth": topology.hbm_bandwidth,
        "trace_s": 0.0,
        "compile_s": compiled.compile_s,
        "layout": layout_notes(lowered, kinds),
    }
    if isinstance(compiled, OutOfMemory):
        memory, buffers = out_of_memory(compiled, lowered, topology, kinds)
        advice = advice_for_memory(memory, buffers)
        return CompileReport(**facts, fits=False, memory=memory, buffers=buffers, advice=advice)
    module = Module.parse(compiled.text)
    origins = Origins(module, lowered.origins)
    memory, buffers = memory_of(compiled, lowered, topology, kinds)
    schedule = Simulation(module, CoreCost(module, topology), NetworkCost(topology, mesh)).run()
    efficiency, _ = efficiency_of(topology.generation)
    report = CompileReport(
        **facts,
        fits=memory.headroom >= 0,
        memory=memory,
        step_time=_step_time(schedule, topology, efficiency),
        collectives=collectives_of(schedule, origins, efficiency, topology.devices_per_chip),
        operations=_operations(schedule, origins, topology, efficiency),
        buffers=buffers,
        events=_events(schedule, origins, efficiency),
        assumptions=_assumptions(schedule, topology, efficiency),
    )
    replicated = involuntary_replications(compiled.log, lowered.origins)
    return replace(report, advice=(*advice_for_memory(memory, buffers), *replicated, *time_advice(report)))


def _check_state(lowered: Lowered, before: State, after: State) -> None:
    """Checks that all that a step keeps between calls is in its state.

    Raises:
      ShardingError: It made a part of it itself, or reads something large that isn't.
    """
    if made := sorted(after.tensors.keys() - before.tensors.keys()):
        raise ShardingError(
            "the state of a step must be there before it is called.",
            got=f"the step made {', '.join(made[:3])}" + (f" and {len(made) - 3} more" if len(made) > 3 else ""),
            fix="make an optimizer's state first: optimizer = shardtorch.shard_optimizer(optimizer, model).",
        )
    for argument in lowered.arguments:
        size = math.prod(argument.shape) * argument.dtype.itemsize
        if argument.sharding is None and size > _LARGE_BYTES:
            raise ShardingError(
                "what a step reads must be in its state or its batch.",
                got=f"another tensor of shape {list(argument.shape)}, {argument.dtype}",
                fix="pass everything that holds tensors as state, such as (model, optimizer).",
            )


def _mesh(lowered: Lowered) -> Mesh:
    """The mesh of what a step works on.

    Raises:
      ShardingError: There are several, or nothing is sharded.
    """
    meshes = {argument.sharding.mesh for argument in lowered.arguments if argument.sharding is not None}
    if len(meshes) != 1:
        raise ShardingError(
            "what a step works on lies on one mesh.",
            got=" and ".join(sorted(map(repr, meshes))) or "nothing that is sharded",
            fix="make the state and the batch with shardings over the same mesh.",
        )
    return meshes.pop()


def _mesh_text(mesh: Mesh) -> str:
    dcn = [f"{axis}={factor}" for axis, factor in mesh.dcn.items() if factor > 1]
    text = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"{text} (DCN: {','.join(dcn)})" if dcn else text


def _bound(flops: float, num_bytes: int, topology: SliceTopology) -> str:
    """What limits an operation: the ratio of its two least times."""
    return "memory" if num_bytes / topology.hbm_bandwidth > flops / topology.bf16_flops else "compute"


def _step_time(schedule: Schedule, topology: SliceTopology, efficiency: float) -> StepTime:
    shares = {"compute": 0.0, "memory": schedule.stalls}
    for use in schedule.core.values():
        shares[_bound(use.flops, use.bytes, topology)] += use.seconds
    exposed = sum(use.exposed for use in schedule.network.values())
    whole = sum(use.seconds for use in schedule.network.values())
    hidden = 0.0 if math.isclose(whole, exposed) else whole - exposed
    return StepTime(
        compute=shares["compute"] / efficiency,
        memory=shares["memory"] / efficiency,
        communication=exposed / efficiency,
        hidden_communication=hidden / efficiency,
        efficiency=efficiency,
    )


def _operations(
    schedule: Schedule, origins: Origins, topology: SliceTopology, efficiency: float
) -> tuple[Operation, ...]:
    """Those that take longest; the last one stands for all others, so that the sum is whole."""
    uses = sorted(schedule.core.values(), key=lambda use: -use.seconds)
    found = [
        Operation(
            name=use.instruction.name,
            category=use.category,  # pyright: ignore[reportArgumentType]
            count=use.count,
            seconds=use.seconds / efficiency,
            flops=use.flops * topology.devices_per_chip,
            bytes=use.bytes * topology.devices_per_chip,
            bound=_bound(use.flops, use.bytes, topology),  # pyright: ignore[reportArgumentType]
            origin=origins.of(use.instruction),
        )
        for use in uses[:_MAX_OPERATIONS]
    ]
    if rest := uses[_MAX_OPERATIONS:]:
        found.append(
            Operation(
                name=f"{len(rest)} others",
                category="elementwise",
                count=sum(use.count for use in rest),
                seconds=sum(use.seconds for use in rest) / efficiency,
                flops=sum(use.flops for use in rest) * topology.devices_per_chip,
                bytes=sum(use.bytes for use in rest) * topology.devices_per_chip,
                bound="memory",
            )
        )
    return tuple(found)


def _events(schedule: Schedule, origins: Origins, efficiency: float) -> tuple[Event, ...]:
    return tuple(
        Event(
            name=span.name,
            lane=span.lane,  # pyright: ignore[reportArgumentType]
            category=span.category,
            start=span.start / efficiency,
            duration=span.duration / efficiency,
            repeats=tuple((trips, period / efficiency) for trips, period in span.repeats),
            origin=origins.of(span.instruction),
        )
        for span in schedule.spans
    )


def _assumptions(schedule: Schedule, topology: SliceTopology, efficiency: float) -> tuple[str, ...]:
    generation = topology.generation
    kernel, link = f"{KERNEL_EFFICIENCY[generation]:.0%}", f"{LINK_EFFICIENCY:.0%}"
    _, fitted = efficiency_of(generation)
    too_few = "" if fitted == generation else f", as there are too few of {generation}"
    found = [
        f"The core's time is the compiler's estimate of cycles at {topology.clock_hz / 1e9:.2f} GHz.",
        f"Attention kernels run at {kernel} of the bfloat16 peak, of the causal half of their FLOPs.",
        f"Links carry {link} of their published {topology.ici_link_bandwidth / 1e9:.0f} GB/s a direction.",
        f"All times are divided by {efficiency:.2f}, fitted on published step times of {fitted}{too_few}; "
        "those runs may recompute less than full remat.",
        "The host keeps up: it adds nothing to a step.",
    ]
    if names := sorted(schedule.unknown_loops):
        found.append(f"Loops that don't say how often they run count once: {', '.join(names)}.")
    if names := sorted(schedule.unpriced_kernels):
        found.append(f"Kernels whose work isn't known count their HBM traffic only: {', '.join(names)}.")
    return tuple(found)
