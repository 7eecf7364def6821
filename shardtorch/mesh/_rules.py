"""From the names that a model gives its dims to the axes of a mesh."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardtorch.errors import ShardingError

from ._mesh import Mesh
from ._spec import Entry, PartitionSpec


@dataclass(frozen=True, init=False)
class AxisRules:
    """Ordered rules from logical axes ("embed", "heads", "batch") to mesh axes. Immutable, equal by value.

    A model names the logical axis of each dim; the rules say what splits it. For each dim in turn, the rules of its
    name are tried in order, and the first whose mesh axes are all still unused in this tensor wins. A rule for `None`
    wins too: it leaves the dim whole. If none is free, the dim is whole as well.

    Args:
      rules: Pairs of a logical axis and a mesh axis, a tuple of mesh axes, or None. A name may come several times.

    Raises:
      ShardingError: A rule is no such pair.

    >>> rules = AxisRules([("batch", ("data", "fsdp")), ("embed", "fsdp"), ("mlp", "tensor")])
    >>> rules.spec(("embed", "mlp"), Mesh(data=2, fsdp=2, tensor=2))
    P('fsdp', 'tensor')
    >>> rules.spec(("batch", None, "embed"), Mesh(fsdp=4))
    P('fsdp', None, None)
    """

    rules: tuple[tuple[str, Entry], ...]

    def __init__(self, rules: Iterable[tuple[str, Entry | Sequence[str]]]) -> None:
        object.__setattr__(self, "rules", tuple(map(_checked_rule, rules)))

    def spec(self, logical_axes: Sequence[str | None], mesh: Mesh) -> PartitionSpec:
        """How a tensor is split whose dims have these logical axes.

        Args:
          logical_axes: One per dim; None for a dim that is never split.
          mesh: Only its axis names matter. Axes that it lacks are left out of every rule, and a rule that is left with
            none is passed over.

        Returns:
          A spec with one entry per dim.

        Raises:
          ShardingError: No rule has one of the names.
        """
        if isinstance(logical_axes, str) or not isinstance(logical_axes, Sequence):
            raise ShardingError(
                "logical axes are a sequence with one name, or None, per dim.",
                got=repr(logical_axes),
                fix="write it like ('batch', None, 'embed').",
            )
        used: set[str] = set()
        entries: list[tuple[str, ...]] = []
        for name in logical_axes:
            axes = self._first_free(name, mesh, used) if name is not None else ()
            used.update(axes)
            entries.append(axes)
        return PartitionSpec(*entries)

    def override(self, rules: Iterable[tuple[str, Entry | Sequence[str]]]) -> "AxisRules":
        """These rules with all those of the given names replaced.

        >>> AxisRules([("embed", "fsdp"), ("mlp", "tensor")]).override([("embed", None)])
        AxisRules(rules=(('mlp', 'tensor'), ('embed', None)))
        """
        new = AxisRules(rules).rules
        names = {name for name, _ in new}
        return AxisRules([*(rule for rule in self.rules if rule[0] not in names), *new])

    def check(self, mesh: Mesh) -> None:
        """Raises ShardingError if a mesh axis of more than one device is in no rule, so that it would shard nothing."""
        ruled = {axis for _, target in self.rules for axis in PartitionSpec(target).axes}
        for axis, size in mesh.shape.items():
            if size > 1 and axis not in ruled:
                raise ShardingError(
                    f"mesh axis {axis!r} shards nothing: no rule uses it.",
                    got=f"{mesh!r}, and rules that use {', '.join(map(repr, sorted(ruled))) or 'no axis'}",
                    fix=f"add a rule that uses {axis!r}, or take it out of the mesh.",
                )

    def _first_free(self, name: str, mesh: Mesh, used: set[str]) -> tuple[str, ...]:
        targets = [target for rule_name, target in self.rules if rule_name == name]
        if not targets:
            known = dict.fromkeys(rule_name for rule_name, _ in self.rules)
            close = difflib.get_close_matches(str(name), known, n=1)
            raise ShardingError(
                f"no rule has the logical axis {name!r}.",
                got=f"rules for {', '.join(map(repr, known)) or 'nothing'}",
                fix=f"did you mean {close[0]!r}?" if close else f"add a rule, such as ({name!r}, None) for replicated.",
            )
        for target in targets:
            axes = tuple(axis for axis in PartitionSpec(target).axes if axis in mesh.axis_names)
            if target is None or (axes and used.isdisjoint(axes)):
                return axes
        return ()


def _checked_rule(rule: tuple[str, Entry | Sequence[str]]) -> tuple[str, Entry]:
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
        raise ShardingError(
            "a rule is a pair of a logical axis and a mesh axis, a tuple of mesh axes, or None.",
            got=repr(rule),
            fix="write it like ('embed', 'fsdp').",
        )
    name, target = rule
    try:
        return name, PartitionSpec(target)[0]
    except ShardingError as error:
        raise error.within(f"rule {name!r}") from None
