"""Laws and mistakes of `AxisRules`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_strategies import AXES, meshes

from shardtorch.errors import ShardingError
from shardtorch.mesh import AxisRules, Mesh, P

NAMES = ("batch", "embed", "mlp", "heads")
RULES = AxisRules(
    [
        ("batch", ("data", "fsdp")),
        ("embed", "fsdp"),
        ("embed", "tensor"),
        ("mlp", "tensor"),
        ("norm", None),
        ("norm", "fsdp"),
    ]
)
MESH = Mesh(data=2, fsdp=2, tensor=2)

targets = st.one_of(st.none(), st.sampled_from(AXES), st.lists(st.sampled_from(AXES), unique=True).map(tuple))
rules_lists = st.lists(st.tuples(st.sampled_from(NAMES), targets))


@given(rules_lists, st.lists(st.sampled_from([*NAMES, None]), max_size=4), meshes())
def test_each_dim_gets_the_first_free_rule(rules: list, logical_axes: list, mesh: Mesh) -> None:
    rules = [*rules, *((name, None) for name in NAMES)]  # so that every name has a rule
    spec = AxisRules(rules).spec(logical_axes, mesh)
    assert len(spec) == len(logical_axes)
    used: set[str] = set()
    for dim, name in enumerate(logical_axes):
        expected: tuple[str, ...] = ()
        for rule_name, target in rules:
            present = [axis for axis in P(target).axes if axis in mesh.axis_names]
            if rule_name == name and (target in (None, ()) or (present and not used.intersection(present))):
                expected = tuple(present)
                break
        assert spec.axes_of(dim) == expected
        used.update(expected)


@pytest.mark.parametrize(
    ("logical_axes", "mesh", "spec"),
    [
        (("embed", "mlp"), MESH, P("fsdp", "tensor")),
        (("batch", None, "embed"), MESH, P(("data", "fsdp"), None, "tensor")),  # fsdp is taken: the second rule
        (("batch", "mlp", "embed"), MESH, P(("data", "fsdp"), "tensor", None)),  # both are taken
        (("embed", "batch"), MESH, P("fsdp", None)),  # a tuple is taken whole or not at all
        (("batch", "embed"), Mesh(fsdp=4), P("fsdp", None)),  # axes that the mesh lacks are left out
        (("embed",), Mesh(tensor=4), P("tensor")),  # a rule that is left with none is passed over
        (("mlp",), Mesh(data=4), P(None)),
        (("norm",), MESH, P(None)),  # None wins over later rules
        (("mlp",), Mesh(tensor=-1), P("tensor")),  # sizes don't matter
        ((), MESH, P()),
    ],
)
def test_spec(logical_axes: tuple, mesh: Mesh, spec: P) -> None:
    assert RULES.spec(logical_axes, mesh) == spec


def test_rules_are_a_value_and_override_replaces_names() -> None:
    assert AxisRules([("batch", ["data", "fsdp"]), ("x", ("fsdp",))]) == AxisRules(
        [("batch", ("data", "fsdp")), ("x", "fsdp")]
    )
    changed = RULES.override([("embed", None), ("new", "data")])
    assert changed.spec(("embed", "new", "mlp"), MESH) == P(None, "data", "tensor")
    assert RULES.spec(("embed",), MESH) == P("fsdp")
    assert eval(repr(RULES)) == RULES


def test_check() -> None:
    RULES.check(MESH)
    RULES.check(Mesh(data=2, expert=1))
    with pytest.raises(ShardingError, match=r"mesh axis 'expert' shards nothing(.|\n)*add a rule that uses 'expert'"):
        RULES.check(Mesh(data=2, expert=2))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: RULES.spec(("embde",), MESH), "logical axis 'embde'(.|\n)*'batch', 'embed', 'mlp'(.|\n)*mean 'embed'"),
        (lambda: RULES.spec(("kv",), MESH), r"add a rule, such as \('kv', None\)"),
        (lambda: AxisRules([]).spec(("kv",), MESH), "rules for nothing"),
        (lambda: RULES.spec("embed", MESH), "one name, or None, per dim"),
        (lambda: RULES.spec(None, MESH), "one name, or None, per dim"),  # type: ignore[arg-type]
        (lambda: AxisRules([("batch", ("data", "data"))]), "rule 'batch': mesh axis 'data' comes twice"),
        (lambda: AxisRules([("batch", 2)]), "rule 'batch': an entry of a spec"),  # type: ignore[list-item]
        (lambda: AxisRules(["batch"]), "a rule is a pair(.|\n)*got: 'batch'"),  # type: ignore[list-item]
        (lambda: AxisRules([(None, "data")]), "a rule is a pair"),  # type: ignore[list-item]
    ],
)
def test_mistakes(mistake, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        mistake()
