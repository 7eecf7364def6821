"""The model of what collectives and operations cost: cases by hand, and laws."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtorch.aot._cost import (
    COLLECTIVES,
    DCN_LATENCY_S,
    HOP_LATENCY_S,
    KERNEL_EFFICIENCY,
    LINK_EFFICIENCY,
    CoreCost,
    NetworkCost,
    Route,
)
from shardtorch.aot._hlo import Instruction, Module
from shardtorch.mesh import Mesh, SliceTopology

POD = SliceTopology.parse("v6e:16x16")
LINK = POD.ici_link_bandwidth * LINK_EFFICIENCY
MB = 10**6


def collective(groups: Sequence[Sequence[int]] | None, kind: str = "all-gather") -> Instruction:
    listed = "" if groups is None else ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    key = "source_target_pairs" if kind.startswith("collective-permute") else "replica_groups"
    return Instruction("it", kind, (), (), "", f"channel_id=1, {key}={{{listed}}}, use_global_device_ids=true")


def groups_along(mesh: Mesh, axes: Sequence[str]) -> list[list[int]]:
    """The devices that differ in these axes only, group by group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in mesh.device_ids.flat:
        place = mesh.coordinates(int(device))
        groups.setdefault(tuple(place[axis] for axis in mesh.axis_names if axis not in axes), []).append(int(device))
    return list(groups.values())


def route(topology: SliceTopology, mesh: Mesh, *axes: str) -> Route:
    return NetworkCost(topology, mesh).route(collective(groups_along(mesh, axes)))


def gather(topology: SliceTopology, mesh: Mesh, *axes: str) -> float:
    return NetworkCost(topology, mesh).seconds("all-gather", 256 * MB, route(topology, mesh, *axes))


def test_a_ring():
    # 15/16 of the result comes over two links; the farthest part from 8 chips away.
    mesh = Mesh(data=16, fsdp=16)
    for axis in mesh.axis_names:
        assert gather(POD, mesh, axis) == pytest.approx(240 * MB / (2 * LINK) + 8 * HOP_LATENCY_S)


def test_both_dims():
    expected = 255 * MB / (4 * LINK) + 16 * HOP_LATENCY_S
    assert gather(POD, Mesh(data=16, fsdp=16), "data", "fsdp") == pytest.approx(expected)
    assert gather(POD, Mesh(fsdp=256), "fsdp") == pytest.approx(expected)
    whole = NetworkCost(POD, Mesh(fsdp=256))
    assert whole.route(collective(None)) == whole.route(collective([range(256)]))


def test_part_of_a_ring_is_a_line():
    # 4 neighbours: 3/4 over the one link at the end.
    mesh = Mesh(data=64, fsdp=4)
    assert route(POD, mesh, "fsdp") == Route(("fsdp",), 4, 1, 4, LINK, 3, 4)
    assert gather(POD, mesh, "fsdp") == pytest.approx(192 * MB / LINK + 3 * HOP_LATENCY_S)


def test_a_strided_group_shares_its_links():
    # Every fourth chip of a ring of 16, along which 4 groups send.
    mesh = Mesh(data=16, fsdp=4, tensor=4)
    found = route(POD, mesh, "fsdp")
    assert (found.group_size, found.hops) == (4, 12)
    assert found.ici_bandwidth == pytest.approx(LINK * 4 / 13)


def test_a_line_is_no_ring():
    small = SliceTopology.parse("v6e:8x8")  # no links from end to end
    assert not small.wraps(0)
    line = route(small, Mesh(data=8, fsdp=8), "fsdp")
    assert (line.ici_bandwidth, line.hops) == (LINK, 7)
    cube = SliceTopology.parse("v5p:4x4x4")
    ring = route(cube, Mesh(data=16, fsdp=4), "fsdp")
    assert (ring.ici_bandwidth, ring.hops) == (2 * cube.ici_link_bandwidth * LINK_EFFICIENCY, 2)


def test_the_devices_of_a_chip_need_no_link():
    topology = SliceTopology.parse("v4:2x2x2")
    found = route(topology, Mesh(data=8, fsdp=2), "fsdp")
    assert (found.group_size, found.hops, found.ici_bandwidth) == (2, 0, topology.hbm_bandwidth)


def test_slices():
    two = SliceTopology.parse("2 x v6e:16x16")
    across = Mesh(data=2, fsdp=256, dcn={"data": 2})
    assert route(two, across, "data") == Route(("data",), 2, 2, 1, two.hbm_bandwidth, 0, 0)
    assert gather(two, across, "data") == pytest.approx(128 * MB / two.dcn_bandwidth + DCN_LATENCY_S)
    assert gather(two, across, "fsdp") == gather(POD, Mesh(fsdp=256), "fsdp")
    whole = route(two, across, "data", "fsdp")
    assert (whole.num_slices, whole.ici_size, whole.group_size) == (2, 256, 512)
    # Within the slice as before; then each chip has 1/256 of it to exchange with the other slice.
    expected = gather(POD, Mesh(fsdp=256), "fsdp") + 0.5 * MB / two.dcn_bandwidth + DCN_LATENCY_S
    assert gather(two, across, "data", "fsdp") == pytest.approx(expected)


def test_all_to_all():
    network = NetworkCost(POD, Mesh(data=16, fsdp=16))
    line, square = (route(POD, Mesh(data=16, fsdp=16), *axes) for axes in (("fsdp",), ("data", "fsdp")))
    # On a ring a byte passes 4 chips on average and has 2 links at each; on a torus 8, and 4 links.
    assert network.seconds("all-to-all", MB, line) == pytest.approx(4 * (15 / 16 * MB / (2 * LINK) + 8 * HOP_LATENCY_S))
    assert network.seconds("all-to-all", MB, square) == pytest.approx(
        8 * (255 / 256 * MB / (4 * LINK) + 16 * HOP_LATENCY_S)
    )
    two, mesh = SliceTopology.parse("2 x v6e:16x16"), Mesh(data=2, fsdp=256, dcn={"data": 2})
    found = NetworkCost(two, mesh).seconds("all-to-all", MB, route(two, mesh, "data"))
    assert found == pytest.approx(MB / 2 / two.dcn_bandwidth + DCN_LATENCY_S)


def permute(topology: SliceTopology, mesh: Mesh, pairs: Sequence[Sequence[int]]) -> Route:
    return NetworkCost(topology, mesh).route(collective(pairs, "collective-permute-start"))


def test_permutes():
    mesh = Mesh(data=16, fsdp=16)
    network = NetworkCost(POD, mesh)
    shift = [(row * 16 + n, row * 16 + (n + 1) % 16) for row in range(16) for n in range(16)]
    found = permute(POD, mesh, shift)
    assert (found.axes, found.group_size, found.num_slices, found.hops) == (("fsdp",), 16, 1, 1)  # around the ring
    assert network.seconds("collective-permute", MB, found) == pytest.approx(MB / LINK + HOP_LATENCY_S)
    assert permute(SliceTopology.parse("v6e:8x8"), Mesh(fsdp=64), [(0, 7), (7, 0)]).hops == 7
    transposed = [(row * 16 + n, n * 16 + row) for row in range(16) for n in range(16)]
    found = permute(POD, mesh, transposed)
    assert (found.axes, found.hops) == (("data", "fsdp"), 16)
    two = SliceTopology.parse("2 x v6e:4x4")
    across = Mesh(data=2, fsdp=16, dcn={"data": 2})
    found = permute(two, across, [(n, (n + 16) % 32) for n in range(32)])
    assert (found.axes, found.num_slices) == (("data",), 2)
    seconds = NetworkCost(two, across).seconds("collective-permute", MB, found)
    assert seconds == pytest.approx(MB / two.dcn_bandwidth + DCN_LATENCY_S)
    still = permute(POD, mesh, [(n, n) for n in range(256)])
    assert (still.axes, still.group_size, still.hops) == ((), 1, 0)


@st.composite
def on_slices(draw: st.DrawFn) -> tuple[SliceTopology, Mesh]:
    """Slices and a mesh that covers them, with any factorisation of their devices and of their number."""
    slice_name = draw(st.sampled_from(["v5e:2x4", "v5e:4x4", "v6e:4x8", "v5p:2x2x4", "v4:2x2x2", "v5p:4x4x4"]))
    num_slices = draw(st.sampled_from([1, 2, 4]))
    topology = dataclasses.replace(SliceTopology.parse(slice_name), num_slices=num_slices)
    names = ("data", "fsdp", "tensor", "context")
    rest, slices, sizes, dcn = topology.num_devices // num_slices, num_slices, {}, {}
    for name in draw(st.permutations(names)):
        last = len(sizes) == len(names) - 1
        factor = rest if last else draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        dcn[name] = slices if last else draw(st.sampled_from([n for n in range(1, slices + 1) if slices % n == 0]))
        rest, slices, sizes[name] = rest // factor, slices // dcn[name], factor * dcn[name]
    return topology, Mesh(sizes, dcn=dcn)


@given(on_slices())
def test_groups_of_axes_are_told_by_their_devices(drawn: tuple[SliceTopology, Mesh]):
    topology, mesh = drawn
    topology.check(mesh)
    network = NetworkCost(topology, mesh)
    wide = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
    for count in range(1, len(wide) + 1):
        for axes in combinations(wide, count):
            groups = groups_along(mesh, axes)
            found = network.route(collective(groups))
            assert found.axes == axes
            assert found.group_size == len(groups[0]) == mesh.axis_size(axes)
            assert found.num_slices == math.prod(mesh.dcn[axis] for axis in axes)
            assert found.ici_size * found.num_slices == found.group_size
            assert found.ici_bandwidth > 0
            assert NetworkCost(topology, mesh).route(collective(groups[::-1])).axes == axes


def test_groups_that_are_no_axis_have_none():
    found = NetworkCost(POD, Mesh(data=16, fsdp=16)).route(collective([range(8), range(8, 16)]))
    assert (found.axes, found.group_size) == ((), 8)


@given(on_slices(), st.data())
def test_more_bytes_take_longer(drawn: tuple[SliceTopology, Mesh], data: st.DataObject):
    topology, mesh = drawn
    wide = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
    axes = data.draw(st.lists(st.sampled_from(wide), min_size=1, unique=True))
    found = route(topology, mesh, *axes)
    network = NetworkCost(topology, mesh)
    few, more = sorted(data.draw(st.tuples(st.integers(1, 2**40), st.integers(1, 2**40))))
    for kind in COLLECTIVES:
        assert 0 < network.seconds(kind, few, found) <= network.seconds(kind, more, found)
    # Scattered, then gathered.
    assert network.seconds("reduce-scatter", few, found) == network.seconds("all-gather", few, found)
    assert network.seconds("all-reduce", few, found) == pytest.approx(2 * network.seconds("all-gather", few, found))


# Operations on the core.

MODULE = """
%product (a: bf16[64,128], b: bf16[128,256]) -> bf16[64,256] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,256]{1,0} parameter(1)
  ROOT %mm = bf16[64,256]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%cut (all: f32[32,1000], i: s32[]) -> f32[1,1000] {
  %all = f32[32,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[1,1000]{1,0} dynamic-slice(%all, %i, %zero), dynamic_slice_sizes={1,1000}
}

%put (whole: f32[32,1000], new: f32[1,1000], j: s32[]) -> f32[32,1000] {
  %whole = f32[32,1000]{1,0} parameter(0)
  %new = f32[1,1000]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %update = f32[32,1000]{1,0} dynamic-update-slice(%whole, %new, %j, %none)
}

ENTRY %main (x: bf16[64,128], y: bf16[128,256], s: f32[32,1000], k: s32[], q: bf16[8,512,128]) -> f32[32,1000] {
  %x = bf16[64,128]{1,0} parameter(0)
  %y = bf16[128,256]{1,0:S(1)} parameter(1)
  %s = f32[32,1000]{1,0} parameter(2)
  %k = s32[] parameter(3)
  %q = bf16[8,512,128]{2,1,0} parameter(4)
  %timed = bf16[64,256]{1,0} fusion(%x, %y), kind=kOutput, calls=%product, backend_config={"estimated_cycles":"3500"}
  %untimed = bf16[64,256]{1,0} fusion(%x, %y), kind=kOutput, calls=%product
  %dot = f32[64,256]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %batched = bf16[8,512,512]{2,1,0} dot(%q, %q), lhs_batch_dims={0}, rhs_batch_dims={0}, rhs_contracting_dims={2}
  %read = f32[1,1000]{1,0} fusion(%s, %k), kind=kLoop, calls=%cut
  %copied = f32[32,1000]{1,0} copy(%s)
  %splash_mha_fwd.1 = bf16[8,512,128]{2,1,0} custom-call(%q, %q), custom_call_target="tpu_custom_call"
  %splash_mha_dkv.1 = bf16[8,512,128]{2,1,0} custom-call(%q, %q), custom_call_target="tpu_custom_call"
  %mine = f32[1,1000]{1,0} custom-call(%s), custom_call_target="tpu_custom_call"
  ROOT %written = f32[32,1000]{1,0} fusion(%s, %read, %k), kind=kLoop, calls=%put
}
"""
V6E = SliceTopology.parse("v6e:2x2")


@pytest.mark.parametrize(
    ("name", "category", "flops", "num_bytes"),
    [
        ("timed", "matmul", 2 * 64 * 128 * 256, 2 * (64 * 128 + 64 * 256)),  # y is in vector memory
        ("untimed", "matmul", 2 * 64 * 128 * 256, 2 * (64 * 128 + 64 * 256)),
        ("dot", "matmul", 2 * 64 * 128 * 256, 2 * 64 * 128 + 4 * 64 * 256),
        ("batched", "matmul", 2 * 8 * 512 * 512 * 128, 2 * 2 * 8 * 512 * 128 + 2 * 8 * 512 * 512),
        ("read", "elementwise", 0, 4000 + 4 + 4000),
        ("written", "elementwise", 0, 4000 + 4 + 4000),
        ("copied", "copy", 0, 2 * 128_000),
        ("splash_mha_fwd.1", "kernel", 2 * 2 * 8 * 512 * 512 * 128 / 2, 3 * 2 * 8 * 512 * 128),
        ("splash_mha_dkv.1", "kernel", 4 * 2 * 8 * 512 * 512 * 128 / 2, 3 * 2 * 8 * 512 * 128),
        ("mine", "kernel", 0, 128_000 + 4000),
    ],
)
def test_work(name: str, category: str, flops: float, num_bytes: int):
    module = Module.parse(MODULE)
    instruction = module.entry.by_name[name]
    operands = [module.entry.by_name[operand] for operand in instruction.operands]
    work = CoreCost(module, V6E).work(instruction, operands)
    assert (work.category, work.flops, work.bytes) == (category, flops, num_bytes)
    peak = V6E.bf16_flops * (KERNEL_EFFICIENCY["v6e"] if category == "kernel" else 1)
    roofline = max(flops / peak, num_bytes / V6E.hbm_bandwidth)
    assert work.seconds == pytest.approx(3500 / V6E.clock_hz if name == "timed" else roofline)


def test_a_device_has_its_share_of_a_chip():
    module = Module.parse(MODULE)
    v4 = SliceTopology.parse("v4:2x2x2")
    assert CoreCost(module, v4).copy_seconds(MB) == pytest.approx(MB / (v4.hbm_bandwidth / 2))
    instruction = module.entry.by_name["copied"]
    seconds = CoreCost(module, v4).work(instruction, [module.entry.by_name["s"]]).seconds
    assert seconds == pytest.approx(256_000 / (v4.hbm_bandwidth / 2))
