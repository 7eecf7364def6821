"""Which sharding each parameter, module input and module output has, by its path in the model."""

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardtorch.errors import ShardingError

from ._mesh import Mesh
from ._rules import AxisRules
from ._sharding import NamedSharding
from ._spec import PartitionSpec, SpecLike

_LARGE = 2**16  # elements: 256 KiB of float32, above any bias or norm weight of the models at hand


@dataclass(frozen=True)
class ShardingPlan:
    """Specs by pattern of dotted path: the whole sharding of a model, kept apart from the model.

    In a pattern, `*` stands for any characters within one segment of the path, and `**`, as a whole segment, for any
    number of segments, none included. The first pattern that matches a path wins. The plan is strict: a pattern that
    never wins is an error, and so is a large parameter that no pattern matches.

    Specs are given as anything that `PartitionSpec.of` takes, and kept as `PartitionSpec`s.

    Raises:
      ShardingError: A pattern or a spec is malformed.

    >>> plan = ShardingPlan({"layers.*.w": ("fsdp", None)})
    >>> plan.resolve({"layers.0.w": (8, 4), "norm": (8,)}, Mesh(fsdp=4))["layers.0.w"].spec
    P('fsdp', None)
    """

    parameters: Mapping[str, SpecLike]
    """Specs of parameters, by pattern of the parameter's name."""
    inputs: Mapping[str, SpecLike] = field(default_factory=dict)
    """Specs of what modules receive, by pattern of the module's path; the root's path is empty."""
    outputs: Mapping[str, SpecLike] = field(default_factory=dict)
    """Specs of what modules return, by pattern of the module's path."""
    large: int = _LARGE
    """Number of elements from which a parameter that no pattern matches is an error. Smaller ones are replicated."""

    def __post_init__(self) -> None:
        for kind in ("parameters", "inputs", "outputs"):
            specs = {}
            if not isinstance(getattr(self, kind), Mapping):
                raise ShardingError(
                    f"the {kind} of a plan are a mapping of specs by pattern.",
                    got=repr(getattr(self, kind)),
                    fix="write it like {'layers.*.up.weight': ('tensor', None)}.",
                )
            for pattern, spec in getattr(self, kind).items():
                _segments(pattern)  # raises if malformed
                try:
                    specs[pattern] = PartitionSpec.of(spec)
                except ShardingError as error:
                    raise error.within(f"{kind} pattern {pattern!r}") from None
            object.__setattr__(self, kind, MappingProxyType(specs))

    @classmethod
    def from_logical(
        cls,
        parameters: Mapping[str, Sequence[str | None]],
        outputs: Mapping[str, Sequence[str | None]],
        rules: AxisRules,
        mesh: Mesh,
        inputs: Mapping[str, Sequence[str | None]] = MappingProxyType({}),
        large: int = _LARGE,
    ) -> "ShardingPlan":
        """The plan of a model that names the logical axis of each dim.

        Args:
          parameters: Logical axes by pattern of the parameter's name.
          outputs: Logical axes by pattern of the module's path.
          rules: What splits each logical axis.
          mesh: The mesh whose axes the rules may use; its sizes don't matter yet.
          inputs: As `outputs`, for what modules receive.
          large: As the field.

        Raises:
          ShardingError: A logical axis has no rule; the message names the pattern.
        """

        def specs(logical: Mapping[str, Sequence[str | None]]) -> dict[str, PartitionSpec]:
            result = {}
            for pattern, axes in logical.items():
                try:
                    result[pattern] = rules.spec(axes, mesh)
                except ShardingError as error:
                    raise error.within(f"pattern {pattern!r}") from None
            return result

        return cls(specs(parameters), specs(inputs), specs(outputs), large)

    def resolve(self, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> dict[str, NamedSharding]:
        """The sharding of every parameter of a model.

        Args:
          shapes: Global shape by parameter name.
          mesh: The mesh to shard over.

        Returns:
          By the same names, in the same order; every sharding fits its shape.

        Raises:
          ShardingError: A pattern matches nothing or is shadowed by earlier ones, a parameter of at least `large`
            elements matches no pattern, a spec does not fit the mesh or the parameter.
        """
        specs = _first_matches("parameters", self.parameters, shapes)
        forgotten = [name for name, shape in shapes.items() if name not in specs and math.prod(shape) >= self.large]
        if forgotten:
            more = f" and {len(forgotten) - 3} more" if len(forgotten) > 3 else ""
            raise ShardingError(
                f"{forgotten[0]}: no pattern of the plan matches this large parameter.",
                got=", ".join(f"{name} {tuple(shapes[name])}" for name in forgotten[:3]) + more,
                fix="add a pattern for it, with None as its spec to replicate it on purpose.",
            )
        shardings = {name: _sharding(mesh, specs.get(name, PartitionSpec()), name) for name in shapes}
        for name, sharding in shardings.items():
            sharding.validate(shapes[name], name)
        return shardings

    def resolve_modules(
        self, module_paths: Sequence[str], mesh: Mesh
    ) -> tuple[dict[str, NamedSharding], dict[str, NamedSharding]]:
        """The shardings of the inputs and of the outputs of modules, by path, for those that a pattern matches.

        Args:
          module_paths: Path of every module of the model, as `named_modules()` gives them.
          mesh: The mesh to shard over.

        Raises:
          ShardingError: A pattern matches nothing or is shadowed by earlier ones, a spec does not fit the mesh.
        """

        def shardings(kind: str, patterns: Mapping[str, SpecLike]) -> dict[str, NamedSharding]:
            specs = _first_matches(kind, patterns, module_paths)
            return {path: _sharding(mesh, spec, f"{kind} of {path}") for path, spec in specs.items()}

        return shardings("inputs", self.inputs), shardings("outputs", self.outputs)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern, as `ShardingPlan` describes it, matches a dotted path.

    Raises:
      ShardingError: The pattern is malformed.

    >>> matches("layers.*.w_*", "layers.3.w_up"), matches("layers.*", "layers.3.w_up"), matches("**.w_up", "w_up")
    (True, False, True)
    """
    return _compiled(pattern).fullmatch(f"{path}." if path else "") is not None


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Matches paths in which a dot follows every segment, so that `**` can stand for none."""
    any_segments = r"(?:[^.]+\.)*"
    return re.compile(
        "".join(
            any_segments if segment == "**" else re.escape(segment).replace(r"\*", "[^.]*") + r"\."
            for segment in _segments(pattern)
        )
    )


def _segments(pattern: str) -> list[str]:
    segments = pattern.split(".") if isinstance(pattern, str) and pattern else []
    if not isinstance(pattern, str) or any(not s or ("**" in s and s != "**") for s in segments):
        raise ShardingError(
            "a pattern is a dotted path whose segments are names, `*` for part of one segment, or `**` for any number.",
            got=repr(pattern),
            fix="write it like 'layers.*.mlp.w_up' or '**.bias'.",
        )
    return segments


def _first_matches(kind: str, specs: Mapping[str, SpecLike], paths: Iterable[str]) -> dict[str, PartitionSpec]:
    """The spec of every path that a pattern matches; raises for a pattern that decides no path."""
    winners = {path: next((pattern for pattern in specs if matches(pattern, path)), None) for path in paths}
    decisive = set(winners.values())
    for pattern in (pattern for pattern in specs if pattern not in decisive):
        shadowed = [path for path in winners if matches(pattern, path)]
        if shadowed:
            raise ShardingError(
                f"{kind} pattern {pattern!r} decides nothing: an earlier pattern takes whatever it matches.",
                got=f"{shadowed[0]} goes to {winners[shadowed[0]]!r}",
                fix="move the narrower pattern up, or remove it.",
            )
        raise ShardingError(
            f"{kind} pattern {pattern!r} matches nothing.",
            got=f"{len(winners)} paths, such as {', '.join(list(winners)[:3]) or 'none'}",
            fix=_close(pattern, winners),
        )
    return {path: PartitionSpec.of(specs[pattern]) for path, pattern in winners.items() if pattern is not None}


def _close(pattern: str, paths: Iterable[str]) -> str:
    """Suggests paths like the pattern, with the number of a layer as `*` if the pattern has stars."""
    generalised = (re.sub(r"(?<![^.])\d+(?![^.])", "*", path) if "*" in pattern else path for path in paths)
    close = difflib.get_close_matches(pattern, list(dict.fromkeys(generalised)), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else "correct the pattern, or remove it."


def _sharding(mesh: Mesh, spec: PartitionSpec, name: str) -> NamedSharding:
    try:
        return NamedSharding(mesh, spec)
    except ShardingError as error:
        raise error.within(name) from None
