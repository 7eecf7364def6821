"""Laws and mistakes of `Mesh`."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_strategies import meshes

from shardtorch.errors import ShardingError
from shardtorch.mesh import Mesh


@given(meshes())
def test_repr_round_trips(mesh: Mesh) -> None:
    again = eval(repr(mesh))
    assert again == mesh
    assert hash(again) == hash(mesh)


@given(meshes())
def test_pickle_and_copy_round_trip(mesh: Mesh) -> None:
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert copy.deepcopy(mesh) == mesh


@given(meshes())
def test_every_device_has_one_place_and_coordinates_find_it(mesh: Mesh) -> None:
    grid = mesh.device_ids
    assert grid.shape == tuple(mesh.shape.values())
    assert sorted(grid.flat) == list(range(mesh.size))
    for device_id in range(mesh.size):
        assert grid[tuple(mesh.coordinates(device_id).values())] == device_id


@given(meshes())
def test_neighbours_within_an_ici_block_are_in_one_slice(mesh: Mesh) -> None:
    devices_per_slice = math.prod(mesh.ici.values())
    assert devices_per_slice * mesh.num_slices == mesh.size
    for place in np.ndindex(*mesh.shape.values()):
        block = [index // mesh.ici[axis] for axis, index in zip(mesh.axis_names, place, strict=True)]
        slice_index = np.ravel_multi_index(block, tuple(mesh.dcn.values())) if block else 0
        assert mesh.device_ids[place] // devices_per_slice == slice_index


@given(meshes(), st.data())
def test_bind_infers_any_axis_and_keeps_a_bound_mesh(mesh: Mesh, data: st.DataObject) -> None:
    assert mesh.bind(mesh.size) == mesh
    if mesh.axis_names:
        axis = data.draw(st.sampled_from(mesh.axis_names))
        unbound = Mesh({**mesh.shape, axis: -1}, dcn=mesh.dcn)
        assert not unbound.is_bound
        assert eval(repr(unbound)) == unbound
        assert unbound.bind(mesh.size) == mesh


@given(meshes(max_devices=16), st.integers(1, 32))
def test_bind_to_another_count_suggests_meshes_that_work(mesh: Mesh, num_devices: int) -> None:
    if num_devices == mesh.size:
        return
    with pytest.raises(ShardingError) as caught:
        mesh.bind(num_devices)
    if "use Mesh(" in caught.value.fix:
        for suggestion in caught.value.fix.removeprefix("use ").removesuffix(".").split(" or "):
            assert eval(suggestion).bind(num_devices).num_slices == mesh.num_slices
    else:
        assert num_devices % mesh.num_slices or not mesh.axis_names


@given(meshes().filter(lambda mesh: mesh.num_slices == 1 and mesh.axis_names))
def test_parse_reads_what_a_command_line_says(mesh: Mesh) -> None:
    assert Mesh.parse(",".join(f"{axis}={size}" for axis, size in mesh.shape.items())) == mesh
    assert Mesh.parse(" , ".join(f"{axis} = {size}" for axis, size in mesh.shape.items())) == mesh


def test_equality_is_by_value_and_order() -> None:
    assert Mesh(fsdp=4, tensor=2) == Mesh({"fsdp": 4}, tensor=2) == Mesh(fsdp=np.int64(4), tensor=2, dcn={"fsdp": 1})
    assert Mesh(fsdp=4, tensor=2) != Mesh(tensor=2, fsdp=4)
    assert Mesh(data=4) != Mesh(data=4, dcn={"data": 2})
    assert repr(Mesh(data=4, fsdp=8, dcn={"data": 2})) == "Mesh(data=4, fsdp=8, dcn={'data': 2})"


def test_sizes() -> None:
    mesh = Mesh(data=4, fsdp=8, dcn={"data": 2})
    assert mesh.axis_names == ("data", "fsdp")
    assert (mesh.size, mesh.num_slices) == (32, 2)
    assert dict(mesh.ici) == {"data": 2, "fsdp": 8}
    assert dict(mesh.dcn) == {"data": 2, "fsdp": 1}
    assert mesh.axis_size("fsdp") == 8
    assert mesh.axis_size(("data", "fsdp")) == 32
    assert mesh.axis_size(()) == 1
    assert Mesh().size == 1


def test_a_mesh_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Mesh(fsdp=4).axis_names = ("data",)  # type: ignore[misc]
    with pytest.raises(TypeError):
        Mesh(fsdp=4).shape["fsdp"] = 8  # type: ignore[index]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Mesh(fsdp=0), r"'fsdp' has a positive size, or -1(.|\n)*got: 0"),
        (lambda: Mesh(fsdp=-2), "got: -2"),
        (lambda: Mesh(fsdp=2.0), "got: 2.0"),  # type: ignore[arg-type]
        (lambda: Mesh(fsdp=True), "got: True"),
        (lambda: Mesh(fsdp="4"), "got: '4'"),  # type: ignore[arg-type]
        (lambda: Mesh({"fs dp": 2}), "Python identifier(.|\n)*got: 'fs dp'"),
        (lambda: Mesh({"class": 2}), "Python identifier"),
        (lambda: Mesh({"dcn": 2}), "none of axes, dcn, self"),
        (lambda: Mesh({"fsdp": 2}, fsdp=4), "'fsdp' is given twice"),
        (lambda: Mesh("fsdp=4"), r"mapping of sizes by name(.|\n)*Mesh\.parse"),  # type: ignore[arg-type]
        (lambda: Mesh(data=-1, fsdp=-1), r"at most one mesh axis is -1(.|\n)*got: Mesh\(data=-1, fsdp=-1\)"),
        (lambda: Mesh(data=4, dcn={"date": 2}), "no axis 'date'(.|\n)*did you mean 'data'?"),
        (lambda: Mesh(data=4, dcn={"data": 3}), "size 4, not divisible by its DCN factor 3(.|\n)*multiple of 3"),
        (lambda: Mesh(data=4, dcn={"data": 0}), "DCN factor of mesh axis 'data' is positive"),
        (lambda: Mesh(data=4, dcn={"data": -1}), "DCN factor of mesh axis 'data' is positive"),
        (lambda: Mesh(fsdp=4).axis_size("fdsp"), "no axis 'fdsp'; its axes are 'fsdp'(.|\n)*did you mean 'fsdp'?"),
        (lambda: Mesh().axis_size("fsdp"), "its axes are none"),
        (lambda: Mesh(fsdp=-1).size, r"not known yet(.|\n)*mesh\.bind\(num_devices\)"),
        (lambda: Mesh(fsdp=-1).shape, "not known yet"),
        (lambda: Mesh(fsdp=-1, tensor=2).axis_size("tensor"), "not known yet"),
        (lambda: Mesh(fsdp=-1).device_ids, "not known yet"),
        (lambda: Mesh(fsdp=4).coordinates(4), "numbered 0 to 3"),
        (
            lambda: Mesh(fsdp=4, tensor=2).bind(16),
            r"needs 8 devices(.|\n)*got: 16 devices\n  fix: use Mesh\(fsdp=4, tens",
        ),
        (lambda: Mesh(fsdp=-1, tensor=3).bind(8), r"multiple of 3 devices(.|\n)*or Mesh\(fsdp=4, tensor=2\)"),
        (
            lambda: Mesh(data=-1, dcn={"data": 2}).bind(3),
            "multiple of 2 devices(.|\n)*fix: use a multiple of 2 devices",
        ),
        (lambda: Mesh().bind(2), "fix: give the mesh an axis"),
        (lambda: Mesh(fsdp=-1).bind(0), "positive number of devices"),
    ],
)
def test_mistakes(mistake, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        mistake()


@pytest.mark.parametrize(
    ("text", "bad", "message"),
    [
        ("fsdp=4,tensor", "tensor", "axis=size pairs"),
        ("fsdp=4;tensor=2", "fsdp=4;tensor=2", "axis=size pairs"),
        ("fsdp=4,tensor=two", "tensor=two", "axis=size pairs"),
        ("fsdp=4,tensor=0,data=2", "tensor=0", "'tensor' has a positive size"),
        ("fsdp=4,2=2", "2=2", "Python identifier"),
        ("fsdp=4,fsdp=2", "fsdp=2", "given twice"),
    ],
)
def test_parse_points_at_the_bad_place(text: str, bad: str, message: str) -> None:
    with pytest.raises(ShardingError, match=message) as caught:
        Mesh.parse(text)
    _, shown, marks, _ = str(caught.value).split("\n")
    assert shown == f"  got: {text}"
    assert [char for char, mark in zip(shown.ljust(len(marks)), marks, strict=False) if mark == "^"] == list(bad)
    assert marks.index("^") == len("  got: ") + text.rindex(bad)


@pytest.mark.parametrize("text", ["", "fsdp=4,", "=4", "fsdp=", "fsdp=-1,tensor=-1", "fsdp=4.0", "fsdp=--1"])
def test_parse_rejects(text: str) -> None:
    with pytest.raises(ShardingError):
        Mesh.parse(text)
