"""Laws and mistakes of `ShardingPlan`."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtorch.errors import ShardingError
from shardtorch.mesh import AxisRules, Mesh, NamedSharding, P, ShardingPlan, matches

MESH = Mesh(fsdp=4, tensor=2)
SHAPES = {
    "embed.weight": (1024, 64),
    "layers.0.attention.wq": (64, 128),
    "layers.1.attention.wq": (64, 128),
    "layers.0.norm": (64,),
    "layers.1.norm": (64,),
}
PLAN = ShardingPlan({"embed.weight": P("tensor", "fsdp"), "layers.*.attention.w*": ("fsdp", "tensor")})


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.bc", False),
        ("a.b", "axb", False),
        ("*", "a", True),
        ("*", "a.b", False),
        ("*", "", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.b.c", False),
        ("w_*", "w_up", True),
        ("*_up", "w_up", True),
        ("w*p", "w_up", True),
        ("w*p", "w.up", False),
        ("**", "a.b.c", True),
        ("**", "", True),
        ("a.**", "a", True),
        ("a.**", "a.b.c", True),
        ("a.**", "ab.c", False),
        ("a.**.c", "a.c", True),
        ("a.**.c", "a.b.b.c", True),
        ("**.bias", "bias", True),
        ("**.bias", "a.b.bias", True),
        ("**.bias", "a.b.no_bias", False),
        ("", "", True),
        ("", "a", False),
        ("a[0]+", "a[0]+", True),
        ("a[0]+", "a00", False),
    ],
)
def test_matches(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


segments = st.text("ab0_", min_size=1, max_size=3)
paths = st.lists(segments, min_size=1, max_size=5)


@given(paths, st.data())
def test_generalising_a_path_keeps_the_match(path: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(path)))
    stop = data.draw(st.integers(start, len(path)))
    text = ".".join(path)
    assert matches(".".join([*path[:start], "**", *path[stop:]]), text)
    assert matches(".".join([*path[:start], *("*" for _ in path[start:stop]), *path[stop:]]), text)
    assert matches(".".join(segment[:1] + "*" for segment in path), text)
    assert not matches(".".join(["*"] * (len(path) + 1)), text)


def test_resolve() -> None:
    shardings = PLAN.resolve(SHAPES, MESH)
    assert list(shardings) == list(SHAPES)
    assert shardings["embed.weight"] == NamedSharding(MESH, P("tensor", "fsdp"))
    assert shardings["layers.1.attention.wq"].spec == P("fsdp", "tensor")
    assert shardings["layers.0.norm"].is_fully_replicated


def test_the_first_match_wins() -> None:
    plan = ShardingPlan({"layers.0.*": None, "layers.**": ("fsdp",)})
    shardings = plan.resolve({"layers.0.w": (8,), "layers.1.w": (8,)}, MESH)
    assert [sharding.spec for sharding in shardings.values()] == [P(), P("fsdp")]


def test_large_is_the_first_size_that_needs_a_pattern() -> None:
    plan = ShardingPlan({"a": None}, large=64)
    assert plan.resolve({"a": (8,), "b": (63,)}, MESH)["b"].spec == P()
    with pytest.raises(ShardingError, match="b: no pattern"):
        plan.resolve({"a": (8,), "b": (8, 8)}, MESH)
    assert ShardingPlan({"a": None, "b": None}, large=64).resolve({"a": (8,), "b": (64,)}, MESH)["b"].spec == P()


def test_resolve_modules() -> None:
    plan = ShardingPlan({}, inputs={"": [["fsdp", "tensor"]]}, outputs={"layers.*": P("fsdp"), "head": ("fsdp", None)})
    inputs, outputs = plan.resolve_modules(["", "layers", "layers.0", "layers.0.mlp", "layers.1", "head"], MESH)
    assert inputs == {"": NamedSharding(MESH, P(("fsdp", "tensor")))}
    assert {path: sharding.spec for path, sharding in outputs.items()} == {
        "layers.0": P("fsdp"),
        "layers.1": P("fsdp"),
        "head": P("fsdp", None),
    }


def test_from_logical() -> None:
    rules = AxisRules([("batch", ("data", "fsdp")), ("embed", "fsdp"), ("mlp", "tensor")])
    plan = ShardingPlan.from_logical(
        {"layers.*.w_up": ("embed", "mlp"), "norm": ("embed",)},
        {"layers.*": ("batch", None, "embed")},
        rules,
        Mesh(fsdp=-1, tensor=2),
        inputs={"": ("batch", None)},
        large=7,
    )
    assert plan == ShardingPlan(
        {"layers.*.w_up": P("fsdp", "tensor"), "norm": P("fsdp")},
        inputs={"": P("fsdp", None)},
        outputs={"layers.*": P("fsdp", None, None)},
        large=7,
    )


def test_a_plan_cannot_be_changed() -> None:
    given_mapping = {"embed.weight": P("fsdp")}
    plan = ShardingPlan(given_mapping)
    given_mapping["other"] = P()
    assert list(plan.parameters) == ["embed.weight"]
    with pytest.raises(TypeError):
        plan.parameters["other"] = P()  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.large = 1  # type: ignore[misc]


def resolve(parameters: dict, shapes: dict = SHAPES, mesh: Mesh = MESH) -> None:
    ShardingPlan(parameters).resolve(shapes, mesh)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            lambda: resolve({"**": None, "layers.*.atention.wq": P()}),
            r"'layers.\*.atention.wq' matches nothing(.|\n)*got: 5 paths, such as embed.weight"
            r"(.|\n)*did you mean 'layers.\*.attention.wq'",
        ),
        (
            lambda: resolve({"**": None, "layer.1.norm": P()}),
            r"matches nothing(.|\n)*mean 'layers.1.norm' or 'layers.0.n",
        ),
        (lambda: resolve({"**": None, "zzz": P()}), "matches nothing(.|\n)*correct the pattern, or remove it"),
        (lambda: resolve({"a": None}, {}), "got: 0 paths, such as none"),
        (
            lambda: resolve({"**": None, "embed.weight": P("fsdp")}),
            r"'embed.weight' decides nothing(.|\n)*embed.weight goes to '\*\*'(.|\n)*move the narrower",
        ),
        (
            lambda: resolve({"layers.**": None}),
            r"embed.weight: no pattern of the plan matches(.|\n)*embed.weight \(1024, 64\)(.|\n)*with None as its spec",
        ),
        (lambda: resolve({"a0": None}, {f"a{i}": (256, 256) for i in range(6)}), r"a3 \(256, 256\) and 2 more"),
        (
            lambda: resolve({"layers.0.norm": P("fsdp"), "**": None}, mesh=Mesh(fsdp=48)),
            "layers.0.norm: dim 0 has size 64, not divisible by mesh axis 'fsdp' of size 48",
        ),
        (
            lambda: resolve({"layers.0.norm": (None, "fsdp"), "**": None}),
            "layers.0.norm: the tensor has 1 dims, and its",
        ),
        (lambda: resolve({"layers.0.norm": ("fdsp",), "**": None}), "layers.0.norm: the mesh has no axis 'fdsp'"),
        (lambda: ShardingPlan({"a": "fsdp"}), r"parameters pattern 'a': a spec is a P(.|\n)*write P\('fsdp'\)"),
        (lambda: ShardingPlan({}, outputs={"a": ("x", "x")}), "outputs pattern 'a': mesh axis 'x' comes twice"),
        (lambda: ShardingPlan({"a..b": None}), "a pattern is a dotted path(.|\n)*got: 'a..b'"),
        (lambda: ShardingPlan({"a.b**": None}), "a pattern is a dotted path"),
        (lambda: ShardingPlan({3: None}), "a pattern is a dotted path"),  # type: ignore[dict-item]
        (lambda: matches(".a", "a"), "a pattern is a dotted path"),
        (
            lambda: ShardingPlan({}, inputs={"layer.*": ("fsdp",)}).resolve_modules(["layers.0", "layers.1"], MESH),
            r"inputs pattern 'layer.\*' matches nothing(.|\n)*did you mean 'layers.\*'",
        ),
        (
            lambda: ShardingPlan({}, outputs={"**": None, "head": P("fsdp")}).resolve_modules(["head"], MESH),
            "outputs pattern 'head' decides nothing",
        ),
        (
            lambda: ShardingPlan({}, outputs={"head": P("data")}).resolve_modules(["head"], MESH),
            "outputs of head: the mesh has no axis 'data'",
        ),
        (
            lambda: ShardingPlan.from_logical({"w": ("embed",)}, {}, AxisRules([("mlp", None)]), MESH),
            "pattern 'w': no rule has the logical axis 'embed'",
        ),
    ],
)
def test_mistakes(mistake, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        mistake()
