"""The walk through a compiler's schedule: small programs by hand, laws over drawn ones, and whole programs."""

import gzip
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtorch.aot._compile_report import _assumptions
from shardtorch.aot._cost import CoreCost, NetworkCost
from shardtorch.aot._hlo import Module
from shardtorch.aot._schedule import Schedule, Simulation, Span
from shardtorch.errors import ShardtorchError
from shardtorch.mesh import Mesh, SliceTopology

DATA = Path(__file__).parent / "data"
POD = SliceTopology.parse("v6e:4x4")
MESH = Mesh(data=4, fsdp=4)
ROW = "channel_id={}, replica_groups=[4,4]<=[16], use_global_device_ids=true"
"""Attributes of a collective along `fsdp`."""
MB = 10**6
MS = 1e-3
CYCLES_PER_MS = int(POD.clock_hz * MS)

NOTHING = """
%nothing (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %added = f32[] add(%a, %b)
}
"""


def core(name: str, ms: float = 1) -> str:
    """An operation that the core is busy with for so long."""
    cycles = round(CYCLES_PER_MS * ms)
    estimate = f'backend_config={{"estimated_cycles":"{cycles}"}}'
    return f"%{name} = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%nothing, {estimate}"


def all_gather(name: str, mb: int = 64, channel: int = 1) -> str:
    return f"%{name} = u8[{mb * MB}]{{0}} all-gather(%x), dimensions={{0}}, {ROW.format(channel)}"


def all_gather_start(name: str, mb: int = 64, channel: int = 1) -> str:
    shape = f"(u8[{mb * MB // 4}]{{0}}, u8[{mb * MB}]{{0}})"
    return f"%{name} = {shape} all-gather-start(%x), dimensions={{0}}, {ROW.format(channel)}"


def all_gather_done(start: str) -> str:
    return f"%{start}.done = u8[8]{{0}} all-gather-done(%{start})"


def copy_start(name: str, mb: int = 64) -> str:
    return f"%{name} = (u8[{mb * MB}]{{0:S(1)}}, u8[{mb * MB}]{{0}}, u32[]{{:S(2)}}) copy-start(%x)"


def copy_done(start: str) -> str:
    return f"%{start}.done = u8[8]{{0}} copy-done(%{start})"


def program(*lines: str, computations: str = "", num_partitions: int = 16) -> Module:
    body = "".join(f"  {line}\n" for line in lines)
    return Module.parse(
        f"HloModule step, is_scheduled=true, num_partitions={num_partitions}\n{NOTHING}{computations}\n"
        f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{body}"
        "  ROOT %end = f32[8]{0} bitcast(%x)\n}\n"
    )


def run(module: Module, topology: SliceTopology = POD, mesh: Mesh = MESH) -> Schedule:
    """Walks a module. Whatever it is, its time adds up."""
    schedule = Simulation(module, CoreCost(module, topology), NetworkCost(topology, mesh)).run()
    assert_adds_up(schedule)
    return schedule


def assert_adds_up(schedule: Schedule) -> None:
    """The core is busy, or waits for a copy, or waits for a collective; and waits for none longer than it takes."""
    busy = sum(use.seconds for use in schedule.core.values())
    exposed = sum(use.exposed for use in schedule.network.values())
    assert schedule.seconds == pytest.approx(busy + schedule.stalls + exposed, rel=1e-9, abs=1e-12)
    assert schedule.stalls >= 0
    for use in schedule.network.values():
        assert -1e-12 <= use.exposed <= use.seconds * (1 + 1e-9)


def gather_s(mb: int = 64) -> float:
    """Time of an `all_gather`: three quarters over the link at the end of a line of four, three hops away."""
    return NetworkCost(POD, MESH).seconds("all-gather", mb * MB, row_route())


def row_route():
    (gather,) = (it for it in program(all_gather("it")).entry.instructions if it.name == "it")
    return NetworkCost(POD, MESH).route(gather)


def copy_s(mb: int = 64) -> float:
    return mb * MB / POD.hbm_bandwidth


def test_the_units_of_these_tests():
    assert gather_s() == pytest.approx(48 * MB / (0.9 * POD.ici_link_bandwidth) + 3e-6)
    assert row_route().axes == ("fsdp",)


def test_operations_on_the_core_add_up():
    schedule = run(program(core("a", 1), core("b", 2.5)))
    assert schedule.seconds == pytest.approx(3.5 * MS)
    assert {name: (use.count, use.seconds) for name, use in schedule.core.items()} == {
        "a": (1, pytest.approx(MS)),
        "b": (1, pytest.approx(2.5 * MS)),
    }
    assert [(s.name, s.lane, s.start, s.repeats) for s in schedule.spans] == [
        ("a", "core", 0.0, ()),
        ("b", "core", pytest.approx(MS), ()),
    ]
    assert (schedule.network, schedule.stalls, schedule.unpriced_kernels) == ({}, 0.0, set())


@pytest.mark.parametrize(
    "line",
    [
        "%free = f32[1000000]{0} bitcast(%x)",
        "%free = (f32[1000000]{0}, f32[8]{0}) tuple(%x, %x)",
        "%free = f32[1000000]{0} get-tuple-element(%x), index=0",
        "%free = f32[1000000]{0} constant({...})",
        "%free = u32[] partition-id()",
        '%free = bf16[8,1,1024,4096]{3,2,1,0} custom-call(), custom_call_target="AllocateBuffer"',
        '%free = bf16[8,1024]{1,0} custom-call(%x), custom_call_target="ConcatBitcast"',
    ],
)
def test_what_only_names_a_value_takes_no_time(line: str):
    assert run(program(line)).core == {}
    assert run(program(line)).seconds == 0


def test_a_kernel_whose_work_is_unknown_is_named():
    line = '%mine = f32[1000000]{0} custom-call(%x), custom_call_target="tpu_custom_call"'
    schedule = run(program(line))
    assert schedule.unpriced_kernels == {"mine"}
    assert schedule.seconds == pytest.approx(4 * (MB + 8) / POD.hbm_bandwidth)


def test_a_kernel_whose_work_is_known_is_not():
    queries = "%q = bf16[8,512,128]{2,1,0} bitcast(%x)"
    kernel = '%splash_mha_fwd.1 = bf16[8,512,128]{2,1,0} custom-call(%q), custom_call_target="tpu_custom_call"'
    schedule = run(program(queries, kernel))
    assert schedule.core["splash_mha_fwd.1"].flops > 0
    assert schedule.unpriced_kernels == set()


@pytest.mark.parametrize("busy", [0, 0.25, 0.75, 1.5])
def test_a_copy_hides_behind_the_core_and_the_core_waits_for_the_rest(busy: float):
    between = [core("a", busy * copy_s() / MS)] if busy else []
    schedule = run(program(copy_start("c"), *between, copy_done("c")))
    assert schedule.stalls == pytest.approx(max(1 - busy, 0) * copy_s(), abs=1e-9)
    assert schedule.seconds == pytest.approx(max(1, busy) * copy_s(), abs=1e-9)
    assert set(schedule.core) == ({"a"} if busy else set())


def test_copies_go_one_after_the_other():
    schedule = run(program(copy_start("c"), copy_start("d", 32), copy_done("d"), core("a"), copy_done("c")))
    assert schedule.stalls == pytest.approx(copy_s(96))
    assert schedule.seconds == pytest.approx(copy_s(96) + MS)


@pytest.mark.parametrize("opcode", ["slice", "dynamic-slice"])
def test_of_a_slice_its_own_bytes_are_copied(opcode: str):
    start = f"%s = ((u8[{640 * MB}]{{0}}), u8[{64 * MB}]{{0:S(1)}}, s32[]{{:S(2)}}) {opcode}-start(%x)"
    schedule = run(program(start, f"%s.done = u8[{64 * MB}]{{0:S(1)}} {opcode}-done(%s)"))
    assert schedule.stalls == schedule.seconds == pytest.approx(copy_s())
    assert schedule.core == {}


def test_a_collective_without_a_start_is_exposed():
    schedule = run(program(core("a"), all_gather("g"), core("b")))
    (use,) = schedule.network.values()
    assert (use.kind, use.bytes, use.count, use.route.axes) == ("all-gather", 64 * MB, 1, ("fsdp",))
    assert pytest.approx(use.exposed) == use.seconds == pytest.approx(gather_s())
    assert schedule.seconds == pytest.approx(2 * MS + gather_s())
    assert [(s.name, s.lane, s.category) for s in schedule.spans] == [
        ("a", "core", "elementwise"),
        ("g", "network", "all-gather"),
        ("b", "core", "elementwise"),
    ]


def test_a_fused_all_reduce_and_slice_is_a_reduce_scatter():
    fused = f"""
%all-reduce-scatter.1 (x: u8[{64 * MB}]) -> u8[{16 * MB}] {{
  %p = u8[{64 * MB}]{{0}} parameter(0)
  %r = u8[{64 * MB}]{{0}} all-reduce(%p), {ROW.format(1)}, to_apply=%sum
  %i = s32[] constant(0)
  ROOT %s = u8[{16 * MB}]{{0}} dynamic-slice(%r, %i), dynamic_slice_sizes={{{16 * MB}}}
}}
"""
    line = f"%f = u8[{16 * MB}]{{0}} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1"
    schedule = run(program(core("a"), line, core("b"), computations=fused))
    (use,) = schedule.network.values()
    assert (use.kind, use.bytes, use.count) == ("reduce-scatter", 64 * MB, 1)
    assert use.exposed == pytest.approx(use.seconds) == pytest.approx(gather_s())  # the same bytes as to gather it
    assert set(schedule.core) == {"a", "b"}


def test_a_loop_that_does_not_say_how_often_it_runs_is_named():
    loop = """
%go (t: (f32[8])) -> pred[] {
  %t = (f32[8]{0}) parameter(0)
  ROOT %g = pred[] custom-call(%t)
}
%body (t: (f32[8])) -> (f32[8]) {
  %t.1 = (f32[8]{0}) parameter(0)
  %x.1 = f32[8]{0} get-tuple-element(%t.1), index=0
  ROOT %r.1 = (f32[8]{0}) tuple(%x.1)
}
"""
    schedule = run(program("%l = (f32[8]{0}) while(%x), condition=%go, body=%body", computations=loop))
    assert schedule.unknown_loops == {"l"}
    (text,) = (each for each in _assumptions(schedule, POD, 1.0) if "Loops" in each)
    assert text == "Loops that don't say how often they run count once: l."


@pytest.mark.parametrize("target", ['"{1:2}x{0:7}"', '"elsewhere"'])
def test_an_unknown_way_between_slices_is_an_error(target: str):
    lines = to_slices("r", f"u8[{MB}]", "ALL_REDUCE", target)
    with pytest.raises(ShardtorchError, match=r"a kind that can be read.\n  got: ALL_REDUCE to"):
        run(program(*lines, *from_slices("r"), num_partitions=8), TWO, ACROSS)
    lines = to_slices("r", f"u8[{MB}]", "GOSSIP", ALL_OF_TWO)
    with pytest.raises(ShardtorchError, match=r"a kind that can be read.\n  got: GOSSIP to"):
        run(program(*lines, *from_slices("r"), num_partitions=8), TWO, ACROSS)


def test_what_is_scattered_is_the_operand():
    whole = f"%w = u8[{64 * MB}]{{0}} bitcast(%x)"
    scatter = f"%s = u8[{16 * MB}]{{0}} reduce-scatter(%w), dimensions={{0}}, {ROW.format(1)}, to_apply=%sum"
    fusion = "%f = u8[8]{0} fusion(%w), kind=kCustom, calls=%scatter"
    inside = f"\n%scatter (w: u8[8]) -> u8[8] {{\n  %w = u8[{64 * MB}]{{0}} parameter(0)\n  ROOT {scatter}\n}}\n"
    for schedule in (run(program(whole, scatter)), run(program(whole, fusion, computations=inside))):
        use = schedule.network["s"]
        assert (use.kind, use.bytes, use.seconds) == ("reduce-scatter", 64 * MB, pytest.approx(gather_s()))


STARTS = {
    "all-gather": (f"(u8[{16 * MB}]{{0}}, u8[{64 * MB}]{{0}})", 64 * MB),
    "all-reduce": (f"u8[{64 * MB}]{{0}}", 64 * MB),
    "collective-permute": (f"(u8[{64 * MB}]{{0}}, u8[{64 * MB}]{{0}}, u32[], u32[])", 64 * MB),
}


@pytest.mark.parametrize("busy", [0, 0.25, 0.75, 1.5])
@pytest.mark.parametrize("kind", STARTS)
def test_a_collective_hides_behind_the_core_and_the_rest_is_exposed(kind: str, busy: float):
    shape, num_bytes = STARTS[kind]
    where = "source_target_pairs={{0,1},{1,0}}" if kind == "collective-permute" else ROW.format(1)
    start, done = f"%g = {shape} {kind}-start(%x), {where}", f"%d = u8[8]{{0}} {kind}-done(%g)"
    alone = run(program(start, done))
    (use,) = alone.network.values()
    assert (use.kind, use.bytes, use.count) == (kind, num_bytes, 1)
    assert (
        pytest.approx(use.exposed)
        == use.seconds
        == pytest.approx(NetworkCost(POD, MESH).seconds(kind, num_bytes, use.route))
    )
    takes = use.seconds
    between = [core("a", busy * takes / MS)] if busy else []
    schedule = run(program(start, *between, done, core("b")))
    (use,) = schedule.network.values()
    assert use.seconds == takes
    assert use.exposed == pytest.approx(max(1 - busy, 0) * takes, abs=1e-9)
    assert schedule.seconds == pytest.approx(max(1, busy) * takes + MS, abs=1e-9)


@pytest.mark.parametrize("first", ["g", "h"])
def test_two_collectives_share_the_network(first: str):
    second = "h" if first == "g" else "g"
    lines = [all_gather_start("g", 64), all_gather_start("h", 32, 2), core("a", 0.25), all_gather_done(first)]
    schedule = run(program(*lines, all_gather_done(second)))
    assert schedule.seconds == pytest.approx(gather_s(64) + gather_s(32))
    # Whichever is awaited first: the core is busy during a part of the first that was sent.
    assert schedule.network["g"].exposed == pytest.approx(gather_s(64) - 0.25 * MS)
    assert schedule.network["h"].exposed == pytest.approx(gather_s(32))
    spans = {s.name: s for s in schedule.spans if s.lane == "network"}
    assert spans["g"].start == 0
    assert spans["h"].start == pytest.approx(gather_s(64))


def test_a_collective_without_a_start_waits_for_the_network():
    schedule = run(program(all_gather_start("g"), all_gather("h", 32, 2), all_gather_done("g")))
    assert schedule.seconds == pytest.approx(gather_s(64) + gather_s(32))
    assert schedule.network["h"].exposed == pytest.approx(gather_s(32))
    assert schedule.network["g"].exposed == pytest.approx(gather_s(64))


def test_what_goes_on_while_the_core_waits_for_a_copy_is_not_exposed_twice():
    schedule = run(program(all_gather_start("g", 8), copy_start("c", 640), copy_done("c"), all_gather_done("g")))
    assert gather_s(8) < copy_s(640)
    assert schedule.stalls == schedule.seconds == pytest.approx(copy_s(640))
    assert schedule.network["g"].exposed == 0


OFFLOADED = f"""
%offloaded (q: f32[{MB}]) -> f32[{MB}] {{
  %q = f32[{MB}]{{0}} parameter(0)
  ROOT %reduced = f32[{MB}]{{0}} all-reduce(%q), {ROW.format(1)}, to_apply=%sum
}}
"""


@pytest.mark.parametrize("busy", [0, 0.5, 2])
@pytest.mark.parametrize("how", ["call", "async"])
def test_a_collective_on_another_core_of_the_chip_hides_behind_this_one(how: str, busy: float):
    role = "to_apply" if how == "call" else "calls"
    shape = f"((f32[{MB}]{{0}}, token[]), (f32[{MB}]{{0}}))"
    thread = 'async_execution_thread="sparsecore"'
    start = f"%o = {shape} {how}-start(%x, %token), {thread}, {role}=%offloaded"
    update, waited = (f"%u = {shape} async-update(%o)", "u") if how == "async" else ("%u = token[] after-all()", "o")
    done = f"%d = (f32[{MB}]{{0}}) {how}-done(%{waited})"
    takes = NetworkCost(POD, MESH).seconds("all-reduce", 4 * MB, row_route())
    between = [core("a", busy * takes / MS)] if busy else []
    schedule = run(program("%token = token[] after-all()", start, *between, update, done, computations=OFFLOADED))
    (use,) = schedule.network.values()
    assert (use.instruction.name, use.kind, use.bytes, use.route.axes) == ("reduced", "all-reduce", 4 * MB, ("fsdp",))
    assert use.seconds == pytest.approx(takes)
    assert use.exposed == pytest.approx(max(1 - busy, 0) * takes, abs=1e-9)
    assert schedule.seconds == pytest.approx(max(1, busy) * takes, abs=1e-9)


TWO = SliceTopology.parse("2 x v6e:2x4")
ACROSS = Mesh(data=2, fsdp=8, dcn={"data": 2})
FOUR = SliceTopology.parse("4 x v6e:2x2")


def to_slices(name: str, shape: str, kind: str, target: str, turned: bool = False) -> list[str]:
    """What libtpu 0.0.40 writes for a collective over several slices, up to where its result is needed."""
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_megascale_reduce_operation="SUM",_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    halves = [
        f"%{name}.s = (u8[8], u32[], token[]) send(%x, %{name}.t), channel_id=2, {attributes}",
        f"%{name} = ({shape}, u32[], token[]) recv(%{name}.t), channel_id=1, {attributes}",
    ]
    return [f"%{name}.t = token[] after-all()", *(reversed(halves) if turned else halves)]


def from_slices(name: str) -> list[str]:
    return [f"%{name}.sd = token[] send-done(%{name}.s)", f"%{name}.d = (u8[8], token[]) recv-done(%{name})"]


ALL_OF_TWO = '"{1,2}x{0:7}"'
PAIRS_OF_TWO = ",".join(f"{{10000{n},20000{n}}}" for n in range(8))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("target", [ALL_OF_TWO, f"{{{PAIRS_OF_TWO}}}"])
@pytest.mark.parametrize(
    ("type_", "kind", "num_bytes"),
    [
        ("ALL_GATHER", "all-gather", 64 * MB),
        ("ALL_REDUCE", "all-reduce", 64 * MB),
        ("REDUCE_SCATTER", "reduce-scatter", 128 * MB),
        ("ALL_TO_ALL", "all-to-all", 64 * MB),
    ],
)
def test_a_collective_over_slices(type_: str, kind: str, num_bytes: int, target: str, turned: bool):
    lines = to_slices("r", f"u8[{64 * MB}]", type_, target, turned)
    module = program(core("a", 0.5), *lines, core("b", 0.5), *from_slices("r"), num_partitions=8)
    schedule = run(module, TWO, ACROSS)
    (use,) = schedule.network.values()
    assert (use.instruction.name, use.kind, use.bytes, use.count) == ("r", kind, num_bytes, 1)
    assert (use.route.axes, use.route.group_size, use.route.num_slices, use.route.ici_size) == (("data",), 2, 2, 1)
    assert use.seconds == pytest.approx(NetworkCost(TWO, ACROSS).seconds(kind, num_bytes, use.route))
    assert use.seconds > num_bytes / 2 / TWO.dcn_bandwidth
    assert use.exposed == pytest.approx(use.seconds - 0.5 * MS)
    assert schedule.seconds == pytest.approx(0.5 * MS + use.seconds)
    assert set(schedule.core) == {"a", "b"}  # the host sends
    assert [s.name for s in schedule.spans if s.lane == "network"] == ["r"]


def test_a_permute_over_slices():
    pairs = ",".join(f"{{10000{n}->20000{n}}},{{20000{n}->10000{n}}}" for n in range(8))
    lines = to_slices("r", f"u8[{MB}]", "ONE_TO_ONE", f"{{{pairs}}}")
    schedule = run(program(*lines, *from_slices("r"), num_partitions=8), TWO, ACROSS)
    (use,) = schedule.network.values()
    assert (use.kind, use.bytes, use.route.axes, use.route.num_slices) == ("collective-permute", MB, ("data",), 2)
    assert schedule.seconds == pytest.approx(MB / TWO.dcn_bandwidth + 100e-6)


@pytest.mark.parametrize(
    ("mesh", "target", "axes", "num_slices", "ici_size"),
    [
        (Mesh(data=4, fsdp=4, dcn={"data": 4}), '"{1,2,3,4}x{0:3}"', ("data",), 4, 1),
        (
            Mesh(data=4, fsdp=4, dcn={"data": 2, "fsdp": 2}),
            "{" + ",".join(f"{{{a}0000{n},{b}0000{n}}}" for a, b in ((1, 2), (3, 4)) for n in range(4)) + "}",
            ("fsdp",),  # half of it; the other half is within a slice
            2,
            1,
        ),
        (
            Mesh(data=4, fsdp=4, dcn={"data": 2, "fsdp": 2}),
            "{{" + ",".join(f"{s}0000{n}" for s in (1, 2, 3, 4) for n in range(4)) + "}}",
            ("data", "fsdp"),
            4,
            4,
        ),
    ],
)
def test_groups_over_slices(mesh: Mesh, target: str, axes: tuple[str, ...], num_slices: int, ici_size: int):
    lines = to_slices("r", f"u8[{MB}]", "ALL_REDUCE", target)
    schedule = run(program(*lines, *from_slices("r"), num_partitions=4), FOUR, mesh)
    route = schedule.network["r"].route
    assert (route.axes, route.num_slices, route.ici_size) == (axes, num_slices, ici_size)


def test_the_network_between_slices_goes_on_beside_the_one_within():
    group = "replica_groups={{0,1,2,3,4,5,6,7}}"
    within = f"%g = u8[{640 * MB}]{{0}} all-gather(%x), dimensions={{0}}, {group}"
    lines = to_slices("r", f"u8[{MB}]", "ALL_REDUCE", ALL_OF_TWO)
    schedule = run(program(*lines, within, *from_slices("r"), num_partitions=8), TWO, ACROSS)
    over, inside = schedule.network["r"], schedule.network["g"]
    assert inside.route.num_slices == 1
    assert schedule.seconds == pytest.approx(inside.seconds) == pytest.approx(inside.exposed)
    assert 0 < over.seconds < inside.seconds
    assert over.exposed == 0


def test_another_transfer_of_the_host_is_no_collective():
    lines = [line.replace("_xla_megascale_transfer_type", "_xla_other") for line in
             to_slices("r", f"u8[{MB}]", "ALL_REDUCE", ALL_OF_TWO)]  # fmt: skip
    schedule = run(program(*lines, *from_slices("r"), num_partitions=8), TWO, ACROSS)
    assert (schedule.seconds, schedule.network, schedule.core) == (0, {}, {})


def fused(name: str, channel: int, calls: str = "") -> str:
    """A computation for a fusion that carries on a gather."""
    end = f'%{name}.it = u8[{64 * MB}]{{0}} custom-call(%{name}.g), custom_call_target="{calls}"' if calls else ""
    result = end or f"%{name}.it = f32[8]{{0}} negate(%{name}.p)"
    return (
        f"\n%{name} ({name}.p: f32[8]) -> f32[8] {{\n  %{name}.p = f32[8]{{0}} parameter(0)\n"
        f"  {all_gather(f'{name}.g', channel=channel).replace('%x', f'%{name}.p')}\n  ROOT {result}\n}}\n"
    )


def part(name: str, ms: float | None = None) -> str:
    """A fusion that has its computation; without a time, as the compiler estimates none."""
    line = f"%{name} = u8[{64 * MB}]{{0}} fusion(%x), kind=kCustom, calls=%fused.{name}"
    return line if ms is None else f'{line}, backend_config={{"estimated_cycles":"{round(CYCLES_PER_MS * ms)}"}}'


@pytest.mark.parametrize("busy", [0.25, 1.5])
def test_fusions_of_one_channel_carry_on_one_collective(busy: float):
    computations = "".join(
        [
            fused("fused.start", 7, "AsyncCollectiveStart"),
            fused("fused.a", 7),
            fused("fused.b", 7),
            fused("fused.done", 7, "AsyncCollectiveDone"),
        ]
    )
    half = busy * gather_s() / 2 / MS
    lines = [part("start"), part("a", half), core("c"), part("b", half), part("done"), core("e")]
    schedule = run(program(*lines, computations=computations))
    (use,) = schedule.network.values()
    assert (use.kind, use.count, use.bytes) == ("all-gather", 1, 64 * MB)
    hidden = busy * gather_s() + MS
    assert use.exposed == pytest.approx(max(gather_s() - hidden, 0), abs=1e-9)
    # Neither the start nor the end moves the value itself.
    assert set(schedule.core) == {"a", "b", "c", "e"}
    assert schedule.seconds == pytest.approx(max(gather_s(), hidden) + MS, abs=1e-9)


def test_fusions_of_two_channels_carry_on_two():
    computations = fused("fused.a", 1) + fused("fused.b", 2)
    schedule = run(program(part("a", 0.1), part("b", 0.1), computations=computations))
    assert {name: use.count for name, use in schedule.network.items()} == {"fused.a.g": 1, "fused.b.g": 1}
    assert schedule.seconds == pytest.approx(2 * gather_s())
    assert [use.exposed for use in schedule.network.values()] == pytest.approx([gather_s() - 0.1 * MS] * 2)


def loop(name: str, trips: int, *lines: str) -> str:
    """The computations of a while loop, whose body does not end with its result."""
    body = "".join(f"  {line}\n" for line in lines)
    return f"""
%{name}.cond (t: (f32[8], s32[])) -> pred[] {{
  %{name}.limit = s32[] constant({trips})
  %{name}.t = (f32[8]{{0}}, s32[]) parameter(0)
  %{name}.i = s32[] get-tuple-element(%{name}.t), index=1
  ROOT %{name}.less = pred[] compare(%{name}.i, %{name}.limit), direction=LT
}}

%{name}.body (u: (f32[8], s32[])) -> (f32[8], s32[]) {{
  %{name}.u = (f32[8]{{0}}, s32[]) parameter(0)
  %x = f32[8]{{0}} get-tuple-element(%{name}.u), index=0
  %{name}.j = s32[] get-tuple-element(%{name}.u), index=1
  %{name}.one = s32[] constant(1)
  %{name}.next = s32[] fusion(%{name}.j, %{name}.one), kind=kLoop, calls=%{name}.adds, \
backend_config={{"estimated_cycles":"0"}}
  ROOT %{name}.out = (f32[8]{{0}}, s32[]) tuple(%x, %{name}.next)
{body}}}

%{name}.adds (v: s32[], w: s32[]) -> s32[] {{
  %{name}.v = s32[] parameter(0)
  %{name}.w = s32[] parameter(1)
  ROOT %{name}.added = s32[] add(%{name}.v, %{name}.w)
}}
"""


def while_(name: str) -> str:
    return f"%{name} = (f32[8]{{0}}, s32[]) while(%x), condition=%{name}.cond, body=%{name}.body"


def test_a_loop_counts_as_often_as_it_runs():
    computations = loop("l", 5, copy_start("c"), all_gather_start("g"), core("a", 0.25), copy_done("c"),
                        all_gather_done("g"))  # fmt: skip
    schedule = run(program(core("before"), while_("l"), core("after"), computations=computations))
    period = max(0.25 * MS, copy_s(), gather_s())
    assert schedule.seconds == pytest.approx(2 * MS + 5 * period)
    assert (schedule.core["a"].count, schedule.core["a"].seconds) == (5, pytest.approx(1.25 * MS))
    use = schedule.network["g"]
    assert (use.count, use.seconds) == (5, pytest.approx(5 * gather_s()))
    assert use.exposed == pytest.approx(5 * (gather_s() - 0.25 * MS))
    spans = {s.name: s for s in schedule.spans}
    for name in ("a", "g"):  # once, with how it goes on
        assert spans[name].start == pytest.approx(MS)
        assert spans[name].repeats == ((5, pytest.approx(period)),)
    assert spans["before"].repeats == spans["after"].repeats == ()
    assert spans["after"].start == pytest.approx(MS + 5 * period)


def counted(step: int, root: str) -> Module:
    """A loop to 8 whose body's result is not its last line."""
    computations = loop("l", 8).replace("constant(1)", f"constant({step})")
    before, _, after = computations.partition("  ROOT %l.out = (f32[8]{0}, s32[]) tuple(%x, %l.next)\n")
    assert after
    last = "  %l.last = (f32[8]{0}, s32[]) tuple(%x, %l.one)\n"
    return program(while_("l"), computations=f"{before}  ROOT {root}\n{last}{after}")


@pytest.mark.parametrize("step", [1, 2, 4])
def test_what_a_loop_counts_with_is_in_its_result(step: int):
    module = counted(step, "%l.out = (f32[8]{0}, s32[]) tuple(%x, %l.next)")
    assert module.computations["l.body"].root.name == "l.out"
    assert module.computations["l.body"].instructions[-1].name == "l.last"
    assert module.trip_count(module.entry.by_name["l"]) == 8 // step


def test_a_loop_whose_result_is_no_tuple_counts_by_one():
    module = counted(2, "%l.out = (f32[8]{0}, s32[]) opt-barrier(%l.u)")
    assert module.trip_count(module.entry.by_name["l"]) == 8


def test_loops_in_loops_multiply():
    computations = loop("inner", 3, core("a")) + loop("outer", 4, core("b"), while_("inner"), copy_start("c", 64),
                                                      copy_done("c"))  # fmt: skip
    schedule = run(program(while_("outer"), computations=computations))
    assert (schedule.core["a"].count, schedule.core["b"].count) == (12, 4)
    assert schedule.stalls == pytest.approx(4 * copy_s())
    assert schedule.seconds == pytest.approx(4 * (4 * MS + copy_s()))
    spans = {s.name: s for s in schedule.spans}
    assert spans["a"].repeats == ((4, pytest.approx(4 * MS + copy_s())), (3, pytest.approx(MS)))
    assert spans["b"].repeats == ((4, pytest.approx(4 * MS + copy_s())),)
    assert spans["a"].start == pytest.approx(MS)


@pytest.mark.parametrize("trips", [1, 100])
def test_what_was_sent_before_a_loop_is_under_way_during_it(trips: int):
    computations = loop("l", trips, core("a", 0.01))
    lines = [all_gather_start("g"), while_("l"), all_gather("h", 32, 2), all_gather_done("g")]
    schedule = run(program(*lines, computations=computations))
    during = trips * 0.01 * MS
    assert schedule.network["g"].exposed == pytest.approx(max(gather_s() - during, 0), abs=1e-9)
    assert schedule.network["h"].exposed == pytest.approx(gather_s(32))
    assert schedule.seconds == pytest.approx(max(during, gather_s()) + gather_s(32))


def called(name: str, *lines: str) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"\n%{name} (x: f32[8]) -> f32[8] {{\n  ROOT %x = f32[8]{{0}} parameter(0)\n{body}}}\n"


def test_a_call_runs_each_time_it_is_called():
    lines = ["%one = f32[8]{0} call(%x), to_apply=%f", "%two = f32[8]{0} call(%x), to_apply=%f"]
    schedule = run(program(*lines, computations=called("f", core("a"), all_gather("g"))))
    assert (schedule.core["a"].count, schedule.network["g"].count) == (2, 2)
    assert schedule.seconds == pytest.approx(2 * (MS + gather_s()))


def test_a_called_computation_shares_the_network_with_its_caller():
    lines = [all_gather_start("g"), "%one = f32[8]{0} call(%x), to_apply=%f", all_gather_done("g")]
    schedule = run(program(*lines, computations=called("f", all_gather("h", 32, 2))))
    assert schedule.seconds == pytest.approx(gather_s(64) + gather_s(32))


@pytest.mark.parametrize(
    "how",
    [
        "conditional(%i, %x, %x, %x), branch_computations={%short, %long, %middle}",
        "conditional(%i, %x, %x), true_computation=%long, false_computation=%short",
    ],
)
def test_of_branches_the_longest_runs(how: str):
    computations = (
        called("short", core("a", 0.6), core("a.2", 0.6))
        + called("long", core("b", 1), all_gather("g"), copy_start("c"), copy_done("c"))
        + called("middle", core("d", 1.3))
    )
    schedule = run(program(f"%c = f32[8]{{0}} {how}", computations=computations))
    assert MS + gather_s() + copy_s() > 1.3 * MS
    assert schedule.seconds == pytest.approx(MS + gather_s() + copy_s())
    assert (set(schedule.core), set(schedule.network)) == ({"b"}, {"g"})
    assert schedule.network["g"].count == 1
    assert [s.name for s in schedule.spans] == ["b", "g"]


# Laws over drawn programs.

SIZES = st.sampled_from([1, 8, 32, 64])
TIMES = st.sampled_from([0.01, 0.1, 0.4, 1.0])


@st.composite
def statements(draw: st.DrawFn, numbers: Iterator[int], computations: list[str], depth: int) -> list[str]:
    """Lines of a computation: whatever it starts, it awaits, in any order. Further computations are added to a list."""
    lines: list[str] = []
    under_way: list[str] = []
    kinds = ["core", "copy", "start", "gather", "done"] + ["loop", "call", "branches"] * (depth > 0)
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8)):
        number = next(numbers)
        name = f"n{number}"
        match kind:
            case "core":
                lines.append(core(name, draw(TIMES)))
            case "gather":
                lines.append(all_gather(name, draw(SIZES), number))
            case "copy":
                lines.append(copy_start(name, draw(SIZES)))
                under_way.append(copy_done(name))
            case "start":
                lines.append(all_gather_start(name, draw(SIZES), number))
                under_way.append(all_gather_done(name))
            case "done" if under_way:
                lines.append(under_way.pop(draw(st.integers(0, len(under_way) - 1))))
            case "loop":
                inside = draw(statements(numbers, computations, depth - 1))
                computations.append(loop(name, draw(st.integers(1, 4)), *inside))
                lines.append(while_(name))
            case "call":
                inside = draw(statements(numbers, computations, depth - 1))
                computations.append(called(f"{name}.f", *inside))
                lines.append(f"%{name} = f32[8]{{0}} call(%x), to_apply=%{name}.f")
            case "branches":
                for branch in ("yes", "no"):
                    inside = draw(statements(numbers, computations, depth - 1))
                    computations.append(called(f"{name}.{branch}", *inside))
                branches = f"true_computation=%{name}.yes, false_computation=%{name}.no"
                lines.append(f"%{name} = f32[8]{{0}} conditional(%i, %x, %x), {branches}")
    return lines + draw(st.permutations(under_way))


@st.composite
def programs(draw: st.DrawFn, depth: int) -> Module:
    computations: list[str] = []
    lines = draw(statements(count(), computations, depth))
    return program(*lines, computations="".join(computations))


@settings(max_examples=60)
@given(programs(depth=2))
def test_a_step_is_what_the_core_does_and_waits_for(module: Module):
    schedule = run(module)  # which asserts it
    busy = sum(use.seconds for use in schedule.core.values())
    sent = sum(use.seconds for use in schedule.network.values())
    assert busy <= schedule.seconds * (1 + 1e-9)
    assert max((s.start + s.duration for s in schedule.spans), default=0) <= schedule.seconds + 1e-12
    # With everything one after the other it takes no less.
    copies = _total_copies(module, module.entry.name, 1)
    assert schedule.seconds <= (busy + sent + copies) * (1 + 1e-9)


def _total_copies(module: Module, name: str, times: int) -> float:
    """Time of all copies, of all branches."""
    total = 0.0
    for it in module.computations[name].instructions:
        trips = module.trip_count(it) if it.opcode == "while" else 1
        if it.opcode == "copy-start":
            total += it.arrays[0].bytes / POD.hbm_bandwidth * times
        elif it.opcode in ("while", "call", "conditional"):
            total += sum(_total_copies(module, inner, times * trips) for inner in it.called.values())
    return total


@settings(max_examples=60)
@given(programs(depth=0))
def test_the_core_and_the_network_do_one_thing_at_a_time(module: Module):
    schedule = run(module)
    for lane in ("core", "network"):
        assert_one_at_a_time([s for s in schedule.spans if s.lane == lane])


def assert_one_at_a_time(spans: Sequence[Span]) -> None:
    for before, after in pairwise(sorted(spans, key=lambda span: span.start)):
        assert before.start + before.duration <= after.start + 1e-12


@pytest.mark.parametrize(
    ("name", "topology", "mesh"),
    [("step_v6e_256", "v6e:16x16", Mesh(fsdp=256)), ("step_v6e_16_windowed", "v6e:4x4", Mesh(fsdp=16))],
)
def test_whole_programs_add_up(name: str, topology: str, mesh: Mesh):
    module = Module.parse(gzip.decompress((DATA / f"{name}.hlo.gz").read_bytes()).decode())
    schedule = run(module, SliceTopology.parse(topology), mesh)
    assert 0 < schedule.stalls < 0.01 * schedule.seconds
    # What the compiler fused with other work, or started early, is hidden but for a little; the rest is not.
    beside = {it.name for c in module.computations.values() if c.name.startswith("fused") for it in c.instructions}
    sent, exposed = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for use in schedule.network.values():
        overlaps = use.instruction.name in beside or use.instruction.opcode.endswith("-start")
        sent[overlaps] += use.seconds
        exposed[overlaps] += use.exposed
    assert 0 <= exposed[True] < 0.05 * sent[True]
    assert exposed[False] == pytest.approx(sent[False]) != 0
    assert_one_at_a_time([s for s in schedule.spans if s.lane == "core" and not s.repeats])
    assert max(s.start + s.duration for s in schedule.spans) <= schedule.seconds + 1e-9
    # Fusions that only start or await a collective move nothing themselves.
    assert not any(use.instruction.name.startswith("async-collective-") for use in schedule.core.values())
