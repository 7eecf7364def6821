"""The named, ordered grid of devices that everything is sharded over."""

import difflib
import keyword
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from shardtorch.errors import ShardingError

_INFERRED = -1  # the size of an axis that `Mesh.bind` computes
_RESERVED = ("axes", "dcn", "self")  # the constructor's own parameters, so no axis can have these names


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """A named, ordered grid of devices: pure data, equal by value, hashable.

    Order the axes by rising network intensity, the busiest last: the last axis joins neighbouring devices.

    Devices are numbered 0..N-1, slice by slice. An axis of size `s` and DCN factor `d` spans `d` slices (data centre
    network, slow) and `s / d` devices within each of them (inter-chip interconnect, fast). The DCN factors vary
    slowest; within a slice the order is row-major, so the last axis varies fastest.

    Args:
      axes: Total size by axis name, in order: at least 1, or -1 for at most one axis, which `bind` infers.
      dcn: By axis name, how many slices the axis spans; 1 where not given. Divides the axis's size.
      **sizes: More axes; the usual way to write them.

    Raises:
      ShardingError: A name is not an identifier or comes twice, a size is not a positive integer or -1, a DCN factor
        names no axis or does not divide its size.

    >>> mesh = Mesh(data=4, fsdp=8, dcn={"data": 2})
    >>> mesh.size, mesh.num_slices, dict(mesh.ici)
    (32, 2, {'data': 2, 'fsdp': 8})
    >>> Mesh(fsdp=-1, tensor=2).bind(8)
    Mesh(fsdp=4, tensor=2)
    """

    axis_names: tuple[str, ...]
    _sizes: tuple[int, ...]
    _dcn: tuple[int, ...]

    def __init__(
        self, axes: Mapping[str, int] | None = None, *, dcn: Mapping[str, int] | None = None, **sizes: int
    ) -> None:
        if not isinstance(axes, Mapping | None):
            raise ShardingError(
                "the axes of a mesh are a mapping of sizes by name.",
                got=repr(axes),
                fix="write Mesh(fsdp=4, tensor=2), or Mesh.parse('fsdp=4,tensor=2') for text.",
            )
        given = dict(axes or {})
        for name in given.keys() & sizes.keys():
            raise ShardingError(f"mesh axis {name!r} is given twice.", got=f"{given} and {sizes}", fix="give it once.")
        given |= sizes
        for name, size in given.items():
            _check_name(name)
            given[name] = _checked_size(f"mesh axis {name!r} has a positive size, or -1 to infer it.", size)
        if list(given.values()).count(_INFERRED) > 1:
            raise ShardingError("at most one mesh axis is -1.", got=_text(given, {}), fix="give the other sizes.")

        if not isinstance(dcn, Mapping | None):
            raise ShardingError(
                "DCN factors are a mapping by axis name.", got=f"dcn={dcn!r}", fix="write it like dcn={'data': 2}."
            )
        factors = dict.fromkeys(given, 1)
        for name, factor in (dcn or {}).items():
            if name not in given:
                raise _unknown_axis(name, tuple(given), got=f"dcn={dict(dcn or {})}")
            factors[name] = _checked_size(f"the DCN factor of mesh axis {name!r} is positive.", factor, lowest=1)
            if given[name] != _INFERRED and given[name] % factors[name]:
                raise ShardingError(
                    f"mesh axis {name!r} has size {given[name]}, not divisible by its DCN factor {factors[name]}.",
                    got=_text(given, factors),
                    fix=f"give the total over all slices, a multiple of {factors[name]}.",
                )
        object.__setattr__(self, "axis_names", tuple(given))
        object.__setattr__(self, "_sizes", tuple(given.values()))
        object.__setattr__(self, "_dcn", tuple(factors.values()))

    @classmethod
    def parse(cls, text: str, *, dcn: str = "") -> "Mesh":
        """The mesh that a command line names.

        Args:
          text: `axis=size` pairs separated by commas, such as `fsdp=4,tensor=2` or `fsdp=-1`.
          dcn: DCN factors, in the same way.

        Raises:
          ShardingError: The text is no such list; the message points at the bad place.

        >>> Mesh.parse("fsdp=4,tensor=2")
        Mesh(fsdp=4, tensor=2)
        """
        return cls(_parse_pairs(text), dcn=_parse_pairs(dcn) if dcn else None)

    def __repr__(self) -> str:
        return _text(dict(zip(self.axis_names, self._sizes, strict=True)), self.dcn)

    @property
    def is_bound(self) -> bool:
        """Whether every size is known. Whatever needs sizes raises ShardingError on a mesh that is not bound."""
        return _INFERRED not in self._sizes

    @property
    def shape(self) -> Mapping[str, int]:
        """Total size by axis, in order."""
        return MappingProxyType(dict(zip(self.axis_names, self._bound_sizes(), strict=True)))

    @property
    def dcn(self) -> Mapping[str, int]:
        """How many slices each axis spans."""
        return MappingProxyType(dict(zip(self.axis_names, self._dcn, strict=True)))

    @property
    def ici(self) -> Mapping[str, int]:
        """Size of each axis within one slice."""
        return MappingProxyType(
            {name: size // factor for (name, size), factor in zip(self.shape.items(), self._dcn, strict=True)}
        )

    @property
    def size(self) -> int:
        """Number of devices, over all slices."""
        return math.prod(self._bound_sizes())

    @property
    def num_slices(self) -> int:
        """Number of slices, joined by the data centre network."""
        return math.prod(self._dcn)

    @property
    def device_ids(self) -> np.ndarray:
        """The device at each place of the grid: integers 0..N-1, of the mesh's shape.

        >>> Mesh(data=2, fsdp=4, dcn={"fsdp": 2}).device_ids
        array([[0, 1, 4, 5],
               [2, 3, 6, 7]])
        """
        num_axes = len(self.axis_names)
        by_slice = np.arange(self.size).reshape((*self._dcn, *self.ici.values()))
        interleaved = [place for axis in range(num_axes) for place in (axis, num_axes + axis)]
        return by_slice.transpose(interleaved).reshape(self._bound_sizes())

    def coordinates(self, device_id: int) -> Mapping[str, int]:
        """The place of a device along each axis: the inverse of `device_ids`, without building it.

        Raises:
          ShardingError: No such device.

        >>> dict(Mesh(data=2, fsdp=4, dcn={"fsdp": 2}).coordinates(5))
        {'data': 0, 'fsdp': 3}
        """
        if not 0 <= device_id < self.size:
            raise ShardingError(
                f"devices of this mesh are numbered 0 to {self.size - 1}.", got=f"{device_id}", fix=f"see {self!r}."
            )
        places = dict.fromkeys(self.axis_names, 0)
        ici, dcn = self.ici, self.dcn
        for name in reversed(self.axis_names):
            device_id, places[name] = divmod(device_id, ici[name])
        for name in reversed(self.axis_names):
            device_id, slice_place = divmod(device_id, dcn[name])
            places[name] += slice_place * ici[name]
        return MappingProxyType(places)

    def axis_size(self, axis: str | Sequence[str]) -> int:
        """Number of devices along an axis, or along several taken together.

        Raises:
          ShardingError: The mesh has no such axis.

        >>> Mesh(data=2, fsdp=4).axis_size(("data", "fsdp"))
        8
        """
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        self.check_axes(names)
        sizes = self.shape
        return math.prod(sizes[name] for name in names)

    def check_axes(self, axes: Sequence[str]) -> None:
        """Raises ShardingError, with the nearest name, if the mesh lacks one of the axes. Needs no sizes."""
        for name in axes:
            if name not in self.axis_names:
                raise _unknown_axis(name, self.axis_names, got=repr(self))

    def bind(self, num_devices: int) -> "Mesh":
        """This mesh on a number of devices: infers the axis of size -1, checks the rest.

        Raises:
          ShardingError: The mesh can't have that many devices; the message names some that could.
        """
        num_devices = _checked_size("a mesh is bound to a positive number of devices.", num_devices, lowest=1)
        pairs = tuple(zip(self._sizes, self._dcn, strict=True))
        fewest = math.prod(factor if size == _INFERRED else size for size, factor in pairs)
        if num_devices % fewest or (self.is_bound and num_devices != fewest):
            needed = f"{fewest}" if self.is_bound else f"a multiple of {fewest}"
            raise ShardingError(
                f"{self!r} needs {needed} devices.",
                got=f"{num_devices} devices",
                fix=self._alternatives(num_devices),
            )
        sizes = (num_devices // fewest * factor if size == _INFERRED else size for size, factor in pairs)
        return Mesh(dict(zip(self.axis_names, sizes, strict=True)), dcn=self.dcn)

    def _bound_sizes(self) -> tuple[int, ...]:
        if not self.is_bound:
            raise ShardingError(
                "the size of a mesh axis is not known yet.", got=repr(self), fix="call mesh.bind(num_devices) first."
            )
        return self._sizes

    def _alternatives(self, num_devices: int) -> str:
        """Up to three meshes of that many devices, those first that change the fewest sizes and change them least."""

        def distance(sizes: tuple[int, ...]) -> tuple[int, float]:
            changed = [(new, old) for new, old in zip(sizes, self._sizes, strict=True) if old not in (new, _INFERRED)]
            return len(changed), sum(abs(math.log(new / old)) for new, old in changed)

        nearest = sorted(_factorisations(num_devices, self._dcn), key=distance)[:3]
        if not nearest:
            return f"use a multiple of {self.num_slices} devices." if self.axis_names else "give the mesh an axis."
        meshes = (Mesh(dict(zip(self.axis_names, sizes, strict=True)), dcn=self.dcn) for sizes in nearest)
        return f"use {' or '.join(map(repr, meshes))}."


def divisors(number: int) -> list[int]:
    """The divisors of a positive number, rising.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*low, *(number // factor for factor in low)})


def _factorisations(number: int, unit: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product whose factors are multiples of the given units."""
    if not unit:
        yield from [()] if number == 1 else []
        return
    for factor in divisors(number):
        if factor % unit[0] == 0:
            yield from ((factor, *rest) for rest in _factorisations(number // factor, unit[1:]))


def _text(sizes: Mapping[str, int], dcn: Mapping[str, int]) -> str:
    arguments = [f"{name}={size}" for name, size in sizes.items()]
    spanning = {name: factor for name, factor in dcn.items() if factor > 1}
    return f"Mesh({', '.join([*arguments, f'dcn={spanning}'] if spanning else arguments)})"


def _parse_pairs(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    start = 0
    for pair in text.split(","):
        try:
            name, size = _parse_pair(pair)
            if name in sizes:
                raise ShardingError(f"mesh axis {name!r} is given twice.", got=pair, fix="give it once.")
        except ShardingError as error:
            margin = " " * (len("  got: ") + start)
            got = f"{text}\n{margin}{'^' * max(len(pair), 1)}"
            raise ShardingError(error.law, got=got, fix=error.fix) from None
        sizes[name] = size
        start += len(pair) + len(",")
    return sizes


def _parse_pair(pair: str) -> tuple[str, int]:
    match = re.fullmatch(r"\s*([^=]*?)\s*=\s*(-?\d+)\s*", pair)
    if match is None:
        raise ShardingError(
            "a mesh is written as axis=size pairs separated by commas.", got=pair, fix="write it like fsdp=4,tensor=2."
        )
    name, size = match[1], int(match[2])
    Mesh({name: size})  # raises for a bad name or size
    return name, size


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name in _RESERVED:
        raise ShardingError(
            f"the name of a mesh axis is a Python identifier, and none of {', '.join(_RESERVED)}.",
            got=repr(name),
            fix="name it like data, fsdp, tensor, context or expert.",
        )


def _checked_size(law: str, size: int, *, lowest: int = _INFERRED) -> int:
    try:
        number = 0 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        number = 0
    if number < lowest or number == 0:
        raise ShardingError(law, got=repr(size), fix="give an integer such as 4.")
    return number


def _unknown_axis(name: object, axis_names: Sequence[str], *, got: str) -> ShardingError:
    close = difflib.get_close_matches(str(name), axis_names, n=1)
    known = ", ".join(map(repr, axis_names)) or "none"
    return ShardingError(
        f"the mesh has no axis {name!r}; its axes are {known}.",
        got=got,
        fix=f"did you mean {close[0]!r}?" if close else "use one of the mesh's axes, or add this one to the mesh.",
    )
