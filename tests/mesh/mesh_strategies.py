"""Random meshes and shardings for the laws."""

import math

from hypothesis import strategies as st

from shardtorch.mesh import Mesh, NamedSharding, P

AXES = ("data", "fsdp", "tensor", "context")


@st.composite
def meshes(draw: st.DrawFn, max_devices: int = 64) -> Mesh:
    """Meshes of up to four axes in any order, each with an ICI and a DCN factor."""
    names = draw(st.lists(st.sampled_from(AXES), unique=True))
    room, sizes, dcn = max_devices, {}, {}
    for name in names:
        dcn[name] = draw(st.integers(1, min(3, room)))
        sizes[name] = dcn[name] * draw(st.integers(1, min(4, room // dcn[name])))
        room //= sizes[name]
    return Mesh(sizes, dcn=dcn)


@st.composite
def shardings(draw: st.DrawFn) -> tuple[NamedSharding, tuple[int, ...]]:
    """A sharding and the shape of a tensor that it fits."""
    mesh = draw(meshes())
    rank = draw(st.integers(0, 3))
    entries: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(0, rank))  # the last stands for "nowhere"
        if dim < rank:
            entries[dim].append(axis)
    shape = tuple(math.prod(mesh.shape[axis] for axis in axes) * draw(st.integers(1, 3)) for axes in entries)
    while entries and not entries[-1] and draw(st.booleans()):
        entries.pop()  # trailing dims may be left out
    return NamedSharding(mesh, P(*entries)), shape
