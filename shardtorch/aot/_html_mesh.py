"""The mesh as a picture: which part of a tensor each device holds."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from shardtorch.errors import ShardingError
from shardtorch.mesh import Mesh, NamedSharding

Shardings = Mapping[str, tuple[tuple[int, ...], NamedSharding]]
"""Global shape and sharding by the tensor's name."""

_MAX_CELLS = 256
_WRAP = 16  # devices of the last axis that stand in one row
_CELL, _GAP = 22, 3
_LABEL_WIDTH, _LABEL_HEIGHT = 62, 18


def shown_places(mesh: Mesh, max_cells: int = _MAX_CELLS) -> dict[str, tuple[int, ...]]:
    """The places along each axis that a picture of at most `max_cells` devices shows: the first ones and the last.

    >>> shown_places(Mesh(data=2, fsdp=560), max_cells=8)
    {'data': (0, 1), 'fsdp': (0, 1, 2, 559)}
    """
    counts = dict(mesh.shape)
    while math.prod(counts.values()) > max_cells:
        longest = max(counts, key=lambda axis: counts[axis])
        counts[longest] -= 1
    return {
        axis: tuple(range(size)) if counts[axis] == size else (*range(counts[axis] - 1), size - 1)
        for axis, size in mesh.shape.items()
    }


def mesh_data(shardings: Shardings, max_cells: int = _MAX_CELLS) -> dict[str, Any]:
    """What the page's script colours the picture by.

    Returns:
      `devices`: of each shown device, in row-major order of the mesh's axes, its id and where it is.
      `layouts`: of each different way to lie on the mesh, the tile that each shown device holds: per tensor dim, which.
      `tensors`: name, shape, tiles per dim, the spec, number of replicas, and index in `layouts`.

    Raises:
      ShardingError: The shardings are not all on one mesh, or one does not fit its shape.
    """
    mesh = _one_mesh(shardings)
    ids = mesh.device_ids
    devices = [int(ids[tuple(places.values())]) for places in _shown(mesh, max_cells)]
    layouts: dict[tuple[Any, ...], int] = {}
    tiles, tensors = [], []
    for name, (shape, sharding) in shardings.items():
        shard = sharding.shard_shape(shape)
        key = (len(shape), *(sharding.spec.axes_of(dim) for dim in range(len(shape))))
        if key not in layouts:
            layouts[key] = len(tiles)
            indices = (sharding.index_of(device, shape) for device in devices)
            tiles.append([[part.start // max(size, 1) for part, size in zip(i, shard, strict=True)] for i in indices])
        tensors.append(
            {
                "name": name,
                "shape": shape,
                "tiles": [size // max(piece, 1) for size, piece in zip(shape, shard, strict=True)],
                "spec": repr(sharding.spec),
                "replicas": sharding.num_replicas,
                "layout": layouts[key],
            }
        )
    per_slice = mesh.size // mesh.num_slices
    named = [
        [device, ", ".join(f"{axis} {place}" for axis, place in mesh.coordinates(device).items()), device // per_slice]
        for device in devices
    ]
    return {"devices": named, "slices": mesh.num_slices, "layouts": tiles, "tensors": tensors}


def render_mesh(shardings: Shardings) -> str:
    """A choice of tensors, the grid of devices, and room for the tensor, which the page's script fills."""
    mesh = _one_mesh(shardings)
    picture, width, height = _draw(mesh)
    largest = max(shardings, key=lambda name: math.prod(shardings[name][0]))
    options = "".join(
        f'<option value="{number}"{" selected" * (name == largest)}>{escape(name)}</option>'
        for number, name in enumerate(shardings)
    )
    places = shown_places(mesh)
    num_shown = math.prod(map(len, places.values()))
    note = ""
    if num_shown < mesh.size:
        short = [f"{len(places[axis])} of {size:,} along {axis}" for axis, size in mesh.shape.items()
                 if len(places[axis]) < size]  # fmt: skip
        note = f"{num_shown:,} of {mesh.size:,} devices are drawn, the first and the last: {', '.join(short)}."
    data = json.dumps(mesh_data(shardings), separators=(",", ":")).replace("<", "\\u003c")
    widest = round(min(1.3 * width, max(width, 640)))
    return (
        f'<div class="meshhead"><label>tensor <select id="tensor">{options}</select></label>'
        '<span id="spec" class="mono"></span></div><div class="mesh">'
        f'<figure><svg id="mesh" viewBox="0 0 {width:g} {height:g}" style="max-width:{widest}px" role="img" '
        f'aria-label="devices of the mesh">{picture}</svg><p id="holds" class="holds"></p>'
        f'<p class="note">Equal colour, equal part. Point at a device. {note}</p></figure>'
        '<figure><svg id="tile" viewBox="0 0 360 285" role="img" aria-label="what a device holds"></svg></figure></div>'
        f'<script type="application/json" id="meshdata">{data}</script>'
    )


def _one_mesh(shardings: Shardings) -> Mesh:
    meshes = list(dict.fromkeys(sharding.mesh for _, sharding in shardings.values()))
    if len(meshes) != 1:
        raise ShardingError(
            "a page shows shardings on one mesh.",
            got=", ".join(map(repr, meshes)) or "no shardings",
            fix="pass the shardings of one step, or none at all.",
        )
    return meshes[0]


def _shown(mesh: Mesh, max_cells: int = _MAX_CELLS) -> list[dict[str, int]]:
    """The places of each device that is shown, row-major."""
    places = shown_places(mesh, max_cells)
    return [dict(zip(places, device, strict=True)) for device in itertools.product(*places.values())]


@dataclass(frozen=True)
class _Grid:
    """Where the devices of some axes stand, the corner at 0, 0."""

    cells: list[tuple[float, float, dict[str, int]]]
    """Of each device: x, y, and its place along each axis."""
    marks: list[tuple[float, float]]
    """Where devices are left out."""
    labels: list[tuple[float, float, str]]
    """x or y is negative: that many rows above the grid, or columns before it."""
    width: float
    height: float


def _grid(axes: Sequence[str], places: Mapping[str, tuple[int, ...]], hidden: Mapping[str, bool]) -> _Grid:
    """The last axis runs in rows, the one before it down, the next across, and so on."""
    if not axes:
        return _Grid([(0, 0, {})], [], [], _CELL, _CELL)
    axis, inner = axes[0], _grid(axes[1:], places, hidden)
    slots: list[int | None] = list(places[axis])
    if hidden[axis]:
        slots.insert(len(slots) - 1, None)
    level = len(axes) - 1
    gap = _GAP if level < 2 and inner.height == _CELL else 12
    columns = _WRAP if level == 0 else 1 if level % 2 else len(slots)
    cells, marks, labels = [], [], []
    for number, place in enumerate(slots):
        x, y = number % columns * (inner.width + gap), number // columns * (inner.height + gap)
        if place is None:
            marks.append((x + inner.width / 2, y + inner.height / 2))
            continue
        cells += [(x + left, y + top, {axis: place, **rest}) for left, top, rest in inner.cells]
        marks += [(x + left, y + top) for left, top in inner.marks]
        if level % 2:
            labels.append((-(level // 2) - 1, y + inner.height / 2, f"{axis} {place}"))
        elif level:
            labels.append((x + inner.width / 2, -(level // 2) - 1, f"{axis} {place}"))
    across, down = min(columns, len(slots)), -(-len(slots) // columns)
    width, height = across * (inner.width + gap) - gap, down * (inner.height + gap) - gap
    if level == 0:
        labels.append((width / 2, -1, f"{axis} {slots[0]} to {slots[-1]}" + (", row by row" if down > 1 else "")))
    return _Grid(cells, marks, labels + inner.labels, width, height)


def _draw(mesh: Mesh) -> tuple[str, float, float]:
    """The grid of the shown devices as SVG, its width and height."""
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    places = shown_places(mesh)
    grid = _grid(axes, places, {axis: len(places[axis]) < mesh.shape[axis] for axis in axes})
    left = _LABEL_WIDTH * -min((x for x, _, _ in grid.labels if x < 0), default=0) + 2
    top = _LABEL_HEIGHT * -min((y for _, y, _ in grid.labels if y < 0), default=0) + 2
    order = {tuple(device.values()): number for number, device in enumerate(_shown(mesh))}
    parts = [
        f'<rect class="device" data-n="{order[tuple(place.get(axis, 0) for axis in mesh.axis_names)]}" '
        f'x="{left + x:g}" y="{top + y:g}" width="{_CELL}" height="{_CELL}" rx="4"/>'
        for x, y, place in grid.cells
    ]
    parts += [
        f'<text class="tick" x="{left + x:g}" y="{top + y + 4:g}" text-anchor="middle">⋯</text>' for x, y in grid.marks
    ]
    for x, y, text in grid.labels:
        if x < 0:
            place = f'x="{left + (x + 1) * _LABEL_WIDTH - 8:g}" y="{top + y + 4:g}" text-anchor="end"'
        else:
            place = f'x="{left + x:g}" y="{top + (y + 1) * _LABEL_HEIGHT - 6:g}" text-anchor="middle"'
        parts.append(f'<text class="tick" {place}>{escape(text)}</text>')
    return "".join(parts), left + grid.width + 2, top + grid.height + 2
