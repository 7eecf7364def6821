"""Which mesh axes split each dim of a tensor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardtorch.errors import ShardingError

Entry = str | tuple[str, ...] | None
"""What splits one dim: nothing, a mesh axis, or several, the first of them varying slowest."""


@dataclass(frozen=True, init=False, repr=False)
class PartitionSpec:
    """For each dim of a tensor, the mesh axes that split it; dims beyond the spec are replicated.

    Immutable and hashable. Specs are equal if their entries are, so `P("x")` and `P("x", None)` are two values although
    they shard a matrix in the same way.

    Args:
      *entries: Per dim `None` (not split), an axis name, or a tuple of axis names, of which the first varies slowest. A
        tuple of one axis becomes that axis, an empty one `None`.

    Raises:
      ShardingError: An entry is something else, or an axis comes twice.

    >>> P("fsdp", None, ("data", "tensor")).axes
    ('fsdp', 'data', 'tensor')
    >>> P(("fsdp",), ())
    P('fsdp', None)
    """

    entries: tuple[Entry, ...]

    def __init__(self, *entries: Entry | Sequence[str]) -> None:
        object.__setattr__(self, "entries", tuple(_normalised(entry, entries) for entry in entries))
        axes = self.axes
        for axis in axes:
            if axes.count(axis) > 1:
                raise ShardingError(
                    f"mesh axis {axis!r} comes twice in a spec, and can split a tensor once.",
                    got=repr(self),
                    fix="leave it in one place; put None or another axis in the other.",
                )

    @classmethod
    def of(cls, spec: "SpecLike") -> "PartitionSpec":
        """The spec that a spec, a tuple, a list (such as JSON gives), or None for a replicated tensor stands for.

        >>> P.of(["fsdp", None, ["data", "tensor"]])
        P('fsdp', None, ('data', 'tensor'))
        """
        if isinstance(spec, PartitionSpec):
            return spec
        if spec is None:
            return cls()
        if not isinstance(spec, tuple | list):
            raise ShardingError(
                "a spec is a P, a tuple or a list with one entry per dim, or None.",
                got=repr(spec),
                fix=f"write P({spec!r})." if isinstance(spec, str) else "write it like P('fsdp', None).",
            )
        return cls(*spec)

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that the spec uses, in the order of the dims."""
        return tuple(axis for dim in range(len(self.entries)) for axis in self.axes_of(dim))

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The mesh axes that split one dim, the first varying slowest; none for a dim beyond the spec."""
        entry = self.entries[dim] if dim < len(self.entries) else None
        if entry is None:
            return ()
        return (entry,) if isinstance(entry, str) else entry

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, dim: int) -> Entry:
        return self.entries[dim]

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self.entries))})"


P = PartitionSpec

SpecLike = PartitionSpec | Sequence[Entry | Sequence[str]] | None
"""What `PartitionSpec.of` takes."""


def _normalised(entry: object, entries: tuple[object, ...]) -> Entry:
    if entry is None or (isinstance(entry, str) and entry):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) and axis for axis in entry):
        return None if not entry else entry[0] if len(entry) == 1 else tuple(entry)
    raise ShardingError(
        "an entry of a spec is None, the name of a mesh axis, or a tuple of names.",
        got=f"{entry!r} in P({', '.join(map(repr, entries))})",
        fix="write it like P('fsdp', None, ('data', 'tensor')).",
    )
