"""Laws and mistakes of `PartitionSpec`."""

import dataclasses

import pytest
from hypothesis import given
from mesh_strategies import shardings

from shardtorch.errors import ShardingError
from shardtorch.mesh import NamedSharding, P, PartitionSpec


@given(shardings())
def test_repr_and_of_round_trip(sharding_and_shape: tuple[NamedSharding, tuple[int, ...]]) -> None:
    spec = sharding_and_shape[0].spec
    assert eval(repr(spec)) == spec
    json_like = [list(entry) if isinstance(entry, tuple) else entry for entry in spec]
    for form in (spec, tuple(spec), json_like):
        assert P.of(form) == spec
        assert hash(P.of(form)) == hash(spec)
    assert spec.axes == tuple(axis for dim in range(len(spec)) for axis in spec.axes_of(dim))


def test_entries_are_normalised() -> None:
    assert P(("x",), (), ["x2", "y"]) == P("x", None, ("x2", "y"))
    assert P is PartitionSpec
    assert P.of(None) == P()
    assert P("x") != P("x", None)
    assert repr(P("fsdp", None)) == "P('fsdp', None)"
    assert P("x", ("y", "z"))[1] == ("y", "z")
    assert P("x").axes_of(5) == ()


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        P("x").entries = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: P("x", "x"), r"'x' comes twice(.|\n)*got: P\('x', 'x'\)"),
        (lambda: P("x", ("y", "x")), "'x' comes twice"),
        (lambda: P(("x", "x")), "'x' comes twice"),
        (lambda: P(0), r"entry of a spec is(.|\n)*got: 0 in P\(0\)"),  # type: ignore[arg-type]
        (lambda: P(("x", None)), "entry of a spec is"),  # type: ignore[arg-type]
        (lambda: P(""), "entry of a spec is"),
        (lambda: P({"x"}), "entry of a spec is"),  # type: ignore[arg-type]
        (lambda: P.of("fsdp"), r"a tuple or a list(.|\n)*fix: write P\('fsdp'\)"),
        (lambda: P.of(3), "a tuple or a list"),  # type: ignore[arg-type]
        (lambda: P.of({"x": 1}), "a tuple or a list"),  # type: ignore[arg-type]
    ],
)
def test_mistakes(mistake, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        mistake()
