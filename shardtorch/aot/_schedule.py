"""The step as it is predicted to run: a walk through the compiler's schedule, with one clock.

Operations run on the core in the order of the schedule. What the compiler started beside them (a copy between HBM and
vector memory, a collective with a start and an end, or one that it fused with other work) goes on meanwhile, and the
core waits where its result is needed. A network carries one collective after the other, so the core may wait for an
earlier one too; the one between slices goes on beside the one within. A loop's body is walked once, from networks that
are free, and counts as often as it runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardtorch.aot._cost import COLLECTIVES, CoreCost, NetworkCost, Route
from shardtorch.aot._hlo import Computation, Instruction, Module
from shardtorch.aot._slices import collective_over_slices

_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all",
         "iota", "opt-barrier", "domain", "add-dependency", "bitcast-convert"}  # fmt: skip
"""Opcodes that take no time of their own."""
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast")
"""Custom calls that only say where a value lies."""
_ASYNC_FUSION = ("AsyncCollectiveStart", "AsyncCollectiveDone")
"""Custom calls of fusions that only start or await a collective that other fusions carry on."""
_WRAPPERS = ("async-start", "call-start")
_REDUCE_SCATTER = "all-reduce-scatter"
"""How libtpu writes one that nothing runs beside: a fusion of an all-reduce with a slice of its result."""


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
    unknown_loops: set[str] = field(default_factory=set)
    """Those that count once, as nothing says how often they run."""


@dataclass
class _Network:
    """One network, under way."""

    free: float
    """When the next collective can begin."""
    sent: list[tuple[float, float, NetworkUse]] = field(default_factory=list)
    """When each collective that may not have ended begins and ends."""


@dataclass
class _Pending:
    """Something under way beside the core."""

    done: float
    network: _Network | None
    """None for a copy."""


class _Beside:
    """What goes on beside the core, which nothing does at first."""

    def __init__(self, now: float) -> None:
        self.copies_free = now
        self.ici, self.dcn = _Network(now), _Network(now)

    def wait_until(self, now: float) -> None:
        """Lets nothing new begin before then."""
        self.copies_free = max(now, self.copies_free)
        for network in (self.ici, self.dcn):
            network.free = max(now, network.free)


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
        self._result.seconds = self._walk(self._module.entry, 0.0, 1, _Beside(0.0))
        return self._result

    def _walk(self, computation: Computation, now: float, times: int, beside: _Beside) -> float:
        """Runs a computation from `now`, each of its operations `times` times, and returns when it ends."""
        pending: dict[str, _Pending] = {}
        halves: dict[str, Instruction] = {}
        last_use = self._last_use_of_channels(computation)
        for instruction in computation.instructions:
            opcode, name = instruction.opcode, instruction.name
            if opcode == "while":
                now = self._loop(instruction, now, times)
                beside.wait_until(now)
            elif opcode in ("call", "conditional"):
                branches = [self._module.computations[called] for called in instruction.called.values()]
                if len(branches) > 1:  # one of them runs: the one that takes longest
                    branches = [max(branches, key=self._duration)]
                for branch in branches:
                    now = self._walk(branch, now, times, beside)
            elif (kind := _collective(opcode)) is not None and not opcode.endswith("-done"):
                sent = self._send(self._network_use(instruction, kind, computation), now, times, beside)
                if opcode.endswith("-start"):
                    pending[name] = sent
                else:
                    now = self._wait(sent, now, times)
            elif opcode in _WRAPPERS:  # what another core of the chip does, as a computation of its own
                for part in self._module.inner(instruction):
                    if (kind := _collective(part.opcode)) is not None:
                        pending[name] = self._send(self._network_use(part, kind, None), now, times, beside)
            elif opcode in ("send", "recv"):  # with another slice, once both are ready
                if (other := halves.pop(instruction.operands[-1], None)) is None:
                    halves[instruction.operands[-1]] = instruction
                    continue
                recv = instruction if opcode == "recv" else other
                if (across := collective_over_slices(recv, self._module.num_partitions)) is not None:
                    use = self._network_use(across, across.opcode, None)
                    pending[recv.name] = self._send(use, now, times, beside)
            elif opcode.endswith("-start"):
                beside.copies_free = max(now, beside.copies_free) + self._core.copy_seconds(self._moved(instruction))
                pending[name] = _Pending(beside.copies_free, None)
            elif opcode.endswith("-update"):
                if (waited := pending.pop(instruction.operands[0], None)) is not None:
                    pending[name] = waited
            elif opcode.endswith("-done"):
                waited = pending.pop(instruction.operands[0], None) if instruction.operands else None
                now = self._wait(waited, now, times)
            elif (channel := self._channel(instruction)) is not None:
                inner = self._fused_channels[name]
                if instruction.called["calls"].startswith(_REDUCE_SCATTER):
                    use = self._network_use(inner[0], "reduce-scatter", None, inner[0].bytes)
                    now = self._wait(self._send(use, now, times, beside), now, times)
                    continue
                if channel not in pending:
                    use = self._network_use(inner[0], _collective(inner[0].opcode) or "all-gather", None)
                    pending[channel] = self._send(use, now, times, beside)
                if not any(_calls(part, _ASYNC_FUSION) for part in self._module.inner(instruction)):
                    now = self._compute(instruction, computation, now, times)
                if last_use[channel] == name:
                    now = self._wait(pending.pop(channel), now, times)
            elif opcode not in _FREE and not _calls(instruction, _FREE_CALLS):
                now = self._compute(instruction, computation, now, times)
        return now

    def _loop(self, loop: Instruction, start: float, times: int) -> float:
        """Runs a loop, and returns when it ends."""
        trips = self._module.trip_count(loop)
        if trips is None:
            self._result.unknown_loops.add(loop.name)
            trips = 1
        body = self._module.computations[loop.called["body"]]
        first = len(self._result.spans)
        period = self._walk(body, start, times * trips, _Beside(start)) - start
        for span in self._result.spans[first:]:
            span.repeats = ((trips, period), *span.repeats)
        return start + period * trips

    def _duration(self, computation: Computation) -> float:
        """Seconds of one run, which does not count."""
        kept, self._result = self._result, Schedule()
        try:
            return self._walk(computation, 0.0, 1, _Beside(0.0))
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

    def _network_use(
        self, instruction: Instruction, kind: str, computation: Computation | None, num_bytes: int | None = None
    ) -> NetworkUse:
        route = self._network.route(instruction)
        operands = [] if computation is None else [
            computation.by_name[o] for o in instruction.operands if o in computation.by_name
        ]  # fmt: skip
        if num_bytes is None:
            num_bytes = _payload(instruction, kind, operands, route.group_size)
        return self._result.network.setdefault(instruction.name, NetworkUse(instruction, kind, num_bytes, route))

    def _send(self, use: NetworkUse, now: float, times: int, beside: _Beside) -> _Pending:
        """Adds a call that is begun now."""
        network = beside.ici if use.route.num_slices == 1 else beside.dcn
        begin, seconds = max(now, network.free), self._network.seconds(use.kind, use.bytes, use.route)
        use.count += times
        use.seconds += seconds * times
        name = use.instruction.name
        self._result.spans.append(Span(name, "network", use.kind, begin, seconds, use.instruction))
        network.free = begin + seconds
        network.sent.append((begin, network.free, use))
        return _Pending(network.free, network)

    def _wait(self, waited: _Pending | None, now: float, times: int) -> float:
        """Lets the core wait, and returns until when. What the network carries meanwhile is exposed."""
        if waited is None or waited.done <= now:
            return now
        if waited.network is None:
            self._result.stalls += (waited.done - now) * times
            return waited.done
        for begin, end, use in waited.network.sent:
            use.exposed += max(min(end, waited.done) - max(begin, now), 0.0) * times
        waited.network.sent = [call for call in waited.network.sent if call[1] > waited.done]
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


def _calls(instruction: Instruction, targets: tuple[str, ...]) -> bool:
    """Whether it is a custom call of one of these."""
    return instruction.opcode == "custom-call" and any(
        f'custom_call_target="{target}"' in instruction.attributes for target in targets
    )


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
