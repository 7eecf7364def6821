"""Reading XLA's buffer assignment, of real programs that tests/aot/data keeps and of small ones made here."""

import base64
import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtorch.aot._buffer_assignment import Program, Shape, Value, _fields, _numbers, _peak

DATA = Path(__file__).parent / "data"


def read(name: str) -> tuple[Program, dict]:
    """A program, and what its executable says of it."""
    with zipfile.ZipFile(DATA / f"{name}.zip") as archive:
        program = Program.parse(base64.b64encode(archive.read("buffer_assignment.pb")).decode())
        return program, json.loads(archive.read("sample.json"))


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """A protobuf message."""
    found = b""
    for number, value in fields:
        if isinstance(value, int):
            found += varint(number << 3) + varint(value)
        else:
            found += varint(number << 3 | 2) + varint(len(value)) + value
    return found


@pytest.mark.parametrize("name", ["memory_fits_v5p", "memory_fits_v5e"])
def test_what_is_in_use_is_what_the_executable_says(name: str):
    program, sample = read(name)
    statistics = sample["statistics"]
    kinds = ("argument", "result", "constant", "temporary")
    sums = {kind: sum(a.bytes for a in program.allocations if a.kind == kind) for kind in kinds}
    live = sum(program.values[group[0]].bytes for group in program.peak)
    assert sums["argument"] == statistics["argument_bytes"]
    assert sums["argument"] + sums["result"] + sums["constant"] + live == statistics["peak_bytes"]
    assert live <= sums["temporary"] <= 1.01 * live


def test_every_value_leads_to_its_definition():
    program, _ = read("memory_fits_v5p")
    for value in program.values.values():
        shape = program.instructions[value.instruction].shape.at(value.index)
        assert shape.dtype
    for key, instruction in program.instructions.items():
        for source, index in program.sources(key, next(instruction.shape.leaves(), ())):
            assert program.instructions[source].shape.at(index).dtype


@pytest.mark.parametrize(
    ("opcode", "index", "want"),
    [("while", (1,), "f32[8]"), ("get-tuple-element", (), "f32[8]"), ("tuple", (0,), "s32[]")],
)
def test_sources_keep_the_shape_across_tuples_and_loops(opcode: str, index: tuple[int, ...], want: str):
    def shape(dtype: int, *dims: int) -> bytes:
        return message((2, dtype), *((3, dim) for dim in dims))

    def instruction(
        key: int, name: bytes, kind: bytes, shape: bytes, *more: tuple[int, int | bytes]
    ) -> tuple[int, bytes]:
        return 2, message((1, name), (2, kind), (3, shape), (35, key), *more)

    pair = message((2, 13), (4, shape(4)), (4, shape(11, 8)))
    body = message(
        (1, b"body"), (5, 1), (6, 13), instruction(10, b"p", b"parameter", pair),
        instruction(11, b"g", b"get-tuple-element", shape(4), (36, varint(10))),
        instruction(12, b"h", b"get-tuple-element", shape(11, 8), (13, 1), (36, varint(10))),
        instruction(13, b"t", b"tuple", pair, (36, varint(11) + varint(12))),
    )  # fmt: skip
    main = message(
        (1, b"main"), (5, 2), (6, 21), instruction(20, b"q", b"parameter", pair),
        instruction(21, b"w", b"while", pair, (36, varint(20)), (38, varint(1))),
    )  # fmt: skip
    program = Program.parse(base64.b64encode(message((1, message((3, body), (3, main), (6, 2))), (3, b""))).decode())
    keys = [key for key, each in program.instructions.items() if each.opcode == opcode and each.name != "g"]
    for key in keys:
        sources = list(program.sources(key, index))
        assert sources
        assert {str(program.instructions[source].shape.at(where)) for source, where in sources} == {want}
    assert program.peak == ()
    assert program.parameter(0) == 20


@given(st.lists(st.tuples(st.integers(1, 2**28), st.integers(0, 2**63) | st.binary(max_size=300))))
def test_fields_of_a_message(fields: list[tuple[int, int | bytes]]):
    assert list(_fields(message(*fields))) == fields


@given(st.lists(st.integers(0, 2**63)))
def test_packed_numbers(numbers: list[int]):
    assert _numbers(b"".join(map(varint, numbers))) == numbers


@given(st.data())
def test_peak_is_the_fullest_moment(data: st.DataObject):
    """Against a simulation that looks at each moment anew."""
    values: dict[int, Value] = {}
    owner: dict[int, int] = {}
    live: list[int] = []
    trace: list[tuple[int, int, int]] = []
    most = 0
    for number in range(data.draw(st.integers(1, 8))):
        other = data.draw(st.sampled_from(live)) if live and data.draw(st.booleans()) else None
        owner[number] = number if other is None else owner[other]
        num_bytes = data.draw(st.integers(1, 5)) if other is None else values[other].bytes
        values[number] = Value(number, (), num_bytes)
        trace.append((0, number, 0) if other is None else (2, number, other))
        live.append(number)
        most = max(most, sum(values[each].bytes for each in {owner[each] for each in live}))
        for freed in data.draw(st.lists(st.sampled_from(live), unique=True)):
            live.remove(freed)
            trace.append((1, freed, 0))
    peak = _peak(trace, values)
    assert sum(values[group[0]].bytes for group in peak) == most
    for group in peak:
        assert len({owner[number] for number in group}) == 1


def test_shapes_read_as_in_xla():
    pair = Shape("tuple", elements=(Shape("bf16", (2, 3)), Shape("tuple", elements=(Shape("f32"),))))
    assert str(pair) == "(bf16[2,3], (f32[]))"
    assert list(pair.leaves()) == [(0,), (1, 0)]
    assert str(pair.at((1, 0))) == "f32[]"
