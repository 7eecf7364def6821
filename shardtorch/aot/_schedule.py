"""The step as it is predicted to run: a walk through the compiler's schedule, with one clock.

Operations run on the core in the order of the schedule. What the compiler started beside them (a copy between HBM and
vector memory, a collective with a start and an end, or one that it fused with other work) goes on meanwhile, and the
core waits where its result is needed. A loop's body is walked once, and counts as often as it runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardtorch.aot._cost import COLLECTIVES, CoreCost, NetworkCost, Route
from shardtorch.aot._hlo import Computation, Instruction, Module

_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all",
         "iota", "copy-start", "opt-barrier", "domain", "add-dependency", "bitcast-convert"}  # fmt: skip
"""Opcodes that take no time of their own."""
_WRAPPERS = ("async-start", "call-start")


@dataclass
class CoreUse:
    """An operation on the core, over all its calls."""

    instruction: Instruction
    category: str
    count: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: int = 0


@dataclass
class NetworkUse:
    """A collective, over all its calls."""

    instruction: Instruction
    kind: str
    bytes: int
    """Payload of one call."""
    route: Route
    count: int = 0
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass
class Span:
    """A stretch of time."""

    name: str
    lane: str
    category: str
    start: float
    duration: float
    instruction: Instruction
    repeats: tuple[tuple[int, float], ...] = ()
    """For each loop around it, the outermost first: how often it runs, and seconds from one iteration to the next."""


@dataclass
class Schedule:
    """What the walk found."""

    seconds: float = 0.0
    core: dict[str, CoreUse] = field(default_factory=dict)
    network: dict[str, NetworkUse] = field(default_factory=dict)
    stalls: float = 0.0
    """Time that the core waits for copies from HBM, in seconds."""
    spans: list[Span] = field(default_factory=list)
    unpriced_kernels: set[str] = field(default_factory=set)


@dataclass
class _Pending:
    """Something under way beside the core."""

    done: float
    use: NetworkUse | None
    """None for a copy."""


class Simulation:
    """Walks a module.

    Args:
      module: Scheduled.
      core: What operations cost.
      network: What collectives cost.
    """

    def __init__(self, module: Module, core: CoreCost, network: NetworkCost) -> None:
        self._module, self._core, self._network = module, core, network
        self._fused_channels: dict[str, list[Instruction]] = {}

    def run(self) -> Schedule:
        """The whole step."""
        self._result = Schedule()
        self._result.seconds = self._walk(self._module.entry, 0.0, 1)
        return self._result

    def _walk(self, computation: Computation, now: float, times: int) -> float:
        """Runs a computation from `now`, each of its operations `times` times, and returns when it ends."""
        pending: dict[str, _Pending] = {}
        last_use = self._last_use_of_channels(computation)
        copies_free = network_free = now
        for instruction in computation.instructions:
            opcode, name = instruction.opcode, instruction.name
            if opcode == "while":
                trips = self._module.trip_count(instruction)
                body = self._module.computations[instruction.called["body"]]
                start, first = now, len(self._result.spans)
                period = self._walk(body, start, times * trips) - start
                for span in self._result.spans[first:]:
                    span.repeats = ((trips, period), *span.repeats)
                now = start + period * trips
                copies_free = network_free = now
            elif opcode in ("call", "conditional"):
                branches = [self._module.computations[called] for called in instruction.called.values()]
                if len(branches) > 1:  # one of them runs: the one that takes longest
                    branches = [max(branches, key=self._duration)]
                for branch in branches:
                    now = self._walk(branch, now, times)
            elif opcode in ("copy-start", "slice-start"):
                copies_free = max(now, copies_free) + self._core.copy_seconds(self._moved(instruction))
                pending[name] = _Pending(copies_free, None)
            elif (kind := _collective(opcode)) is not None and not opcode.endswith("-done"):
                use = self._network_use(instruction, kind, computation)
                network_free = self._send(use, max(now, network_free), times)
                if opcode.endswith("-start"):
                    pending[name] = _Pending(network_free, use)
                else:
                    use.exposed += (network_free - now) * times
                    now = network_free
            elif opcode in _WRAPPERS:  # what another core of the chip does, as a computation of its own
                for part in self._module.inner(instruction):
                    if (kind := _collective(part.opcode)) is not None:
                        use = self._network_use(part, kind, None)
                        network_free = self._send(use, max(now, network_free), times)
                        pending[name] = _Pending(network_free, use)
            elif opcode.endswith("-update"):
                if (waited := pending.pop(instruction.operands[0], None)) is not None:
                    pending[name] = waited
            elif opcode.endswith("-done"):
                waited = pending.pop(instruction.operands[0], None) if instruction.operands else None
                now = self._wait(waited, now, times)
            elif (channel := self._channel(instruction)) is not None:
                inner = self._fused_channels[name]
                if channel not in pending:
                    use = self._network_use(inner[0], _collective(inner[0].opcode) or "all-gather", None)
                    network_free = self._send(use, max(now, network_free), times)
                    pending[channel] = _Pending(network_free, use)
                now = self._compute(instruction, computation, now, times)
                if last_use[channel] == name:
                    now = self._wait(pending.pop(channel), now, times)
            elif opcode not in _FREE:
                now = self._compute(instruction, computation, now, times)
        return now

    def _duration(self, computation: Computation) -> float:
        """Seconds of one run, which does not count."""
        kept, self._result = self._result, Schedule()
        try:
            return self._walk(computation, 0.0, 1)
        finally:
            self._result = kept

    def _compute(self, instruction: Instruction, computation: Computation, now: float, times: int) -> float:
        operands = [computation.by_name[o] for o in instruction.operands if o in computation.by_name]
        work = self._core.work(instruction, operands)
        use = self._result.core.setdefault(instruction.name, CoreUse(instruction, work.category))
        use.count += times
        use.seconds += work.seconds * times
        use.flops += work.flops * times
        use.bytes += work.bytes * times
        if work.category == "kernel" and not work.flops:
            self._result.unpriced_kernels.add(instruction.name)
        if work.seconds:
            self._result.spans.append(Span(instruction.name, "core", work.category, now, work.seconds, instruction))
        return now + work.seconds

    def _network_use(self, instruction: Instruction, kind: str, computation: Computation | None) -> NetworkUse:
        route = self._network.route(instruction)
        operands = [] if computation is None else [
            computation.by_name[o] for o in instruction.operands if o in computation.by_name
        ]  # fmt: skip
        num_bytes = _payload(instruction, kind, operands, route.group_size)
        return self._result.network.setdefault(instruction.name, NetworkUse(instruction, kind, num_bytes, route))

    def _send(self, use: NetworkUse, begin: float, times: int) -> float:
        """Adds a call that begins then, and returns when it ends."""
        seconds = self._network.seconds(use.kind, use.bytes, use.route)
        use.count += times
        use.seconds += seconds * times
        name = use.instruction.name
        self._result.spans.append(Span(name, "network", use.kind, begin, seconds, use.instruction))
        return begin + seconds

    def _wait(self, waited: _Pending | None, now: float, times: int) -> float:
        if waited is None or waited.done <= now:
            return now
        if waited.use is None:
            self._result.stalls += (waited.done - now) * times
        else:
            waited.use.exposed += (waited.done - now) * times
        return waited.done

    def _moved(self, instruction: Instruction) -> int:
        """Bytes that a copy moves from or to HBM."""
        arrays = [array for array in instruction.arrays if array.dims]
        return min((array.bytes for array in arrays), default=0)

    def _channel(self, instruction: Instruction) -> str | None:
        """The channel of the collective that a fusion has a part in; None for most."""
        if instruction.opcode != "fusion":
            return None
        if instruction.name not in self._fused_channels:
            self._fused_channels[instruction.name] = [
                part for part in self._module.inner(instruction) if _collective(part.opcode) is not None
            ]
        inner = self._fused_channels[instruction.name]
        return _channel_id(inner[0]) if inner else None

    def _last_use_of_channels(self, computation: Computation) -> Mapping[str, str]:
        last: dict[str, str] = {}
        for instruction in computation.instructions:
            if (channel := self._channel(instruction)) is not None:
                last[channel] = instruction.name
        return last


def _collective(opcode: str) -> str | None:
    kind = opcode.removesuffix("-start").removesuffix("-done")
    return kind if kind in COLLECTIVES else None


def _channel_id(instruction: Instruction) -> str:
    _, found, rest = instruction.attributes.partition("channel_id=")
    return rest.partition(",")[0] if found else instruction.name


def _payload(instruction: Instruction, kind: str, operands: list[Instruction], group_size: int) -> int:
    """Bytes of one call on one device: of the gathered result, of what is reduced, or of what is sent."""
    arrays = [array for array in instruction.arrays if array.dims]
    total = sum(array.bytes for array in arrays)
    if kind == "reduce-scatter":
        return sum(operand.bytes for operand in operands) or total * group_size
    if instruction.opcode.endswith("-start") and kind != "all-reduce":  # the result holds operands and results
        if kind == "all-gather":
            return sum(sorted((array.bytes for array in arrays), reverse=True)[: max(1, len(arrays) // 2)])
        return total // 2
    return total
