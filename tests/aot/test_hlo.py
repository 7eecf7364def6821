"""What is read from the text of a scheduled module: by hand, and of whole programs that tests/aot/data keeps.

A sample is what libtpu 0.0.40 made of a step of a Llama, without the notes and metadata that nobody reads.
"""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtorch.aot._cost import CoreCost, NetworkCost
from shardtorch.aot._hlo import Array, Instruction, Module, parse_shape, replica_groups
from shardtorch.aot._schedule import Simulation
from shardtorch.mesh import Mesh, SliceTopology
from shardtorch.models import preset

DATA = Path(__file__).parent / "data"


def read(name: str) -> Module:
    return Module.parse(gzip.decompress((DATA / f"{name}.hlo.gz").read_bytes()).decode())


def instruction(line: str) -> Instruction:
    """The instruction of a line, as parsed within a module."""
    return Module.parse(f"ENTRY %main () -> f32[] {{\n  ROOT {line}\n}}\n").entry.instructions[0]


@pytest.mark.parametrize(
    ("text", "arrays"),
    [
        ("f32[]", [Array("f32", (), 0)]),
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", [Array("bf16", (8, 128), 0)]),
        ("f32[2,3]{1,0:T(8,128)S(1)}", [Array("f32", (2, 3), 1)]),
        ("u32[]{:T(128)S(6)}", [Array("u32", (), 6)]),
        ("pred[4]{0}", [Array("pred", (4,), 0)]),
        ("f32[0,7]{1,0}", [Array("f32", (0, 7), 0)]),
        ("()", []),
        ("(f32[2]{0}, s32[])", [Array("f32", (2,), 0), Array("s32", (), 0)]),
        (
            "((f32[2,3]{1,0}, (bf16[5]{0:S(1)})), /*index=5*/u32[]{:S(2)})",
            [Array("f32", (2, 3), 0), Array("bf16", (5,), 1), Array("u32", (), 2)],
        ),
    ],
)
def test_shapes(text: str, arrays: list[Array]):
    assert list(parse_shape(text)) == arrays
    parsed = instruction(f"%it = {text} custom-call(%a, /*index=5*/%b)")
    assert list(parsed.arrays) == arrays
    assert (parsed.name, parsed.opcode, parsed.operands) == ("it", "custom-call", ("a", "b"))
    assert parsed.bytes == sum(array.bytes for array in arrays)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("f32[3,5]", 60),
        ("bf16[3,5]", 30),
        ("s4[4]", 2),
        ("pred[3]", 3),
        ("c64[2]", 16),
        ("f8e4m3fn[7]", 7),
        ("token[]", 0),
    ],
)
def test_bytes(text: str, num_bytes: int):
    (array,) = parse_shape(text)
    assert array.bytes == num_bytes
    assert str(array) == text


def test_attributes():
    it = instruction(
        "%fusion.7 = (f32[2]{0:T(128)S(1)}, s32[]) fusion(%a, %b.1), kind=kLoop, calls=%fused_computation.3.clone, "
        'metadata={op_name="shardtorch__scan/call.3/~4~.8/~41~.9/aten__\\"mm" stack_frame_id=3}, '
        'backend_config={"flag_configs":[],"window_config":{"ml_estimated_cycles":"1","estimated_cycles":"7749"}}'
    )
    assert (it.opcode, it.operands, it.called) == ("fusion", ("a", "b.1"), {"calls": "fused_computation.3.clone"})
    assert it.estimated_cycles == 7749
    assert it.backend_config["window_config"]["ml_estimated_cycles"] == "1"
    assert it.op_name.endswith('aten__\\"mm')
    assert it.scope == 41
    bare = instruction("%copy = f32[2]{0} copy(%a)")
    assert (bare.estimated_cycles, bare.backend_config, bare.op_name, bare.scope, bare.called) == (
        None,
        {},
        "",
        None,
        {},
    )
    text = instruction('%c = u8[3]{0} custom-call(), custom_call_target="a(b", api_version=API, to_apply=%sum')
    assert text.called == {"to_apply": "sum"}
    assert instruction("%c.2 = s32[2,2]{1,0} constant({ {1, 2}, {3, 4} })").arguments == "{ {1, 2}, {3, 4} }"


def test_called_computations():
    loop = instruction("%w = (s32[]) while(%t), condition=%cond.1, body=%body.1")
    assert loop.called == {"condition": "cond.1", "body": "body.1"}
    branches = instruction("%c = f32[] conditional(%i, %a, %b), branch_computations={%first, %second.2}")
    assert branches.called == {"branch 0": "first", "branch 1": "second.2"}
    either = instruction("%c = f32[] conditional(%p, %a, %b), true_computation=%yes, false_computation=%no")
    assert either.called == {"true_computation": "yes", "false_computation": "no"}


def test_computations_keep_their_order():
    module = Module.parse(
        """HloModule step, is_scheduled=true

%inner (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %n = f32[2]{0} negate(%p)
}

ENTRY %main.1 (a: f32[2], /*index=1*/b: (f32[2], s32[])) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %b = f32[2]{0} parameter(1)
  %f = f32[2]{0} fusion(%b), kind=kLoop, calls=%inner
  ROOT %g = f32[2]{0} add(%f, %a)
}
"""
    )
    assert [it.name for it in module.entry.instructions] == ["a", "b", "f", "g"]
    assert set(module.computations) == {"inner", "main.1"}
    assert [it.name for it in module.inner(module.entry.by_name["f"])] == ["p", "n"]
    assert module.inner(module.entry.by_name["g"]) == []


def test_a_module_without_an_entry():
    with pytest.raises(ValueError, match="an HLO module has an entry computation"):
        Module.parse("HloModule step\n")


def loop(dtype: str, condition: str, update: str, extra: str = "") -> Module:
    return Module.parse(
        f"""HloModule step, is_scheduled=true
{extra}
%cond (t: (f32[2], {dtype}[])) -> pred[] {{
  %limit = {dtype}[] constant({condition})
  %t = (f32[2], {dtype}[]) parameter(0)
  %i = {dtype}[] get-tuple-element(%t), index=1
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}

%body (u: (f32[2], {dtype}[])) -> (f32[2], {dtype}[]) {{
  %many = {dtype}[] constant(1000)
  %u = (f32[2], {dtype}[]) parameter(0)
  %j = {dtype}[] get-tuple-element(%u), index=1
  %x = f32[2] get-tuple-element(%u), index=0
  {update}
  ROOT %out = (f32[2], {dtype}[]) tuple(%x, %next)
}}

ENTRY %main (a: (f32[2], {dtype}[])) -> (f32[2], {dtype}[]) {{
  %a = (f32[2], {dtype}[]) parameter(0)
  ROOT %loop = (f32[2], {dtype}[]) while(%a), condition=%cond, body=%body
}}
"""
    )


ADDS_TWO = """
%adds (q: s32[]) -> s32[] {
  %two = s32[] constant(2)
  %q = s32[] parameter(0)
  ROOT %sum = s32[] add(%q, %two)
}
"""


@pytest.mark.parametrize(
    ("module", "trips"),
    [
        (loop("s32", "32", "%one = s32[] constant(1)\n  %next = s32[] add(%j, %one)"), 32),
        (loop("u32", "8", "%two = u32[] constant(2)\n  %next = u32[] add(%j, %two)"), 4),
        (loop("s32", "7", "%next = s32[] fusion(%j), kind=kLoop, calls=%adds", ADDS_TWO), 4),
        (loop("s32", "5", "%next = s32[] custom-call(%j)"), 5),
    ],
)
def test_trip_counts(module: Module, trips: int):
    assert module.trip_count(module.entry.by_name["loop"]) == trips


def test_a_loop_without_a_constant_does_not_say_how_often_it_runs():
    text = """
%cond (t: (f32[])) -> pred[] {
  %t = (f32[]) parameter(0)
  ROOT %go = pred[] custom-call(%t)
}
ENTRY %main (a: (f32[])) -> (f32[]) {
  %a = (f32[]) parameter(0)
  ROOT %loop = (f32[]) while(%a), condition=%cond, body=%cond
}
"""
    module = Module.parse(text)
    assert module.trip_count(module.entry.by_name["loop"]) is None


def groups_of(text: str) -> list[list[int]] | None:
    found = replica_groups(instruction(f"%g = f32[2] all-gather(%a), channel_id=1, {text}, use_global_device_ids=true"))
    return None if found is None else [list(group) for group in found]


def test_replica_groups():
    assert groups_of("replica_groups={{0,1},{3,2}}") == [[0, 1], [3, 2]]
    assert groups_of("replica_groups={{5}}") == [[5]]
    assert groups_of("replica_groups={}") is None
    assert groups_of("dimensions={0}") is None
    assert groups_of("replica_groups=[2,4]<=[8]") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups_of("replica_groups=[2,4]<=[4,2]T(1,0)") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups_of("source_target_pairs={{0,1},{1,2},{2,0}}") == [[0, 1], [1, 2], [2, 0]]


@given(st.data())
def test_iota_is_numpy(data: st.DataObject):
    dims = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    perm = data.draw(st.permutations(range(len(dims))))
    size = math.prod(dims)
    num_groups = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    shape, order = ",".join(map(str, dims)), ",".join(map(str, perm))
    expected = np.arange(size).reshape(dims).transpose(perm).reshape(num_groups, -1).tolist()
    text = f"replica_groups=[{num_groups},{size // num_groups}]<=[{shape}]T({order})"
    assert groups_of(text) == expected
    listed = ",".join("{" + ",".join(map(str, group)) + "}" for group in expected)
    assert groups_of(f"replica_groups={{{listed}}}") == expected


SAMPLES = [
    ("step_v6e_256", SliceTopology.parse("v6e:16x16"), Mesh(fsdp=256), 32, 4),
    ("step_v6e_16_windowed", SliceTopology.parse("v6e:4x4"), Mesh(fsdp=16), 2, 1),
]
"""Name, topology, mesh, layers, and sequences of 8,192 tokens per chip, with all of each layer computed twice."""


@pytest.mark.parametrize(("name", "topology", "mesh", "num_layers", "num_sequences"), SAMPLES)
def test_products_of_a_program_are_those_of_the_model(
    name: str, topology: SliceTopology, mesh: Mesh, num_layers: int, num_sequences: int
):
    """A weight takes 2 operations per token forward, 4 backward, and 2 again forward within a layer; but the product
    that ends a layer is not needed again, and no layer comes before the head."""
    module, shape = read(name), preset("llama3-8b")
    kv_dim = shape.num_kv_heads * shape.head_dim
    mlp = 3 * shape.embed_dim * shape.mlp_dim
    layer = 2 * shape.embed_dim * (shape.embed_dim + kv_dim) + mlp
    head = shape.embed_dim * shape.vocab_size
    tokens, seq = num_sequences * 8192, 8192
    schedule = Simulation(module, CoreCost(module, topology), NetworkCost(topology, mesh)).run()
    found = {"matmul": 0.0, "kernel": 0.0}
    for use in schedule.core.values():
        found[use.category] = found.get(use.category, 0.0) + use.flops
    expected = tokens * (num_layers * (8 * layer - 2 * mlp / 3) + 6 * head)
    assert found["matmul"] == pytest.approx(expected, rel=1e-3)
    # Two products forward, twice; four for keys and values, three for queries; half of them below the diagonal.
    attention = (2 + 2 + 4 + 3) * 2 * seq * shape.num_heads * shape.head_dim / 2
    assert found["kernel"] == pytest.approx(tokens * num_layers * attention, rel=1e-3)
    # Without what is computed twice it is what the model needs, but for one more product of the attention's backward.
    once = expected - tokens * num_layers * (2 * layer - 2 * mlp / 3)
    per_token = shape.flops_per_token(seq) - 6 * (32 - num_layers) * layer
    causal = 6 * 32 * shape.num_heads * shape.head_dim * seq
    assert once == pytest.approx(tokens * (per_token - causal), rel=1e-3)


def test_async_collective_fusions_are_seen():
    module = read("step_v6e_256")
    starts = [
        it for c in module.computations.values() for it in c.instructions if "AsyncCollectiveStart" in it.attributes
    ]
    assert len(starts) == 10
    loops = [it for it in module.entry.instructions if it.opcode == "while"]
    assert [module.trip_count(it) for it in loops] == [32, 32]


def test_loops_of_overlapped_products_are_seen():
    module = read("step_v6e_16_windowed")
    loops = [it for c in module.computations.values() for it in c.instructions if it.opcode == "while"]
    windowed = [it for it in loops if it.called["condition"].startswith("wide.windowed_dot_general")]
    assert len(windowed) == 7
    assert {module.trip_count(it) for it in windowed} == {4}  # 16 pieces, in two directions, unrolled twice
    assert [module.trip_count(it) for it in loops if it not in windowed] == [2, 2]
