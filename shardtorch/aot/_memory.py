"""Where a chip's HBM goes at the peak of a step.

Everything comes from XLA's buffer assignment: sizes with the compiler's padding, and what is in use when temporaries
take most. The sum is what the compiler holds against its limit. Of the statistics of an executable (libtpu 0.0.40),
`peak_bytes` is the same without code and without what is lost between buffers, if no other memory, such as the vector
memory, has more in use; `temp_bytes` is more than the temporaries' allocation, by about what it calls fragmentation.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from shardtorch.aot._buffer_assignment import Program, Shape
from shardtorch.aot._quantities import bytes_text
from shardtorch.aot._report import Buffer, Memory
from shardtorch.aot._state import Kind
from shardtorch.engine import Argument, Lowered, Origin
from shardtorch.engine.libtpu import Compiled, OutOfMemory
from shardtorch.mesh import SliceTopology

# HBM that a program can use, in MiB per device. Measured with libtpu 0.0.40 for one host of each generation: a program
# that adds up one element of each argument, `jax.jit(lambda xs: sum(x[0] for x in xs))`, is compiled with ever finer
# bisected sizes, until the message says "Exceeded hbm capacity by 2.0K", with the size of arguments and program. Slices
# of several hosts have up to 0.2 MiB less.
_LIMIT_MIB = {"v4": 15614.5, "v5e": 16126.0, "v5p": 98041.0, "v6e": 31996.0, "tpu7x": 97020.0}

_MAX_BUFFERS = 100
_LISTED = re.compile(
    r"Size: (\S+)\n"
    r"(?: +Operator: op_name=\"(.*?)\".*\n)?"
    r" +Shape: (\w+\[[\d,]*\]).*\n"
    r"(?: +(?:Unpadded size|Extra memory).*\n)*"
    r" +XLA label: (\S+) = "
)
"""An allocation in the compiler's message: size, `op_name`, shape and name."""
_SCOPE = re.compile(r"~(\d+)~")
_STEPS_TO_ORIGIN = 60
_STOPS = {"dot", "convolution", "custom-call", "iota", "constant", "rng-bit-generator", "gather"}
"""What makes something new of its operands: no gradient passes through on its way to the update."""

_MOVES = {
    *("get-tuple-element", "tuple", "while", "parameter", "fusion", "call", "conditional", "optimization-barrier"),
    *("bitcast", "copy", "copy-start", "copy-done", "convert", "reshape", "transpose", "dynamic-update-slice"),
    *("async-start", "async-update", "async-done"),
}
"""What gives on what it gets, or what a called computation makes."""

_Node = tuple[int, tuple[int, ...]]
"""An instruction, and which part of its shape."""
_BufferKind = Literal["parameter", "gradient", "optimizer", "batch", "activation", "code"]


def memory_limit(topology: SliceTopology) -> int:
    """HBM that a program can use, in bytes per chip.

    >>> memory_limit(SliceTopology.parse("v5p:4x4x4")) / 2**30
    95.7431640625
    """
    return int(_LIMIT_MIB[topology.generation] * 2**20) * topology.devices_per_chip


def memory_of(
    compiled: Compiled, lowered: Lowered, topology: SliceTopology, kinds: Mapping[str, Kind]
) -> tuple[Memory, tuple[Buffer, ...]]:
    """Where HBM goes at the peak.

    Args:
      compiled: The program.
      lowered: What it was compiled from.
      topology: For which slices.
      kinds: Of the step's arguments by name; those that aren't in it are `batch`.

    Returns:
      The parts, and the buffers, largest first; the last ones stand for all smaller ones of a kind. Both add up to the
      same, per chip. Constants count as code, and what is lost between temporaries as activations.
    """
    program = Program.parse(compiled.buffer_assignment)
    return _in_total(_buffers(program, lowered, kinds), compiled.code_bytes, topology)


def out_of_memory(
    failure: OutOfMemory, lowered: Lowered, topology: SliceTopology, kinds: Mapping[str, Kind]
) -> tuple[Memory, tuple[Buffer, ...]]:
    """As `memory_of`, for a step that needs too much.

    Where the compiler gave up before it assigned buffers, arguments are counted without padding, and what its message
    says the program takes is all activations.
    """
    message = failure.message
    if failure.buffer_assignment:
        program = Program.parse(failure.buffer_assignment)
        return _in_total(_buffers(program, lowered, kinds), _size(message, r"overlays +([\d.]+[KMGT]?)"), topology)
    buffers = [
        _of_argument(argument, _itemsized(argument), str(_local_shape(argument)), kinds)
        for argument in lowered.arguments
    ]
    temporaries = _size(message, r"\n +program +([\d.]+[KMGT]?)")
    listed = _LISTED.findall(message)
    for size, op_name, shape, name in listed:
        buffers.append(Buffer(name, "activation", _bytes(size), shape, _scope(op_name, lowered) or Origin()))
        temporaries -= buffers[-1].bytes
    buffers.append(Buffer("other temporaries", "activation", max(temporaries, 0), ""))
    return _in_total(buffers, 0, topology)


def advice_for_memory(memory: Memory, buffers: Iterable[Buffer]) -> tuple[str, ...]:
    """What would help a step that does not fit, or hardly, in the order of the bytes concerned.

    Args:
      memory: The parts.
      buffers: The largest at the peak.

    Returns:
      Nothing if more than a tenth of the limit is left.
    """
    if memory.headroom > 0.1 * memory.limit:
        return ()
    state = memory.parameters + memory.optimizer_state
    gradients: dict[str, int] = {}
    loss = layers = 0
    for buffer in buffers:
        module = buffer.origin.module
        if buffer.kind == "gradient":
            gradients[buffer.name] = gradients.get(buffer.name, 0) + buffer.bytes
        elif buffer.kind == "activation":
            loss += buffer.bytes * (module in ("loss", "head"))
            layers += buffer.bytes * (module == "layers" or ".*" in module)
    most = max(gradients, key=lambda name: gradients[name], default="")
    found = [
        (
            state,
            f"parameters and optimizer state take {bytes_text(state)} per chip: shard them over more chips, with a "
            "larger fsdp axis.",
        ),
        (
            memory.gradients,
            f"gradients take {bytes_text(memory.gradients)} per chip at the peak, {bytes_text(gradients.get(most, 0))} "
            f"of it for {most}: a larger fsdp axis shards them further once they are summed up, a tensor axis before.",
        ),
        (
            layers,
            f"what the layers keep takes {bytes_text(layers)} per chip at the peak: turn remat on if it is off, else "
            "give each chip fewer or shorter sequences.",
        ),
        (
            loss,
            f"what the loss keeps takes {bytes_text(loss)} per chip at the peak: cut the logits into more loss chunks, "
            "or shard the vocabulary over a tensor axis.",
        ),
        (
            memory.batch,
            f"other arguments and results of the step take {bytes_text(memory.batch)} per chip: shard them, or give "
            "each chip less of them.",
        ),
    ]
    return tuple(text for size, text in sorted(found, key=lambda pair: -pair[0]) if size > 0.1 * memory.total)


def _in_total(buffers: list[Buffer], code_bytes: int, topology: SliceTopology) -> tuple[Memory, tuple[Buffer, ...]]:
    """From what one device holds to the parts and the list for a chip."""
    buffers = [*buffers, Buffer("the program", "code", code_bytes, "")]
    per_chip = [
        Buffer(b.name, b.kind, b.bytes * topology.devices_per_chip, b.shape, b.origin) for b in buffers if b.bytes
    ]
    per_chip.sort(key=lambda buffer: -buffer.bytes)
    sums: dict[str, int] = dict.fromkeys(("parameter", "gradient", "optimizer", "batch", "activation", "code"), 0)
    for buffer in per_chip:
        sums[buffer.kind] += buffer.bytes
    memory = Memory(
        limit=memory_limit(topology),
        parameters=sums["parameter"],
        gradients=sums["gradient"],
        optimizer_state=sums["optimizer"],
        batch=sums["batch"],
        activations=sums["activation"],
        code=sums["code"],
    )
    listed, rest = per_chip[:_MAX_BUFFERS], per_chip[_MAX_BUFFERS:]
    for kind in sums:
        smaller = [buffer.bytes for buffer in rest if buffer.kind == kind]
        if smaller:
            listed.append(Buffer(f"{len(smaller)} smaller", kind, sum(smaller), ""))  # pyright: ignore[reportArgumentType]
    return memory, tuple(listed)


def _buffers(program: Program, lowered: Lowered, kinds: Mapping[str, Kind]) -> list[Buffer]:
    """What one device holds at the peak, besides code."""
    found: list[Buffer] = []
    lost = 0
    for allocation in program.allocations:
        match allocation.kind:
            case "argument":
                shape = program.instructions[program.parameter(allocation.number)].shape
                argument = lowered.arguments[allocation.number]
                found.append(_of_argument(argument, allocation.bytes, str(shape), kinds))
            case "result":
                found.append(Buffer("results", "batch", allocation.bytes, ""))
            case "constant":
                found.append(Buffer("constant", "code", allocation.bytes, ""))
            case "temporary":
                lost += allocation.bytes
    gradients = _gradients(program, lowered, kinds)
    origin_of = _Origins(program, lowered, kinds)
    for group in program.peak:
        nodes = [(program.values[value].instruction, program.values[value].index) for value in reversed(group)]
        instruction = program.instructions[nodes[0][0]]
        tensor = next((gradients[node] for node in nodes if node in gradients), None)
        num_bytes = program.values[group[0]].bytes
        lost -= num_bytes
        found.append(
            Buffer(
                name=tensor or instruction.name,
                kind="gradient" if tensor else "activation",
                bytes=num_bytes,
                shape=str(instruction.shape.at(nodes[0][1])),
                origin=origin_of(nodes),
            )
        )
    found.append(Buffer("lost between buffers", "activation", lost, ""))
    return found


def _of_argument(argument: Argument, num_bytes: int, shape: str, kinds: Mapping[str, Kind]) -> Buffer:
    kind = kinds.get(argument.name, "batch")
    module = argument.name.rpartition(".")[0] if kind == "parameter" else ""
    return Buffer(argument.name, kind, num_bytes, shape, Origin(module))


def _gradients(program: Program, lowered: Lowered, kinds: Mapping[str, Kind]) -> dict[_Node, str]:
    """The values that are gradients of state tensors, and of which.

    From each updated tensor, walks up the data flow for as long as values have the tensor's shape: a device's part of
    it, the whole, or one layer of either. The walk ends at matrix products and kernels, which are the first to have the
    gradient, and at the state itself. Values that the state flows into, such as new moments, are none.
    """
    found: dict[_Node, str] = {}
    result = program.roots[program.entry]
    named = [
        (number, each) for number, each in enumerate(lowered.arguments) if kinds.get(each.name, "batch") != "batch"
    ]
    state = {program.parameter(number) for number, _ in named}
    # Of a parameter first: its moments, whose walks find the same, are then named after it.
    for _, argument in sorted(named, key=lambda pair: kinds[pair[1].name] != "parameter"):
        if argument.result is not None:
            updated = (result, (argument.result,))
            for node in _gradients_of(program, updated, _forms(argument), state):
                found.setdefault(node, argument.name)
    return found


def _gradients_of(program: Program, updated: _Node, forms: set[tuple[int, ...]], state: set[int]) -> set[_Node]:
    def has_form(node: _Node) -> bool:
        shape = program.instructions[node[0]].shape.at(node[1])
        return shape.dtype in ("f32", "bf16", "f16") and _form(shape.dims) in forms

    made_into: dict[_Node, list[_Node]] = {updated: []}
    pending = [updated]
    from_state: list[_Node] = []
    while pending:
        node = pending.pop()
        instruction = program.instructions[node[0]]
        if node[0] in state:
            from_state.append(node)
        if instruction.opcode in _STOPS or node[0] in state:
            continue
        for source in program.sources(*node):
            if has_form(source):
                if source not in made_into:
                    made_into[source] = []
                    pending.append(source)
                made_into[source].append(node)
    tainted: set[_Node] = set()
    while from_state:
        node = from_state.pop()
        if node not in tainted:
            tainted.add(node)
            from_state += made_into[node]
    return made_into.keys() - tainted


def _form(dims: Iterable[int]) -> tuple[int, ...]:
    """Sizes in any order, without those that are 1."""
    return tuple(sorted(size for size in dims if size != 1))


def _forms(argument: Argument) -> set[tuple[int, ...]]:
    """What a tensor looks like as a device's part, as a whole, between the two, and for one layer if dim 0 is whole."""
    local = argument.sharding.shard_shape(argument.shape) if argument.sharding else argument.shape
    forms = {_form(dims) for dims in itertools.product(*zip(argument.shape, local, strict=True))}
    if len(local) > 1 and local[0] == argument.shape[0]:
        forms |= {_form(dims) for dims in itertools.product(*zip(argument.shape[1:], local[1:], strict=True))}
    return forms - {()}  # every scalar has that one


class _Origins:
    """Where values come from: an operation's own origin, else that of what it moves, else of what is near."""

    def __init__(self, program: Program, lowered: Lowered, kinds: Mapping[str, Kind]) -> None:
        self._program, self._lowered = program, lowered
        self._parameters = {
            program.parameter(number): Origin(argument.name.rpartition(".")[0])
            for number, argument in enumerate(lowered.arguments)
            if kinds.get(argument.name) == "parameter"
        }
        self._users: dict[int, list[int]] = {}
        for key, instruction in program.instructions.items():
            for operand in instruction.operands:
                self._users.setdefault(operand, []).append(key)

    def __call__(self, nodes: list[_Node]) -> Origin:
        """Of values that share memory; an empty one if nothing near them has any."""
        return self._search(nodes, self._moved) or self._search(nodes, self._near) or Origin()

    def _search(self, nodes: list[_Node], following: Callable[[_Node], Iterable[_Node]]) -> Origin | None:
        """Breadth first, a few steps far."""
        pending, seen = list(nodes), set(nodes)
        for node in itertools.islice(pending, _STEPS_TO_ORIGIN):  # grows while it is walked
            origin = _scope(self._program.instructions[node[0]].op_name, self._lowered)
            if origin := origin or self._parameters.get(node[0]):
                return origin
            pending += [each for each in following(node) if not (each in seen or seen.add(each))]
        return None

    def _moved(self, node: _Node) -> Iterable[_Node]:
        return self._program.sources(*node) if self._program.instructions[node[0]].opcode in _MOVES else ()

    def _near(self, node: _Node) -> Iterable[_Node]:
        for user in self._users.get(node[0], ()):
            if self._program.instructions[user].shape.dtype != "tuple":
                yield user, ()
        yield from self._program.sources(*node)


def _scope(op_name: str, lowered: Lowered) -> Origin | None:
    numbers = _SCOPE.findall(op_name)
    return lowered.origins[int(numbers[-1])] if numbers else None


def _local_shape(argument: Argument) -> Shape:
    dims = argument.sharding.shard_shape(argument.shape) if argument.sharding else argument.shape
    dtype = str(argument.dtype).removeprefix("torch.")
    for torch_name, name in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("bool", "pred")):
        dtype = dtype.replace(torch_name, name)
    return Shape(dtype, dims)


def _itemsized(argument: Argument) -> int:
    if argument.sharding is None:
        return argument.dtype.itemsize
    return argument.sharding.bytes_per_device(argument.shape, argument.dtype.itemsize)


def _size(message: str, pattern: str) -> int:
    """A size that a message names; 0 if it doesn't."""
    found = re.search(pattern, message)
    return _bytes(found[1]) if found else 0


def _bytes(text: str) -> int:
    """A size as libtpu writes it.

    >>> _bytes("2.00G"), _bytes("292.0K"), _bytes("512B")
    (2147483648, 299008, 512)
    """
    units = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return int(float(text[:-1]) * units[text[-1]]) if text[-1] in units else int(float(text))
