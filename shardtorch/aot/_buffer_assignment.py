"""What a compiled program keeps in HBM: its allocations, and what is in use when its temporaries take most.

Read from the `HloProto` that XLA dumps: the module, where each of its values lies, and the trace of the heap simulator,
which says in the order of the schedule when each value comes and goes. No Python package has its schema, so fields are
read by number, from `xla/service/hlo.proto` and `xla/xla_data.proto` of openxla/xla.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_DTYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16", 11: "f32",
    12: "f64", 13: "tuple", 14: "opaque", 15: "c64", 16: "bf16", 17: "token", 18: "c128", 19: "f8e5m2", 20: "f8e4m3fn",
    21: "s4", 22: "u4", 23: "f8e4m3b11fnuz", 24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 26: "s2", 27: "u2", 28: "f8e4m3",
    29: "f8e3m4", 32: "f4e2m1fn", 33: "f8e8m0fnu",
}  # fmt: skip
_HBM = 0  # the "color" of a value is its memory space
_ALLOCATE, _FREE, _SHARE = 0, 1, 2  # kinds of events of the heap simulator


@dataclass(frozen=True)
class Shape:
    """Of an array, or of a tuple."""

    dtype: str
    dims: tuple[int, ...] = ()
    elements: tuple["Shape", ...] = ()
    """Of a tuple."""

    def at(self, index: Sequence[int]) -> "Shape":
        """The part of it that an index of tuple elements names."""
        shape = self
        for number in index:
            shape = shape.elements[number]
        return shape

    def leaves(self) -> Iterator[tuple[int, ...]]:
        """Indices of all arrays in it."""
        if self.dtype != "tuple":
            yield ()
        for number, element in enumerate(self.elements):
            yield from ((number, *index) for index in element.leaves())

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """An operation of the program."""

    name: str
    opcode: str
    shape: Shape
    op_name: str
    """What it was lowered from; empty for what the compiler added."""
    operands: tuple[int, ...]
    called: tuple[int, ...]
    """Computations that it runs: of a `while`, body and condition."""
    computation: int
    """The one that it is in."""
    number: int
    """Of a parameter, or of the element that a `get-tuple-element` takes."""


@dataclass(frozen=True)
class Value:
    """An array, or the table of a tuple's elements, that has a place in memory."""

    instruction: int
    """Its definition."""
    index: tuple[int, ...]
    """Which part of that instruction's shape it is."""
    bytes: int
    """With the compiler's padding."""


@dataclass(frozen=True)
class Allocation:
    """A piece of HBM that the program owns from start to end."""

    kind: Literal["argument", "result", "constant", "temporary"]
    """An argument whose memory a result takes is an argument."""
    bytes: int
    number: int
    """Of the argument."""
    values: tuple[int, ...]
    """By number; they share it, each for its time."""


@dataclass(frozen=True)
class Program:
    """A compiled module, and its use of HBM on one device."""

    instructions: Mapping[int, Instruction]
    """By id."""
    roots: Mapping[int, int]
    """The root of each computation."""
    callers: Mapping[int, tuple[int, ...]]
    """Instructions that run each computation."""
    entry: int
    """The computation that the program starts with."""
    allocations: tuple[Allocation, ...]
    values: Mapping[int, Value]
    """Those in HBM, by number."""
    peak: tuple[tuple[int, ...], ...]
    """Temporaries in use when they take most: for each piece of memory, the numbers of the values that share it, oldest
    first. The rest of the temporary allocations is lost between them."""

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Reads a serialized `HloProto`, in base64."""
        proto = dict(_fields(base64.b64decode(text)))
        instructions: dict[int, Instruction] = {}
        roots: dict[int, int] = {}
        callers: dict[int, list[int]] = {}
        entry = 0
        for field, content in _fields(proto[1]):
            if field == 6:
                entry = content
            elif field == 3:
                _read_computation(content, instructions, roots)
        for number, instruction in instructions.items():
            for computation in instruction.called:
                callers.setdefault(computation, []).append(number)
        values, allocations, traces = _read_assignment(proto[3])
        temporary = {value for a in allocations if a.kind == "temporary" for value in a.values} & values.keys()
        peaks = [_peak([event for event in trace if event[1] in temporary], values) for trace in traces]
        return cls(
            instructions,
            roots,
            {computation: tuple(found) for computation, found in callers.items()},
            entry,
            tuple(allocations),
            values,
            max(peaks, key=lambda peak: sum(values[group[0]].bytes for group in peak), default=()),
        )

    def parameter(self, number: int) -> int:
        """The id of a parameter of the program."""
        return next(
            key
            for key, each in self.instructions.items()
            if each.computation == self.entry and each.opcode == "parameter" and each.number == number
        )

    def sources(self, instruction: int, index: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """What a value is made of, across tuples, loops, fusions and other calls: ids and indices into their shapes.

        Args:
          instruction: Its definition.
          index: Which part of that instruction's shape it is.
        """
        this = self.instructions[instruction]
        match this.opcode:
            case "get-tuple-element":
                yield this.operands[0], (this.number, *index)
            case "tuple" if index:
                yield this.operands[index[0]], index[1:]
            case "bitcast" | "copy" | "optimization-barrier" | "domain":
                yield this.operands[0], index
            case "copy-start":
                yield this.operands[0], ()
            case "copy-done":
                yield this.operands[0], (0,)
            case "while":
                yield self.roots[this.called[0]], index
                yield this.operands[0], index
            case "fusion" | "call" | "conditional":
                yield from ((self.roots[computation], index) for computation in this.called)
            case "async-start" | "async-update" | "async-done":
                yield from self._sources_of_async(this, index)
            case "parameter":
                for caller in self.callers.get(this.computation, ()):
                    yield from self._sources_of_argument(this, caller, index)
            case "dynamic-update-slice":
                yield from ((operand, ()) for operand in this.operands[1::-1])
            case "dynamic-slice" | "scatter":
                yield this.operands[0], ()
            case "all-reduce" | "all-gather" | "reduce-scatter" | "all-to-all" | "sort" if index:
                yield this.operands[index[0]], ()
            case _:
                for operand in this.operands:
                    yield from ((operand, leaf) for leaf in self.instructions[operand].shape.leaves())

    def _sources_of_async(self, this: Instruction, index: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        # The shape of a start is (operands, results, ...).
        if this.opcode == "async-done":
            yield this.operands[0], (1, *index)
        elif this.opcode == "async-update":
            yield this.operands[0], index
        elif index[:1] == (1,):
            yield self.roots[this.called[0]], index[1:]
        elif index[:1] == (0,) and len(index) > 1:
            yield this.operands[index[1]], index[2:]

    def _sources_of_argument(
        self, this: Instruction, caller: int, index: tuple[int, ...]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        call = self.instructions[caller]
        if call.opcode == "while":
            yield self.roots[call.called[0]], index
            yield call.operands[0], index
        elif call.opcode == "conditional":
            yield call.operands[1 + call.called.index(this.computation)], index
        elif call.opcode in ("fusion", "call", "async-start"):
            yield call.operands[this.number], index


def _read_computation(content: bytes, instructions: dict[int, Instruction], roots: dict[int, int]) -> None:
    fields = list(_fields(content))
    number = next((value for field, value in fields if field == 5), 0)
    roots[number] = next((value for field, value in fields if field == 6), 0)
    for field, value in fields:
        if field == 2:
            key, instruction = _instruction(value, number)
            instructions[key] = instruction


def _instruction(content: bytes, computation: int) -> tuple[int, Instruction]:
    operands: list[int] = []
    called: list[int] = []
    found: dict[int, Any] = {}
    for field, value in _fields(content):
        if field == 36:
            operands += _numbers(value)
        elif field == 38:
            called += _numbers(value)
        else:
            found[field] = value
    opcode = found[2].decode()
    return found.get(35, 0), Instruction(
        name=found[1].decode(),
        opcode=opcode,
        shape=_shape(found[3]),
        op_name=dict(_fields(found.get(7, b""))).get(2, b"").decode(),
        operands=tuple(operands),
        called=tuple(called),
        computation=computation,
        number=found.get(9 if opcode == "parameter" else 13, 0),
    )


def _shape(content: bytes) -> Shape:
    dtype, dims, elements = "", [], []
    for field, value in _fields(content):
        if field == 2:
            dtype = _DTYPES.get(value, f"type{value}")
        elif field == 3:
            dims += _numbers(value)
        elif field == 4:
            elements.append(_shape(value))
    return Shape(dtype, tuple(dims), tuple(elements))


_Event = tuple[int, int, int]
"""Kind, number of the value, and of the one that it shares memory with."""


def _read_assignment(content: bytes) -> tuple[dict[int, Value], list[Allocation], list[list[_Event]]]:
    values: dict[int, Value] = {}
    allocations: list[Allocation] = []
    traces: list[list[_Event]] = []
    for field, value in _fields(content):
        if field == 1:
            found = dict(_fields(value))
            if found.get(4, 0) == _HBM:
                place = dict(_fields(found[3]))
                values[found.get(1, 0)] = Value(place.get(4, 0), tuple(_numbers(place.get(3, b""))), found.get(2, 0))
        elif field == 3 and (allocation := _allocation(value)) is not None:
            allocations.append(allocation)
        elif field == 4:
            events = [dict(_fields(event)) for key, event in _fields(value) if key == 1]
            traces.append([(event.get(1, 0), event.get(2, 0), event.get(5, 0)) for event in events])
    return values, allocations, traces


def _allocation(content: bytes) -> Allocation | None:
    """None if it isn't in HBM, or takes no memory of its own."""
    found: dict[int, Any] = {}
    values: list[int] = []
    for field, value in _fields(content):
        if field == 9:
            values.append(dict(_fields(value)).get(1, 0))
        else:
            found[field] = value
    if found.get(8, 0) != _HBM or found.get(3):  # thread-local: scalars of reductions, in registers
        return None
    kind = "argument" if found.get(5) else "constant" if found.get(12) else "result" if found.get(7) else "temporary"
    return Allocation(kind, found.get(2, 0), found.get(6, 0), tuple(values))


def _peak(trace: Sequence[_Event], values: Mapping[int, Value]) -> tuple[tuple[int, ...], ...]:
    """The values in use when they take most, grouped by the memory that they share: it is free when all of them are.

    Values that share memory have the same size.
    """
    owner: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    now, most, peak = 0, 0, ()
    for kind, value, other in trace:
        if kind == _FREE:
            group = groups[owner[value]]
            group.remove(value)
            if not group:
                now -= values[owner[value]].bytes
                del groups[owner[value]]
            continue
        owner[value] = owner[other] if kind == _SHARE else value
        groups.setdefault(owner[value], []).append(value)
        if kind == _ALLOCATE:
            now += values[value].bytes
        if now > most or (now == most and kind == _SHARE):
            most, peak = now, tuple(map(tuple, groups.values()))
    return peak


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of a protobuf message: integers, or bytes."""
    at, end = 0, len(content)
    while at < end:
        key, at = _varint(content, at)
        match key & 7:
            case 0:
                value, at = _varint(content, at)
            case 2:
                length, at = _varint(content, at)
                value, at = content[at : at + length], at + length
            case wire:
                length = {1: 8, 5: 4}[wire]
                value, at = content[at : at + length], at + length
        yield key >> 3, value


def _numbers(packed: bytes | int) -> list[int]:
    """A repeated field of integers, or one of them."""
    if isinstance(packed, int):
        return [packed]
    at, found = 0, []
    while at < len(packed):
        value, at = _varint(packed, at)
        found.append(value)
    return found


def _varint(content: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = content[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, at
        shift += 7
