"""Facts, laws and mistakes of `SliceTopology`."""

import pytest
from hypothesis import given
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
