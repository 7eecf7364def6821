"""Initial values: a function of the seed and the parameter's name, read box by box."""

import math
from collections.abc import Mapping

import pytest
import torch
from fsdp_cases import CASES, ZOO_INIT, Case, Zoo, by_layer, on_meta, parameters_of, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardtorch.engine import Engine
from shardtorch.errors import ShardingError
from shardtorch.fsdp import Constant, Initializer, Normal, Uniform, fully_shard, placement
from shardtorch.fsdp._initial import check_rules, default_initializer, read_initial
from shardtorch.fsdp._read import read_parameter
from shardtorch.mesh import Mesh
from shardtorch.models import Normal as NormalOfModels


def everything(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


class Counting:
    """An initializer that keeps the sizes of what it was asked to fill."""

    def __init__(self, initializer: Initializer) -> None:
        self.initializer = initializer
        self.sizes: list[int] = []

    def fill_(self, x: Tensor, generator: torch.Generator) -> Tensor:
        self.sizes.append(x.numel())
        return self.initializer.fill_(x, generator)


@st.composite
def shapes_and_boxes(draw) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple(slice(a, draw(st.integers(a + 1, n))) for a, n in zip(starts, shape, strict=True))


@given(shapes_and_boxes(), st.integers(0, 2**40), st.text(max_size=8))
@settings(deadline=None)
def test_a_box_holds_what_the_whole_holds_there(shape_and_box, seed: int, name: str):
    shape, index = shape_and_box
    read = read_initial(Normal(1.0), seed, name, torch.Size(shape))
    assert torch.equal(read(index), read(everything(shape))[index])


@given(
    st.sampled_from([(3000,), (2, 3000), (3, 7, 300), (2, 1024), (2, 40, 2, 30)]).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.tuples(*(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True).map(sorted) for n in shape)),
        )
    )
)
@settings(deadline=None, max_examples=30)
def test_of_long_rows_a_box_draws_what_it_touches(shape_and_box):
    shape, ranges = shape_and_box
    index = tuple(slice(*r) for r in ranges)
    init = Counting(Normal(1.0))
    box = read_initial(init, 0, "w", torch.Size(shape))(index)
    row_shape = shape[1:] or shape
    touched = torch.zeros(shape)
    touched[index] = 1
    rows = touched.reshape(-1, math.prod(row_shape))
    want = [len(b) for row in rows for b, t in zip(row.split(1024), row.split(1024), strict=True) if t.any()]
    assert sorted(init.sizes) == sorted(want)
    assert torch.equal(box, read_initial(Normal(1.0), 0, "w", torch.Size(shape))(everything(shape))[index])


def test_the_blocks_of_a_row_differ():
    row = read_initial(Normal(1.0), 0, "w", torch.Size((1, 4096)))(everything((1, 4096)))[0]
    assert len({tuple(block.tolist()) for block in row.split(1024)}) == 4
    assert row.std().item() == pytest.approx(1, rel=0.05)


def test_devices_that_hold_columns_draw_the_model_once_between_them(engine: Engine):
    init = Counting(Constant(1.0))
    fully_shard(on_meta(lambda: nn.Linear(8192, 8, bias=False)), Mesh(fsdp=8), init={"**": init}, engine=engine)
    assert sum(init.sizes) == 8192 * 8


def test_draws_depend_on_seed_name_and_row():
    def draw(seed: int, name: str) -> Tensor:
        return read_initial(Normal(1.0), seed, name, torch.Size((4, 8)))(everything((4, 8)))

    x = draw(0, "w")
    assert torch.equal(x, draw(0, "w"))
    assert not torch.equal(x, draw(1, "w"))
    assert not torch.equal(x, draw(0, "v"))
    assert not torch.equal(x[0], x[1])


def test_draws_depend_on_no_setting_of_torch():
    read = read_initial(Normal(1.0), 0, "w", torch.Size((4, 8)))
    x = read(everything((4, 8)))
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert torch.equal(read(everything((4, 8))), x)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def start(reference: Engine) -> Mapping[str, Tensor]:
    """Of plain torch's layout: each parameter read whole."""
    model = on_meta(Zoo)
    return {
        name: read_parameter(model, name, ZOO_INIT, seed=7)(everything(tuple(p.shape)))
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_neither_mesh_nor_engine_nor_stacking_changes_a_bit(engine: Engine, case: Case, start: Mapping[str, Tensor]):
    model = fully_shard(on_meta(Zoo), case.mesh.bind(8), init=ZOO_INIT, seed=7, engine=engine, **case.arguments())
    found = parameters_of(model, num_layers=3)
    assert found.keys() == start.keys()
    for name, expected in start.items():
        assert torch.equal(found[name], expected), name


def test_values_that_are_there_are_kept(engine: Engine):
    torch.manual_seed(0)
    plain = Zoo()
    want = {name: p.detach().clone() for name, p in plain.named_parameters()}
    case = CASES["data=2,fsdp=2,tensor=2, stacked, remat"]
    found = parameters_of(fully_shard(plain, case.mesh, engine=engine, **case.arguments()), num_layers=3)
    for name, expected in want.items():
        assert torch.equal(found[name], expected), name


def test_half_on_meta_half_not(reference: Engine):
    model = nn.Sequential(nn.Linear(4, 4), on_meta(lambda: nn.Linear(4, 4)))
    want = model[0].weight.detach().clone()
    fully_shard(model, Mesh(fsdp=8), init={"1.weight": Constant(3.0)}, engine=reference)
    assert torch.equal(model[0].weight, want)
    assert torch.equal(model[1].weight, torch.full((4, 4), 3.0))


def test_dtypes_are_those_of_the_model(engine: Engine):
    model = on_meta(lambda: nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.float16)))
    fully_shard(model, Mesh(fsdp=8), engine=engine)
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float16] * 2


class TestDefaults:
    """Those of torch, by law where there is one and by the numbers where it is a distribution."""

    @staticmethod
    def values(module: nn.Module, parameter: str) -> Tensor:
        shape = module.get_parameter(parameter).shape
        return read_initial(default_initializer(module, parameter, parameter), 0, parameter, shape)(everything(shape))

    @pytest.mark.parametrize("parameter", ["weight", "bias"])
    def test_linear(self, parameter: str):
        module = nn.Linear(64, 4000)
        ours, theirs = self.values(module, parameter), module.get_parameter(parameter).detach()
        bound = 64**-0.5
        for x in (ours, theirs):
            assert x.abs().max() <= bound
            assert x.abs().max() > 0.99 * bound
            assert abs(x.mean().item()) < 5 * bound / math.sqrt(3 * x.numel())
            assert x.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)

    def test_embedding(self):
        x = self.values(nn.Embedding(1000, 64), "weight")
        assert abs(x.mean().item()) < 5 / math.sqrt(x.numel())
        assert x.std().item() == pytest.approx(1, rel=0.02)
        assert (x.abs() > 2).float().mean().item() == pytest.approx(0.0455, rel=0.1)

    def test_the_padding_of_an_embedding_is_zero(self, engine: Engine):
        model = fully_shard(on_meta(lambda: nn.Embedding(16, 8, padding_idx=-3)), Mesh(fsdp=8), engine=engine)
        (x,) = parameters_of(model, num_layers=1).values()
        assert (x == 0).all(dim=1).nonzero().tolist() == [[13]]

    @pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8)], ids=lambda m: str(m))
    def test_norms(self, module: nn.Module):
        for name, theirs in module.named_parameters():
            assert torch.equal(self.values(module, name), theirs.detach())

    def test_there_are_none_for_what_a_subclass_adds_or_does_otherwise(self):
        class Adapted(nn.Linear):
            def __init__(self) -> None:
                super().__init__(8, 8)
                self.lora = nn.Parameter(torch.zeros(8, 2))

        class Small(nn.Linear):
            def reset_parameters(self) -> None:
                nn.init.normal_(self.weight, std=0.02)

        assert default_initializer(Adapted(), "weight", "weight")
        for module, parameter in ((Adapted(), "lora"), (Small(8, 8), "weight")):
            with pytest.raises(ShardingError, match=f"x.{parameter}: a parameter on the meta device needs a rule"):
                default_initializer(module, parameter, f"x.{parameter}")


def test_the_first_rule_that_matches_wins(reference: Engine):
    rules = {"0.*": Constant(1.0), "**.weight": Constant(2.0)}
    model = fully_shard(
        on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))),
        Mesh(fsdp=8),
        init=rules,
        engine=reference,
    )
    assert [p.detach().unique().tolist() for p in model.parameters()] == [[1.0], [1.0], [2.0]]


def test_a_rule_that_names_nothing_is_an_error():
    with pytest.raises(
        ShardingError, match=r"(?s)init pattern 'norms.weight' matches nothing.*did you mean 'norm.weight'"
    ):
        check_rules(
            {"norm.weight": Constant(1.0), "norms.weight": Constant(1.0)},
            dict(on_meta(lambda: nn.ModuleDict({"norm": nn.LayerNorm(2), "head": nn.Linear(2, 2)})).named_parameters()),
        )


def test_the_initial_values_of_models_and_of_fsdp_are_the_same_draws():
    ours, theirs = (
        read_initial(init, 0, "w", torch.Size((4, 8)))(everything((4, 8)))
        for init in (Normal(0.5), NormalOfModels(0.5))
    )
    assert torch.equal(ours, theirs)
    uniform = read_initial(Uniform(0.25), 0, "w", torch.Size((64, 64)))(everything((64, 64)))
    assert 0.24 < uniform.abs().max() <= 0.25


def test_a_stack_draws_each_layer_by_its_own_name(reference: Engine):
    model = fully_shard(
        on_meta(Zoo),
        Mesh(fsdp=8),
        stack="blocks",
        init={**ZOO_INIT, "blocks.1.up.weight": Constant(9.0)},
        engine=reference,
    )
    where = placement(model)
    tensors = {n: whole(reference, p, where.parameters[n]) for n, p in model.named_parameters()}
    layers = by_layer(tensors, 3)
    assert (layers["blocks.1.up.weight"] == 9).all()
    assert not torch.equal(layers["blocks.0.up.weight"], layers["blocks.2.up.weight"])
