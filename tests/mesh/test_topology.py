"""Facts, laws and mistakes of `SliceTopology`."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtorch.errors import TopologyError
from shardtorch.mesh import Mesh, SliceTopology

even = st.sampled_from([2, 4, 8, 16])
topologies = st.one_of(
    st.builds(
        SliceTopology,
        st.sampled_from(["v5e", "v6e"]),
        st.one_of(st.just((1, 1)), st.tuples(even, even)),
        st.integers(1, 4),
    ),
    st.builds(
        SliceTopology,
        st.sampled_from(["v4", "v5p", "tpu7x"]),
        st.tuples(even, even, st.sampled_from([1, 2, 4, 16])),
        st.integers(1, 4),
    ),
)


@given(topologies)
def test_text_round_trips(topology: SliceTopology) -> None:
    assert SliceTopology.parse(str(topology)) == topology
    assert eval(repr(topology)) == topology


@given(topologies)
def test_hosts_hold_one_four_or_eight_chips(topology: SliceTopology) -> None:
    chips, rest = divmod(topology.num_chips, topology.num_hosts)
    assert rest == 0
    assert chips == {(1, 1): 1, (2, 4): 8}.get(topology.ici_shape, 4)
    assert topology.num_hosts % topology.num_slices == 0


@given(topologies)
def test_a_mesh_of_the_slices_is_accepted_and_others_are_not(topology: SliceTopology) -> None:
    per_slice = topology.num_devices // topology.num_slices
    topology.check(Mesh(data=topology.num_slices, fsdp=per_slice, dcn={"data": topology.num_slices}))
    with pytest.raises(TopologyError, match="devices, and the mesh"):
        topology.check(Mesh(fsdp=topology.num_devices + 1))
    if topology.num_slices > 1:
        with pytest.raises(
            TopologyError, match=r"slices, and the DCN factors of the mesh multiply to 1(.|\n)*dcn={'fsdp'"
        ):
            topology.check(Mesh(fsdp=topology.num_devices))


@pytest.mark.parametrize(
    ("text", "chips", "hosts", "devices", "hbm_gib", "tflops"),
    [
        ("v4:2x2x1", 4, 1, 8, 32, 275),
        ("v5e:1x1", 1, 1, 1, 16, 197),
        ("v5e:2x4", 8, 1, 8, 16, 197),
        ("v5p:4x4x4", 64, 16, 64, 95, 459),
        ("v5p:16x20x28", 8960, 2240, 8960, 95, 459),
        ("v6e:16x16", 256, 64, 256, 32, 918),
        ("2 x v6e:16x16", 512, 128, 512, 32, 918),
        ("2xv6e:2x4", 16, 2, 16, 32, 918),
        ("tpu7x:4x4x8", 128, 32, 256, 192, 2307),
    ],
)
def test_facts(text: str, chips: int, hosts: int, devices: int, hbm_gib: int, tflops: int) -> None:
    topology = SliceTopology.parse(text)
    assert (topology.num_chips, topology.num_hosts, topology.num_devices) == (chips, hosts, devices)
    assert (topology.hbm_bytes, topology.bf16_flops) == (hbm_gib * 1024**3, tflops * 1e12)


GENERATIONS = {"v4": "2x2x1", "v5e": "2x4", "v5p": "2x2x1", "v6e": "2x4", "tpu7x": "2x2x1"}


@pytest.mark.parametrize(
    ("generation", "hbm", "ici_link", "dcn", "clock"),
    [
        ("v4", 1.228e12, 50e9, 6.25e9, 1.05e9),
        ("v5e", 0.819e12, 50e9, 3.125e9, 1.5e9),
        ("v5p", 2.765e12, 100e9, 6.25e9, 1.75e9),
        ("v6e", 1.640e12, 112e9, 12.5e9, 1.75e9),
        ("tpu7x", 7.380e12, 100e9, 12.5e9, 2.2e9),
    ],
)
def test_speeds(generation: str, hbm: float, ici_link: float, dcn: float, clock: float) -> None:
    topology = SliceTopology.parse(f"{generation}:{GENERATIONS[generation]}")
    found = (topology.hbm_bandwidth, topology.ici_link_bandwidth, topology.dcn_bandwidth, topology.clock_hz)
    assert found == pytest.approx((hbm, ici_link, dcn, clock), rel=1e-9)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_speeds_fit_together(generation: str) -> None:
    topology = SliceTopology.parse(f"{generation}:{GENERATIONS[generation]}")
    links = 2 * len(topology.ici_shape)
    assert topology.hbm_bandwidth > 2 * links * topology.ici_link_bandwidth
    assert links * topology.ici_link_bandwidth > 10 * topology.dcn_bandwidth > 0
    # Every chip does some 200 to 600 operations in the time that it takes to read a byte.
    assert 100 < topology.bf16_flops / topology.hbm_bandwidth < 1000
    # The peak is that of a whole number of matrix units, which multiply and add 128 x 128 numbers a cycle.
    units = topology.bf16_flops / topology.clock_hz / (2 * 128 * 128)
    assert units == pytest.approx(round(units), rel=0.01)
    assert round(units) in (4, 8, 16, 32)


@given(topologies)
def test_what_a_chip_can_do_does_not_depend_on_the_slice(topology: SliceTopology) -> None:
    least = SliceTopology.parse(f"{topology.generation}:{GENERATIONS[topology.generation]}")
    for fact in ("hbm_bytes", "bf16_flops", "hbm_bandwidth", "ici_link_bandwidth", "dcn_bandwidth", "clock_hz"):
        assert getattr(topology, fact) == getattr(least, fact)


# Where devices are


@settings(max_examples=25)
@given(topologies.filter(lambda topology: topology.num_devices <= 4096))
def test_every_place_holds_the_devices_of_one_chip(topology: SliceTopology) -> None:
    places = Counter(map(topology.place, range(topology.num_devices)))
    sides = [range(size) for size in topology.ici_shape]
    assert set(places) == set(itertools.product(range(topology.num_slices), itertools.product(*sides)))
    assert set(places.values()) == {topology.devices_per_chip}


@given(topologies, st.data())
def test_devices_are_numbered_slice_by_slice_and_along_the_first_dim_first(
    topology: SliceTopology, data: st.DataObject
) -> None:
    device_id = data.draw(st.integers(0, topology.num_devices - 1))
    chips_per_slice = topology.num_chips // topology.num_slices
    slice_index, chip = divmod(device_id // topology.devices_per_chip, chips_per_slice)
    place = tuple(int(i) for i in np.unravel_index(chip, topology.ici_shape, order="F"))
    assert topology.place(device_id) == (slice_index, place)


@given(topologies, st.data())
def test_the_next_chip_along_a_dim_is_as_many_chips_away_as_the_dims_before_it_hold(
    topology: SliceTopology, data: st.DataObject
) -> None:
    device_id = data.draw(st.integers(0, topology.num_devices - 1))
    dim = data.draw(st.integers(0, len(topology.ici_shape) - 1))
    slice_index, place = topology.place(device_id)
    stride = math.prod(topology.ici_shape[:dim]) * topology.devices_per_chip
    if place[dim] + 1 < topology.ici_shape[dim]:
        step, to = stride, place[dim] + 1
    else:  # its neighbour on a ring is the first
        step, to = -stride * place[dim], 0
    assert topology.place(device_id + step) == (slice_index, (*place[:dim], to, *place[dim + 1 :]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "v4:2x2x4",
        "v5e:1x1",
        "v5e:2x4",
        "v5e:4x8",
        "v5p:2x4x4",
        "v6e:4x4",
        "tpu7x:2x2x4",
        "2 x v6e:2x4",
        "3 x v5p:2x2x2",
    ],
)
def test_devices_are_where_libtpu_has_them(text: str) -> None:
    from shardtorch.engine.libtpu._compile import _devices, prepare_environment

    prepare_environment()
    topology = SliceTopology.parse(text)
    for device_id, device in enumerate(_devices(topology)):
        slice_index, place = topology.place(device_id)
        num_dims = len(topology.ici_shape)
        assert tuple(device.coords) == (*place, *[0] * (3 - num_dims))
        assert getattr(device, "slice_index", 0) == slice_index  # it has none if there is one slice


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("v5e:16x16", (True, True)),
        ("v6e:8x16", (False, True)),
        ("v6e:16x4", (True, False)),
        ("v5e:8x8", (False, False)),
        ("v5e:2x4", (False, False)),
        ("v6e:1x1", (False, False)),
        ("2 x v6e:16x16", (True, True)),
        ("v5p:4x4x4", (True, True, True)),
        ("v5p:2x4x8", (False, True, True)),
        ("v5p:2x2x1", (False, False, False)),
        ("v5p:16x20x28", (True, True, True)),
        ("v4:2x2x4", (False, False, True)),
        ("v4:4x6x10", (True, False, False)),
        ("tpu7x:4x8x2", (True, True, False)),
    ],
)
def test_which_dims_are_rings(text: str, wraps: tuple[bool, ...]) -> None:
    topology = SliceTopology.parse(text)
    assert tuple(topology.wraps(dim) for dim in range(len(topology.ici_shape))) == wraps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p", "generation:shape(.|\n)*got: 'v5p'(.|\n)*v5p:4x4x4"),
        ("v5p:4x4xfour", "generation:shape"),
        ("two x v6e:16x16", "generation:shape"),
        ("", "generation:shape"),
        ("h100:8x8", "no TPU generation 'h100'(.|\n)*use one of v4, v5e, v5p, v6e, tpu7x"),
        ("v5p:4x4", "a slice of v5p has 3 dims(.|\n)*v5p:4x4x4"),
        ("v6e:4x4x4", "a slice of v6e has 2 dims(.|\n)*v6e:4x4"),
        ("v6e:16x32", "at most 256 chips, 16x16.(.|\n)*got: v6e:16x32, 512 chips(.|\n)*2 x v6e"),
        ("v5e:8x32", "at most 256 chips, 16x16"),
        ("v4:16x16x24", "a slice of v4 has at most 4096 chips"),
        ("v5p:16x20x30", "a slice of v5p has at most 8960 chips"),
        ("v5p:0x4x4", "are positive"),
        ("v5p:4x4x-4", "are positive"),
        ("0 x v5p:4x4x4", "are positive(.|\n)*got: 0 x v5p:4x4x4"),
        ("v5e:1x2", "first two sizes of a slice are even; 1x1 is one chip"),
        ("v5p:3x4x4", "hosts hold 2x2 chips"),
    ],
)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        SliceTopology.parse(text)


@pytest.mark.parametrize("device", [-1, 64])
def test_only_devices_that_are_there_have_a_place(device: int):
    with pytest.raises(TopologyError, match=rf"2 x v5e:4x8 has devices 0 to 63.\n  got: device {device}"):
        SliceTopology.parse("2 x v5e:4x8").place(device)
